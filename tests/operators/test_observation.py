"""The observation window is the turn's question if it is known, else the last queries."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.shared_prefill import record_prefill
from hetero_kv.families.retrieval.settings import LONGEST_QUESTION, UNKNOWN_QUESTION, RetrievalSettings
from hetero_kv.rules.rule_file import parse_rules

SMALL = {"block_size": 4, "local_windows_len": 8, "sink_tokens": 4, "chunk_size": 16, "max_seq_len": 512}
PRESELECTING = {**SMALL, "preselect_block": True, "preselect_block_count": 4, "top_k_blocks": 2}
CHUNKED = {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}}


def rules_of(operator, **settings):
    attention = {"match": {"name": r"self_attn$"}, "replace": {"class": operator}}
    return parse_rules({"rules": [CHUNKED, attention], "long_context": settings})


def put(model, rules):
    """These rules in the model, instead of others."""
    if getattr(model, "hetero_kv_injection", None) is not None:
        eject(model)
    inject(model, rules)


def random_tokens(count, seed=0):
    return torch.randint(2, 97, (1, count), generator=torch.Generator().manual_seed(seed))


def prefilled(model, *prompts, question=None):
    """A cache after prompts, of the last of which `question` tokens are the question."""
    cache = HeteroCache(model)
    with torch.no_grad():
        for number, prompt in enumerate(prompts, start=1):
            with cache.asking(question if number == len(prompts) else None):
                model(prompt, past_key_values=cache)
    return cache


def looked_at(cache):
    """What the layers have from the observation window: candidates and the representatives of the Context's blocks."""
    arrays = []
    for layer in cache.layers:
        context = layer.block_ids(0)[layer.layout.sink_blocks : layer.context_end].astype(np.int64)
        arrays += [layer.state.candidates, layer.pool.representatives[context].numpy()]
    return arrays


def are_equal(ours, theirs):
    return all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("prompts", [(200,), (1100, 40)], ids=["a first turn", "a short turn"])
def test_dynamic_and_preselection_look_at_the_question_alone(llama, prompts):
    turns = [random_tokens(count, seed) for seed, count in enumerate(prompts)]
    settings = {**PRESELECTING, "max_seq_len": 1200, "chunk_size": 256}
    put(llama, rules_of("RetrievalAttention", **settings))
    # Representatives of a second turn are also those of the first, of whose question nothing is said.
    step = len(turns)
    found_by = {question: looked_at(prefilled(llama, *turns, question=question))[::step] for question in (None, 10, 30)}
    for queries, found in ((10, found_by[10]), (30, found_by[30]), (UNKNOWN_QUESTION, found_by[None])):
        put(llama, rules_of("RetrievalAttention", **settings, observation=queries))
        assert are_equal(found, looked_at(prefilled(llama, *turns, question=10))[::step])
    assert not are_equal(found_by[10], found_by[30])
    assert not are_equal(found_by[10], found_by[None])


def test_a_question_is_watched_across_chunks_and_not_beyond_the_prompt_that_asks_it(llama):
    put(llama, rules_of("RetrievalAttention", **PRESELECTING))
    first = looked_at(prefilled(llama, random_tokens(200), question=40))
    put(llama, rules_of("RetrievalAttention", **{**PRESELECTING, "chunk_size": 256}, observation=40))
    assert are_equal(first[::2], looked_at(prefilled(llama, random_tokens(200)))[::2])
    put(llama, rules_of("RetrievalAttention", **PRESELECTING))
    cache = prefilled(llama, random_tokens(200), question=10)
    with torch.no_grad():
        llama(random_tokens(60, 1), past_key_values=cache)
    assert are_equal(looked_at(cache)[::2], looked_at(prefilled(llama, random_tokens(200), random_tokens(60, 1)))[::2])


def test_a_question_that_is_very_long_is_watched_to_its_last_part():
    settings = RetrievalSettings()
    assert [settings.observed(question) for question in (1, 1000, 10**6)] == [1, 1000, LONGEST_QUESTION]
    assert RetrievalSettings(observation=7).observed(10**6) == RetrievalSettings(observation=7).observed(None) == 7


def test_a_recorded_prefill_knows_its_question(llama):
    prompt = random_tokens(200)
    recording = record_prefill(llama, prompt, observation_len=5, question=150, chunk_size=16, max_seq_len=512)
    put(llama, rules_of("RetrievalAttention", **PRESELECTING, kv_type="FP32"))
    assert are_equal(looked_at(recording.cache_for(llama)), looked_at(prefilled(llama, prompt, question=150)))


@pytest.mark.parametrize("policy", ["snapkv", "pyramidkv"])
def test_a_vote_is_the_questions_and_the_window_is_kept(llama, policy):
    def entries(question=None, **settings):
        put(llama, rules_of("BoundedAttention", policy=policy, budget=40, recent_tokens=12, chunk_size=16, **settings))
        cache = prefilled(llama, random_tokens(120), question=question)
        return [layer.entries.positions for layer in cache.layers]

    found_by = {question: entries(question) for question in (None, 5, 50)}
    for question, voters in ((None, 12), (5, 5), (50, 50)):
        assert are_equal(found_by[question], entries(observation=voters))
        assert all(set(range(108, 120)) <= set(kept.flatten().tolist()) for kept in found_by[question])
    assert not are_equal(found_by[5], found_by[50])


def test_a_question_without_tokens_is_refused(llama):
    put(llama, rules_of("RetrievalAttention", **SMALL))
    with pytest.raises(HeteroKVError, match="question is 0; pass its number of tokens"), HeteroCache(llama).asking(0):
        pass
