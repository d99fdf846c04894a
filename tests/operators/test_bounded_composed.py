"""Eviction policies in some layers of a model and other operators in the rest."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import HeteroCache, eject
from hetero_kv.families.bounded import attention as bounded_attention
from tests.operators.bounded_models import bounded, logits, relative_error, tokens
from tests.support.slow_variants import with_few, with_slow
from tests.support.tiny_models import tiny_model


def operator_in(pattern, name, **kwargs):
    return {"match": {"name": pattern}, "replace": {"class": name, "kwargs": kwargs}}


def retrieval(pattern=r"layers\.[12]\.self_attn$", **kwargs):
    return operator_in(pattern, "RetrievalAttention", kv_type="FP32", **kwargs)


SHADOWKV = operator_in(
    r"layers\.[12]\.self_attn$",
    "ShadowKVAttention",
    rank=16,
    sparse_budget=16,
    landmark_chunk_size=4,
    value_type="FP32",
)
WATCHING = {
    "representatives by attention": {"representative_type": "DYNAMIC", "observation_len": 12, "top_k_blocks": 3},
    "preselection": {
        "preselect_block": True,
        "preselect_block_count": 4,
        "observation_len": 12,
        "top_k_blocks": 2,
    },
    "bounds": {"representative_type": "QUEST", "representative_num": 2, "top_k_blocks": 3},
}


# 53 tokens in strides of 13 end with a single one; 20 and 60 leave 13 and nothing over.
@pytest.mark.parametrize("kwargs", WATCHING.values(), ids=WATCHING)
# Each stride is a forward of all layers.
@pytest.mark.parametrize("stride", with_slow([1, 13, 20], slow=[1, 20]))
def test_retrieval_layers_answer_alike_whether_the_prompt_passes_in_strides_or_not(llama, kwargs, stride):
    answers = []
    for cut in (60, stride):
        cache = bounded(llama, retrieval(**kwargs), policy="tova", budget=200, stride=cut, max_seq_len=200)
        parts = tokens(53), *tokens(6, 1).split(1, dim=1), tokens(27, 2), *tokens(4, 3).split(1, dim=1)
        answers.append(logits(llama, cache, *parts))
        eject(llama)
    assert relative_error(answers[1], answers[0]) < 1e-5


@pytest.mark.parametrize("turns", [(100,), (60, 40)])
def test_shadowkv_layers_factor_a_prompt_that_passes_in_strides_as_a_whole(llama, turns):
    few = {"rank": 8, "sparse_budget": 16, "landmark_chunk_size": 4, "outlier_chunks": 0, "local_chunks": 1}
    above = operator_in(r"layers\.[12]\.self_attn$", "ShadowKVAttention", value_type="FP32", **few)
    parts = [*tokens(sum(turns)).split(turns, dim=1), *tokens(6, 1).split(1, dim=1)]
    answers = []
    for stride in (100, 13):
        cache = bounded(llama, above, policy="tova", budget=200, stride=stride, max_seq_len=200)
        answers.append(logits(llama, cache, *parts))
        eject(llama)
    assert relative_error(answers[1], answers[0]) < 1e-4


def test_the_last_stride_of_a_single_token_attends_to_everything(llama):
    with torch.no_grad():
        expected = llama(tokens(53)).logits
        following = llama(torch.cat([tokens(53), tokens(1, 1)], dim=1)).logits[:, -1:]
    few = retrieval(top_k_blocks=0, sink_tokens=0)
    cache = bounded(llama, few, policy="tova", budget=200, stride=13, max_seq_len=200)
    told = []
    cache.on_progress = lambda *progress: told.append(progress)
    assert relative_error(logits(llama, cache, tokens(53)), expected) < 1e-5
    assert told[-1] == (1, 1, 53, 53)
    # A decoded token has only the window there.
    assert relative_error(logits(llama, cache, tokens(1, 1)), following) > 1e-3


@pytest.mark.parametrize("above", [retrieval(top_k_blocks=2), SHADOWKV], ids=["retrieval", "shadowkv"])
def test_a_catalyst_needs_no_room_in_layers_that_keep_everything(llama, above):
    prompt, following = tokens(48), tokens(4, 1)
    roomy = bounded(llama, above, policy="infinipot", budget=24, catalyst="abcdef", max_seq_len=200)
    expected = logits(llama, roomy, prompt, following)
    # The pot is full with the prompt's last token.
    assert roomy.layers[0].num_entries == 12 + 4
    eject(llama)
    exact = bounded(llama, above, policy="infinipot", budget=24, catalyst="abcdef", max_seq_len=52)
    assert logits(llama, exact, prompt, following).equal(expected)
    assert [layer.get_seq_length() for layer in exact.layers] == [52, 52, 52]
    assert (exact.room, exact.layers[0].num_entries) == (0, 16)


def allocator_of(layer):
    return layer.group.store.allocators[layer.layout]


def test_a_catalyst_takes_no_blocks_from_forks(llama):
    above = retrieval(top_k_blocks=2)
    roomy = bounded(llama, above, policy="infinipot", budget=24, catalyst="abcdef", max_seq_len=200)
    expected = logits(llama, roomy, tokens(47), tokens(1, 1))
    eject(llama)
    # Of 13 blocks the prompt takes 12, and the fork the last, for a copy of the block that it writes to.
    cache = bounded(llama, above, policy="infinipot", budget=24, catalyst="abcdef", max_seq_len=52)
    logits(llama, cache, tokens(47))
    fork = cache.fork()
    # The token fills the pot, which is distilled behind it.
    assert logits(llama, fork, tokens(1, 1)).equal(expected[:, -1:])
    assert fork.layers[0].num_entries == 12
    assert allocator_of(fork.layers[1]).free_blocks == 0


# That no answer changes by it: test_bounded_hooks.py.
@pytest.mark.slow
@pytest.mark.parametrize("catalyst", with_slow(["a", "abcdef"], slow=["a"]))
def test_what_a_catalyst_looks_at_leaves_no_trace_in_retrieval_layers(llama, catalyst):
    parts_of_sequence = {"block_size": 4, "sink_tokens": 4, "local_windows_len": 8}
    above = retrieval(representative_type="DYNAMIC", observation_len=12, top_k_blocks=2, **parts_of_sequence)
    parts = tokens(53), *tokens(9, 1).split(1, dim=1), tokens(27, 2), *tokens(4, 3).split(1, dim=1)
    received = []
    for text in (catalyst, "xyzuvw"):
        # All of what stays is chosen by novelty, so that the catalyst chooses nothing.
        cache = bounded(llama, above, policy="infinipot", budget=24, nuc_ratio=1.0, catalyst=text, max_seq_len=200)
        answer = logits(llama, cache, *parts)
        layer = cache.layers[2]
        finalized = [int(block) for block in layer.block_ids(0)[layer.layout.sink_blocks : layer.context_end]]
        of_closed, of_open = layer.pool.accumulated[finalized], layer.state.accumulated
        assert of_closed.count_nonzero()
        assert of_open.count_nonzero()
        received.append((answer, of_closed, of_open))
        eject(llama)
    assert received[0][0].equal(received[1][0])
    assert received[0][1].equal(received[1][1])
    assert received[0][2].equal(received[1][2])


@pytest.mark.parametrize("retrieving", with_few([r"layers\.[13]\.self_attn$", r"layers\.0\.self_attn$"]))
def test_a_pyramid_stands_on_the_layers_that_have_it(retrieving):
    model = tiny_model("llama", num_hidden_layers=7)
    cache = bounded(
        model, retrieval(retrieving), policy="pyramidkv", budget=30, recent_tokens=8, beta=4, max_seq_len=400
    )
    logits(model, cache, tokens(200))
    entries = [layer.num_entries for layer in cache.strided_layers]
    assert sum(entries) / len(entries) == 30
    assert entries == sorted(entries, reverse=True)
    assert entries[-1] == 8 + round(22 / 4)
    assert entries[0] > entries[-1]


def test_a_pyramid_leaves_the_models_own_sliding_layers_out():
    kinds = ["sliding_attention", "full_attention"] * 3
    model = tiny_model("gemma2", num_hidden_layers=6, layer_types=kinds)
    cache = bounded(model, policy="pyramidkv", budget=30, recent_tokens=8, beta=4)
    logits(model, cache, tokens(200))
    entries = [layer.num_entries for layer in cache.strided_layers]
    assert entries == [30 + 16, 30, 30 - 16]


def test_pyramids_of_different_settings_are_two():
    model = tiny_model("llama", num_hidden_layers=6)
    lower = operator_in(
        r"layers\.[012]\.self_attn$", "BoundedAttention", policy="pyramidkv", budget=50, recent_tokens=8, beta=4
    )
    cache = bounded(model, lower, policy="pyramidkv", budget=30, recent_tokens=8, beta=4)
    logits(model, cache, tokens(200))
    entries = [layer.num_entries for layer in cache.strided_layers]
    assert sum(entries[:3]) == 3 * 50
    assert sum(entries[3:]) == 3 * 30
    assert entries[:3] == sorted(entries[:3], reverse=True)
    assert entries[3] > entries[5]


def test_entries_on_the_cpu_are_dram_and_rotary_tables_are_counted_once(llama):
    cache = bounded(llama, policy="streaming_llm", budget=24)
    logits(llama, cache, tokens(60))
    layer = cache.layers[0]
    assert layer.dram_bytes == layer.entries.nbytes
    assert layer.device_bytes == 0
    assert cache.device_bytes == layer.rotary.nbytes > 0
    eject(llama)
    bounded(llama, policy="tova", budget=24)
    cache = HeteroCache(llama)
    logits(llama, cache, tokens(60))
    assert cache.device_bytes == 0


def test_places_beyond_what_the_model_was_trained_for_are_warned_of_once(llama, caplog):
    bounded_attention._warn.cache_clear()
    bounded(llama, policy="streaming_llm", budget=500, stride=40)
    assert [record.message for record in caplog.records] == [
        "policy streaming_llm may give entries 540 positions, but the model was trained for 512: answers may get "
        "worse when the budget is full; set a budget or a stride that is 28 smaller"
    ]
    caplog.clear()
    eject(llama)
    bounded(llama, policy="streaming_llm", budget=500, stride=40)
    assert not caplog.records
    eject(llama)
    bounded(llama, policy="infinipot", budget=600)
    assert "set a budget that is 88 smaller" in caplog.text
    caplog.clear()
    eject(llama)
    bounded(llama, policy="streaming_llm", budget=500, stride=12)
    eject(llama)
    # It keeps positions: how many there are depends on the sequence.
    bounded(llama, policy="tova", budget=500, stride=40)
    assert not caplog.records
