"""Properties of every registered policy."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from hetero_kv import eject
from hetero_kv.families.bounded import eviction
from tests.operators.bounded_models import (
    MERGED_OR_ASKED,
    bounded,
    conversation,
    logits,
    positions,
    tokens,
)
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model

BUDGET = 24
_MODEL = tiny_model("llama", num_hidden_layers=2, num_attention_heads=6, hidden_size=96)


@pytest.fixture(autouse=True)
def ejected():
    yield
    eject(_MODEL)


def conversed(policy, chunk_size=16, batch=1, rows=slice(None), budget=BUDGET):
    """Logits of a conversation of two turns, and the entries of every layer after it."""
    if getattr(_MODEL, "hetero_kv_injection", None) is not None:
        eject(_MODEL)
    cache = bounded(_MODEL, chunk_size=chunk_size, policy=policy, budget=budget)
    found = logits(_MODEL, cache, *(part[rows] for part in conversation(batch)))
    return found, [layer.entries for layer in cache.strided_layers]


def assert_same(mine, theirs, exactly):
    """The same logits and entries: to the bit, or the same positions and numbers up to rounding."""
    (logits_here, layers_here), (logits_there, layers_there) = mine, theirs
    pairs = [(logits_here, logits_there)]
    for here, there in zip(layers_here, layers_there, strict=True):
        assert here.positions.equal(there.positions)
        pairs += [(here.keys, there.keys), (here.values, there.values)]
    for here, there in pairs:
        if exactly:
            assert here.equal(there)
        else:
            torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-3)


@cache
def said_once(policy):
    """What `conversed` gives, of the first time that a test asks."""
    return conversed(policy)


@pytest.mark.parametrize("policy", with_few(eviction.names(), ("infinipot",)))
def test_the_same_conversation_again_is_the_same_to_the_bit(policy):
    first = said_once(policy)
    torch.manual_seed(1234)
    assert_same(conversed(policy), first, exactly=True)


@pytest.mark.parametrize("policy", with_few(eviction.names(), ("infinipot",)))
def test_how_a_prompt_is_chunked_changes_nothing(policy):
    # Chunks of two cut the catalyst too, and those of one are no decoded tokens.
    whole = conversed(policy, chunk_size=512)
    for chunk_size in (1, 2):
        assert_same(conversed(policy, chunk_size=chunk_size), whole, exactly=False)


@pytest.mark.parametrize("policy", with_few(eviction.names(), ("infinipot",)))
def test_rows_of_a_batch_equal_each_row_alone(policy):
    found, layers = conversed(policy, batch=3)
    together = found[1:2], [layer.selected(torch.tensor([1])) for layer in layers]
    assert_same(together, conversed(policy, batch=3, rows=slice(1, 2)), exactly=False)


@pytest.mark.parametrize("policy", with_few(eviction.names(), ("d2o", "infinipot", "random")))
def test_entries_are_different_tokens_of_the_sequence_in_their_order(policy):
    cache = bounded(_MODEL, policy=policy, budget=BUDGET)
    for part in conversation(2):
        logits(_MODEL, cache, part)
        for layer, kept in zip(cache.strided_layers, positions(cache), strict=True):
            assert kept.shape == (2, 2, layer.num_entries)
            assert (kept.diff(dim=-1) > 0).all()
            assert kept.min() >= 0
            assert kept.max() < cache.get_seq_length()


@pytest.mark.parametrize("policy", MERGED_OR_ASKED)
def test_the_dropped_entries_make_the_difference(policy):
    found, _ = said_once(policy)
    everything, _ = conversed(policy, budget=200)
    # A budget that covers is full attention (test_bounded.py); this one does not cover, and is not.
    assert not torch.allclose(found[:, -5:], everything[:, -5:], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("policy", with_few(eviction.names(), ("cascade",)))
def test_an_answer_of_any_length_holds_no_more_than_the_budget(policy):
    cache = bounded(_MODEL, policy=policy, budget=BUDGET)
    logits(_MODEL, cache, tokens(30))
    for token in tokens(60, 1).split(1, dim=1):
        logits(_MODEL, cache, token)
        assert sum(cache.statistics["cached_entries"]) <= 2 * BUDGET
        assert all(layer.num_entries <= layer.budget for layer in cache.strided_layers)
