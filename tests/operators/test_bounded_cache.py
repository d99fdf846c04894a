"""The cache of bounded layers supports generation, beams, forks and failed turns."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import HeteroCache, eject
from hetero_kv.errors import HeteroKVError
from tests.operators.bounded_models import (
    ANY_STORED,
    MERGED_OR_ASKED,
    Letters,
    bounded,
    conversation,
    logits,
    positions,
    tokens,
)
from tests.support.slow_variants import with_slow
from tests.support.tiny_models import tiny_model

LAYERS = 2


@pytest.fixture(scope="module")
def shared_llama():
    return tiny_model("llama", num_hidden_layers=LAYERS)


@pytest.fixture
def llama(shared_llama):
    """A tiny Llama of two layers, without rules before and after each test."""
    yield shared_llama
    if getattr(shared_llama, "hetero_kv_injection", None) is not None:
        eject(shared_llama)


@pytest.mark.parametrize("policy", ANY_STORED)
def test_generate_is_the_models_own_where_the_budget_covers(llama, policy):
    settings = {"max_new_tokens": 12, "do_sample": False}
    expected = llama.generate(tokens(40), **settings)
    cache = bounded(llama, policy=policy, budget=100)
    assert llama.generate(tokens(40), past_key_values=cache, **settings).equal(expected)
    following = torch.cat([expected, tokens(20, 1)], dim=1)
    eject(llama)
    expected = llama.generate(following, **settings)
    bounded(llama, policy=policy, budget=100)
    assert llama.generate(following, past_key_values=cache, **settings).equal(expected)


@pytest.mark.parametrize("policy", ["streaming_llm", "h2o"])
def test_beams_are_the_models_own_where_the_budget_covers(llama, policy):
    settings = {"max_new_tokens": 10, "num_beams": 3, "do_sample": False}
    expected = llama.generate(tokens(30), **settings)
    cache = bounded(llama, policy=policy, budget=100)
    assert llama.generate(tokens(30), past_key_values=cache, **settings).equal(expected)


@pytest.mark.parametrize("policy", MERGED_OR_ASKED)
def test_a_reordered_row_goes_on_as_the_one_it_was(llama, policy):
    prompts, answers = tokens(50, 4, batch=2), tokens(8, 5)
    cache = bounded(llama, policy=policy, budget=24)
    logits(llama, cache, prompts)
    alone = HeteroCache(llama, tokenizer=Letters())
    logits(llama, alone, prompts[1:])
    cache.reorder_cache(torch.tensor([1, 1]))
    for answer in answers.split(1, dim=1):
        both, one = logits(llama, cache, answer.expand(2, -1)), logits(llama, alone, answer)
        torch.testing.assert_close(both, one.expand(2, -1, -1), rtol=1e-4, atol=1e-4)
    assert all(
        many[:1].equal(one) and many[1:].equal(one) for many, one in zip(*map(positions, (cache, alone)), strict=True)
    )


@pytest.mark.parametrize("policy", MERGED_OR_ASKED)
def test_forks_go_their_own_ways(llama, policy):
    cache = bounded(llama, policy=policy, budget=24)
    logits(llama, cache, tokens(50))
    fork = cache.fork()
    questions = [(tokens(9, 6), *tokens(6, 7).split(1, dim=1)), (tokens(20, 8), *tokens(3, 9).split(1, dim=1))]
    answers = [logits(llama, each, *question) for each, question in zip((cache, fork), questions, strict=True)]
    for question, answer in zip(questions, answers, strict=True):
        alone = HeteroCache(llama, tokenizer=Letters())
        logits(llama, alone, tokens(50))
        assert logits(llama, alone, *question).equal(answer)


@pytest.mark.parametrize("policy", MERGED_OR_ASKED)
@pytest.mark.parametrize("at", with_slow([1, 3 * LAYERS], slow=[1]))
def test_a_turn_that_fails_leaves_the_cache_as_it_was(llama, policy, at):
    cache = bounded(llama, policy=policy, budget=24)
    logits(llama, cache, tokens(50), *tokens(5, 1).split(1, dim=1))
    before, expected = positions(cache), logits(llama, cache.fork(), tokens(40, 2), tokens(1, 3))
    calls = []

    def stop(*progress):
        calls.append(progress)
        if len(calls) == at:
            raise KeyboardInterrupt

    cache.on_progress = stop
    with pytest.raises(KeyboardInterrupt):
        logits(llama, cache, tokens(40, 2))
    cache.on_progress = None
    assert cache.get_seq_length() == 55
    assert all(now.equal(then) for now, then in zip(positions(cache), before, strict=True))
    assert logits(llama, cache, tokens(40, 2), tokens(1, 3)).equal(expected)


@pytest.mark.parametrize("policy", ["h2o", "streaming_llm"])
def test_a_budget_that_is_a_share_is_that_of_the_last_prompt_which_was_not_undone(llama, policy):
    cache = bounded(llama, policy=policy, budget=0.4)
    logits(llama, cache, tokens(50))
    fork = cache.fork()

    def stop(*progress):
        raise KeyboardInterrupt

    cache.on_progress = stop
    with pytest.raises(KeyboardInterrupt):
        logits(llama, cache, tokens(70, 2))
    cache.on_progress = None
    answer = tokens(6, 3).split(1, dim=1)
    assert logits(llama, cache, *answer).equal(logits(llama, fork, *answer))
    assert cache.statistics["cached_entries"] == [20] * LAYERS


def test_a_reset_cache_is_empty(llama):
    cache = bounded(llama, policy="streaming_llm", budget=24)
    expected = logits(llama, cache, *conversation())
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.statistics["cached_entries"] == [0] * LAYERS
    assert logits(llama, cache, *conversation()).equal(expected)


def test_going_back_is_refused_by_name(llama):
    cache = bounded(llama, policy="h2o", budget=24)
    logits(llama, cache, tokens(30))
    assert not cache.is_croppable
    with pytest.raises(HeteroKVError, match=r"cannot roll back.*BoundedLayer"):
        cache.crop(-3)


def test_another_number_of_sequences_is_refused(llama):
    cache = bounded(llama, policy="h2o", budget=24)
    logits(llama, cache, tokens(30, batch=2))
    with pytest.raises(HeteroKVError, match=r"holds 2 sequences, but the call has 1; .*reset"):
        logits(llama, cache, tokens(1))


def test_ejected_models_are_as_they_were(llama):
    bounded(llama, policy="tova", budget=24)
    assert "forward" in vars(llama)
    eject(llama)
    assert "forward" not in vars(llama)
    assert "forward" not in vars(llama.model)
