"""Bounded attention in whole models: exact under covering budgets, bounded below."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import eject
from hetero_kv.families.bounded import eviction
from hetero_kv.families.bounded.entry_buffer import SLACK
from hetero_kv.planning.plan import Footprint
from tests.operators.bounded_models import bounded, conversation, logits, relative_error, tokens
from tests.support.devices import model_on, on_both
from tests.support.slow_variants import with_slow
from tests.support.tiny_models import ALIKE, ARCHITECTURES, tiny_model


@pytest.mark.parametrize(
    ("policy", "device"),
    # In test_covering_budgets.py every policy's recipe is so too.
    on_both(eviction.names(), slow={*eviction.names()} - {"cascade", "d2o", "h2o", "infinipot"}),
    indirect=["device"],
)
def test_a_covering_budget_is_full_attention_over_two_turns(llama, policy, device):
    parts = conversation(batch=2)
    with torch.no_grad():
        expected = llama(torch.cat(parts, dim=1)).logits
    model = model_on(device, llama)
    cache = bounded(model, policy=policy, budget=200)
    assert relative_error(logits(model, cache, *parts), expected) < 1e-5
    assert cache.statistics["cached_entries"] == [95, 95, 95]


@pytest.mark.parametrize(
    "architecture", with_slow(list(ARCHITECTURES), slow=[*ALIKE, "phi", "gpt_neox", "qwen3_moe", "smollm3"])
)
def test_places_among_the_entries_are_positions_while_nothing_is_dropped_in_every_model(architecture):
    model = tiny_model(architecture)
    parts = conversation()
    with torch.no_grad():
        expected = model(torch.cat(parts, dim=1)).logits
    cache = bounded(model, policy="streaming_llm", budget=200)
    assert relative_error(logits(model, cache, *parts), expected) < 2e-5
    assert cache.strided_layers


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("settings", [{}, {"rope_parameters": YARN, "max_position_embeddings": 256}])
def test_one_streaming_layer_is_the_untouched_model_over_sinks_and_newest_tokens_at_positions_from_0(settings):
    # With one layer keys and values depend on their token alone, so that a dropped one leaves no trace.
    model = tiny_model("qwen2", num_hidden_layers=1, **settings)
    sequence = tokens(300)
    cache = bounded(model, policy="streaming_llm", budget=30, sink_tokens=4, stride=16)
    actual = logits(model, cache, sequence[:, :208], *sequence[:, 208:250].split(1, dim=1))
    eject(model)
    with torch.no_grad():
        for at in (100, 160, 207, 230, 249):
            start = at // 16 * 16 if at < 208 else at
            seen = [*range(4), *range(start - 26, at + 1)]
            expected = model(sequence[:, seen]).logits[0, -1]
            torch.testing.assert_close(actual[0, at], expected, rtol=1e-4, atol=1e-4)


def test_one_layer_that_keeps_positions_attends_to_its_entries_where_they_were(llama):
    model = tiny_model("llama", num_hidden_layers=1)
    sequence = tokens(90)
    cache = bounded(model, policy="tova", budget=20, stride=15)
    logits(model, cache, sequence[:, :60])
    for at in range(60, 90):
        kept = cache.layers[0].entries.positions
        assert kept[0, 0].equal(kept[0, 1])
        actual = logits(model, cache, sequence[:, at : at + 1])
        seen = [*kept[0, 0].tolist(), at]
        eject(model)
        with torch.no_grad():
            expected = model(sequence[:, seen], position_ids=torch.tensor([seen])).logits[0, -1]
        torch.testing.assert_close(actual[0, -1], expected, rtol=1e-4, atol=1e-4)
        bounded(model, policy="tova", budget=20, stride=15)


def test_half_precision_models_agree_to_their_precision():
    model = tiny_model("llama").bfloat16()
    parts = conversation()
    with torch.no_grad():
        expected = model(torch.cat(parts, dim=1)).logits
    for policy in ("streaming_llm", "h2o"):
        assert relative_error(logits(model, bounded(model, policy=policy, budget=200), *parts), expected) < 0.05
        eject(model)


# -- bounds


@pytest.mark.parametrize("policy", ["streaming_llm", "h2o"])
def test_a_share_of_the_sequence_grows_with_the_prompts_and_not_with_the_answer(llama, policy):
    cache = bounded(llama, policy=policy, budget=0.25)
    logits(llama, cache, tokens(60), *tokens(20, 1).split(1, dim=1))
    assert cache.statistics["cached_entries"] == [15, 15, 15]
    logits(llama, cache, tokens(40, 2))
    assert cache.statistics["cached_entries"] == [30, 30, 30]
    assert cache.get_seq_length() == 120


@pytest.mark.parametrize("policy", ["streaming_llm", "snapkv"])
def test_a_bounded_cache_has_no_max_seq_len(llama, policy):
    cache = bounded(llama, policy=policy, budget=20, max_seq_len=40)
    assert cache.max_seq_len is None
    assert cache.room is None
    logits(llama, cache, tokens(300))
    assert cache.get_seq_length() == 300


def test_the_footprint_of_strides_does_not_grow_with_the_sequence(llama):
    bounded(llama, policy="streaming_llm", budget=20, stride=100)
    footprint = Footprint.of(llama.hetero_kv_injection)
    assert footprint.memory(1 << 30) == footprint.memory(1 << 12)
    assert footprint.memory(1 << 12).store == 0
    entry = 2 * 2 * 16 * 4
    assert footprint.memory(1 << 12).entries == 3 * (2 * 20 + 100) * entry


def test_the_footprint_of_full_prefill_has_one_layer_of_the_prompt(llama):
    bounded(llama, policy="snapkv", budget=20)
    memory = Footprint.of(llama.hetero_kv_injection).memory(1 << 12)
    entry = 2 * 2 * 16 * 4
    assert memory.layer_kv == (1 << 12) * entry
    # While it answers: what an undone token would come back to, and what stays, each with room for more.
    assert memory.entries == 3 * 2 * (20 + SLACK) * entry


def test_the_footprint_of_shadowkv_with_strides_includes_the_prompt_before_factoring(llama):
    rank = {"rank": 8, "sparse_budget": 16, "landmark_chunk_size": 4}
    above = {"match": {"name": r"layers\.[12]\.self_attn$"}, "replace": {"class": "ShadowKVAttention", "kwargs": rank}}
    low_rank = []
    for stride in (100, 10_000):
        bounded(llama, above, policy="streaming_llm", budget=20, stride=stride)
        low_rank.append(Footprint.of(llama.hetero_kv_injection).memory(5000).low_rank)
        eject(llama)
    assert low_rank[0] - low_rank[1] == 2 * 5000 * 2 * 2 * 16 * 4


def test_the_caches_bytes_are_those_that_it_reports(llama):
    cache = bounded(llama, policy="streaming_llm", budget=20)
    logits(llama, cache, tokens(100))
    # Keys and values in float32, and positions, with room for some more.
    assert cache.dram_bytes == 3 * 2 * (20 + SLACK) * (2 * 16 * 4 + 8)
