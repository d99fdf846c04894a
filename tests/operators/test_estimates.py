"""Residual attention in whole models: chosen blocks are attended to exactly, each other one as one token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.cpu_ops.retrieval_step import RetrievalStep
from hetero_kv.cpu_ops.step_contract import EVERYTHING
from hetero_kv.families.retrieval import layer as retrieval_layer
from hetero_kv.families.retrieval import short_turn
from hetero_kv.operators import RetrievalAttention
from hetero_kv.rules.rule_file import parse_rules
from hetero_kv.store.key_codes import encode
from tests.operators.residual_reference import assert_reference
from tests.operators.token_parts import answer, logits, tokens
from tests.support.slow_variants import combined, with_few, with_slow
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"block_size": 4, "local_windows_len": 8, "sink_tokens": 4, "chunk_size": 16, "max_seq_len": 256}
ESTIMATING = {
    "representative_type": "MEANSTD",
    "representative_num": 2,
    "group_reduce": "softmax",
    "residual_attention": "estimate",
}
RULES = [
    {"match": {"name": r"self_attn$"}, "replace": {"class": "RetrievalAttention"}},
    {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}},
]


@pytest.fixture
def injected():
    """A tiny model with these settings in every layer, and a cache; without them again after the test."""
    models = []

    def made(architecture="llama", shape=None, **settings):
        model = tiny_model(architecture, **(shape or {}))
        models.append(model)
        long_context = {**SMALL, "kv_type": "FP32", "top_k_blocks": 3, "threads_num": 1, **ESTIMATING, **settings}
        inject(model, parse_rules({"rules": RULES, "long_context": long_context}))
        return model, HeteroCache(model)

    yield made
    for model in models:
        if getattr(model, "hetero_kv_injection", None) is not None:
            eject(model)


@pytest.fixture
def checked(monkeypatch):
    """Holds every decoded token's attention in every layer to a reference; counts those that estimated something."""
    seen, layers, call, attend = [], [], RetrievalStep.__call__, RetrievalAttention._attend_natively

    def noted(self, native, groups, *rest, **named):
        layers[:] = [groups[0].layer]
        return attend(self, native, groups, *rest, **named)

    def recorded(native, q, k, v, ranges, table, which, positions, allowed, shared, *rest):
        largest = call(native, q, k, v, ranges, table, which, positions, allowed, shared, *rest)
        scale, softcap, out, lse, _ = rest
        if which != EVERYTHING:
            pool, lengths = layers[0].pool, layers[0].group.store.allocators[layers[0].layout].lengths
            assert_reference(pool, lengths, q, table, *ranges[1:, 0], positions, scale, softcap, out, lse)
            seen.append((positions >= 0).sum(axis=2))
        return largest

    monkeypatch.setattr(RetrievalStep, "__call__", recorded)
    monkeypatch.setattr(RetrievalAttention, "_attend_natively", noted)
    return seen


def test_a_layer_that_attends_to_everything_needs_no_way_to_score(injected):
    model, cache = injected(residual_attention="drop", dense_layer_num=3)
    parts = tokens(45), *answer(5)
    with torch.no_grad():
        whole = model(torch.cat(parts, dim=1), past_key_values=HeteroCache(model)).logits
    torch.testing.assert_close(logits(model, cache, *parts), whole, rtol=1e-3, atol=1e-3)


# Scores that are capped, attention sinks that are learned, and heads of several dimensions.
@pytest.mark.parametrize("architecture", with_slow(["llama", "gemma2", "gpt_oss", "deepseek_v3"], slow=["deepseek_v3"]))
@pytest.mark.parametrize("target_mass", [pytest.param("none", marks=pytest.mark.slow), 0.9])
def test_blocks_that_fill_are_estimated_like_those_of_the_prompt(injected, checked, architecture, target_mass):
    whole = {"layer_types": ["full_attention"] * 3} if architecture in ("gemma2", "gpt_oss") else {}
    model, cache = injected(architecture, whole, target_mass=target_mass, head_select_mode="SEPARATE")
    logits(model, cache, tokens(45), *answer(9))
    assert len(checked) >= 3 * 9
    share = cache.statistics["estimated_share"]
    assert all(0 < each < 1 for each in share)


# Types differ by how a number is read, which the kernels' own tests have.
@pytest.mark.slow
@pytest.mark.parametrize("stored", [("Q8_0", "Q8_0"), *(("auto", kind) for kind in ("FP16", "BF16", "Q8_0", "Q4_0"))])
def test_every_storage_type_is_estimated_from(injected, checked, stored):
    settings = dict(zip(("representative_storage", "kv_type"), stored, strict=True))
    model, cache = injected("llama", {"head_dim": 32}, **settings, block_size=32, sink_tokens=32, top_k_blocks=1)
    logits(model, cache, tokens(190), *answer(3))
    assert len(checked) >= 3 * 3


# Exactness of such blocks: test_storage_types.py. Keys of four bits are scored themselves, others by coarse copies.
@pytest.mark.slow
@pytest.mark.parametrize(("kv_type", "nearness"), [("Q8_0", 1e-2), ("Q4_0", 1e-4)])
def test_blocks_of_16_tokens_in_few_bits_are_estimated_from(injected, checked, kv_type, nearness):
    settings = {"representative_type": "MEAN", "representative_num": 1, "rerank": "all", "kv_type": kv_type}
    blocks = {"block_size": 16, "sink_tokens": 16, "local_windows_len": 16, "chunk_size": 64, "top_k_blocks": 2}
    model, cache = injected("llama", {"head_dim": 32}, **settings, **blocks, measure_recall=True)
    logits(model, cache, tokens(150), *answer(20))
    assert len(checked) == 3 * 20
    found = cache.statistics
    assert found["estimated_share"] == pytest.approx(found["block_recall"], rel=nearness)


# Of offset keys estimates, and short turns (test_short_turns.py), are tested without these.
@pytest.mark.parametrize("key_offset", with_slow(["none", "block_mean"], slow=["block_mean"]))
def test_crops_forks_short_turns_and_beams_estimate_what_is_there(injected, checked, monkeypatch, key_offset):
    monkeypatch.setattr(short_turn, "LEAST_PAST", 1)
    model, cache = injected(key_offset=key_offset)
    logits(model, cache, tokens(60), *answer(10))
    cache.crop(-22)
    logits(model, cache, tokens(7, 2), *answer(9, 3))
    fork = cache.fork()
    logits(model, cache, *answer(6, 4))
    logits(model, fork, *answer(6, 5))
    greedy = {"max_new_tokens": 8, "do_sample": False}
    model.generate(tokens(40, 6, rows=2), past_key_values=HeteroCache(model), num_beams=2, **greedy)
    assert len(checked) > 3 * 30


@pytest.mark.parametrize(
    "settings",
    with_few(
        [
            {"target_mass": 0.9, "layer_step": 2, "token_step": 7, "head_select_mode": "SEPARATE"},
            {"target_mass": 0.9, "preselect_block": True, "preselect_block_count": 6},
            {"representative_type": "MEAN", "representative_num": 1},
        ],
        2,
    ),
)
def test_reused_and_preselected_blocks_leave_the_rest_to_residual_attention(injected, checked, settings):
    model, cache = injected(**settings)
    logits(model, cache, tokens(60), *answer(24))
    assert len(checked) == 3 * 24


def test_a_context_of_up_to_so_many_blocks_is_attended_to_as_a_whole(injected, checked):
    model, cache = injected(target_mass=0.5, max_dense_blocks=12, head_select_mode="SEPARATE")
    # 13 blocks between the sink and Local are the first Context that is chosen from, from the fourth token on.
    logits(model, cache, tokens(60), *answer(3))
    before = len(checked)
    logits(model, cache, *answer(7, 9))
    assert (before, len(checked)) == (0, 3 * 7)


TOKENS = {"rerank": "all", "attend_to": "tokens"}


@pytest.mark.parametrize(("target_mass", "head_select_mode"), combined(["none", 0.8], ["SHARED", "SEPARATE"]))
def test_single_tokens_are_the_same_with_a_window_on_the_compute_device(
    injected, monkeypatch, target_mass, head_select_mode
):
    settings = {**TOKENS, "target_mass": target_mass, "head_select_mode": head_select_mode, "measure_recall": True}
    model, cache = injected(**settings)
    expected, before = logits(model, cache, tokens(60), *answer(12)), cache.statistics
    monkeypatch.setattr(retrieval_layer, "_needs_window", lambda device: True)
    model, cache = injected(**settings)
    np.testing.assert_allclose(logits(model, cache, tokens(60), *answer(12)), expected, rtol=1e-3, atol=1e-4)
    for name in ("estimated_share", "block_recall", *(["attended_blocks"] if target_mass != "none" else [])):
        assert cache.statistics[name] == pytest.approx(before[name], rel=1e-4)


NO_BLOCKS = {
    "representative_type": "MEAN", "representative_num": 1, "rerank": "all", "attend_to": "tokens", "target_mass": 0.9,
    "top_k_blocks": 0, "min_blocks": 0, "head_select_mode": "SEPARATE", "measure_recall": True,
}  # fmt: skip


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("has_window", [False, True])
def test_with_no_block_to_choose_everything_between_sink_and_local_is_estimated(
    injected, checked, monkeypatch, has_window
):
    parts = tokens(60), *answer(6)
    model, cache = injected(**NO_BLOCKS)
    expected, before = logits(model, cache, *parts), cache.statistics
    monkeypatch.setattr(retrieval_layer, "_needs_window", lambda device: has_window)
    checked.clear()
    model, cache = injected(**NO_BLOCKS)
    np.testing.assert_allclose(logits(model, cache, *parts), expected, rtol=1e-3, atol=1e-4)
    assert [each.tolist() for each in checked] == [[[0, 0]]] * (3 * 6)
    assert cache.statistics["block_recall"] == pytest.approx(before["block_recall"], rel=1e-4)
    # The masses of means would be too small.
    assert cache.statistics["estimated_share"] == [None] * 3


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("has_window", [False, True])
def test_with_no_block_to_choose_and_no_estimate_sink_and_local_are_attended_to(injected, monkeypatch, has_window):
    parts, found = (tokens(60), *answer(6)), []
    monkeypatch.setattr(retrieval_layer, "_needs_window", lambda device: has_window)
    for settings in (NO_BLOCKS, {"group_reduce": "mean", "top_k_blocks": 0}):
        model, cache = injected(**{**settings, "residual_attention": "drop"})
        found.append(logits(model, cache, *parts))
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)


def test_as_many_single_tokens_cover_more_than_whole_blocks(injected):
    shares = []
    for settings in ({"rerank": "all"}, TOKENS):
        model, cache = injected(measure_recall=True, head_select_mode="SEPARATE", **settings)
        logits(model, cache, tokens(90), *answer(6))
        shares.append(np.array(cache.statistics["block_recall"]))
    assert (shares[1] > shares[0]).all()


def test_single_tokens_are_chosen_again_among_reused_blocks(injected):
    found = []
    for token_step in (1, 4):
        # Four times five blocks are candidates: all that there are.
        model, cache = injected(**TOKENS, top_k_blocks=5, token_step=token_step, layer_step=token_step)
        found.append(logits(model, cache, tokens(60), *answer(11)))
        assert max(cache.statistics["estimated_share"]) < 0.999
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-4)


def test_a_window_on_the_compute_device_counts_for_the_target(injected, checked, monkeypatch):
    settings = {"target_mass": 0.8, "head_select_mode": "SEPARATE", "top_k_blocks": 500, "min_blocks": 0}
    model, cache = injected(**settings)
    expected = logits(model, cache, tokens(60), *answer(12))
    counts, shares = list(checked), cache.statistics["estimated_share"]
    checked.clear()
    monkeypatch.setattr(retrieval_layer, "_needs_window", lambda device: True)
    model, cache = injected(**settings)
    np.testing.assert_allclose(logits(model, cache, tokens(60), *answer(12)), expected, rtol=1e-3, atol=1e-4)
    assert [each.tolist() for each in checked] == [each.tolist() for each in counts]
    assert cache.statistics["estimated_share"] == pytest.approx(shares, rel=1e-4)


@pytest.mark.parametrize("target_mass", [0.6, 0.95])
def test_as_few_blocks_as_reach_the_target_are_attended_to(injected, checked, target_mass):
    model, cache = injected(target_mass=target_mass, head_select_mode="SEPARATE", top_k_blocks="all", min_blocks=0)
    logits(model, cache, tokens(120), *answer(5))
    counts = np.concatenate([each.ravel() for each in checked])
    assert counts.mean() == pytest.approx(np.mean(cache.statistics["attended_blocks"]))
    assert counts.min() < counts.max() < 29
    # What was attended to counts with its true mass there, and with its estimate where blocks are counted.
    assert cache.statistics["estimated_share"] == pytest.approx([target_mass] * 3, abs=0.1)


@pytest.mark.parametrize(
    ("looked_at", "attend_to"),
    [
        *combined(
            [{"rerank": 100, "key_offset": "none"}, {"rerank": "all", "key_offset": "none"}], ["blocks", "tokens"]
        ),
        *(
            pytest.param({"rerank": 100, "key_offset": "block_mean"}, attend_to, marks=pytest.mark.slow)
            for attend_to in ("blocks", "tokens")
        ),
    ],
)
def test_where_all_candidates_are_looked_at_the_estimate_is_the_true_share(injected, looked_at, attend_to):
    model, cache = injected(measure_recall=True, top_k_blocks=4, attend_to=attend_to, **looked_at)
    logits(model, cache, tokens(70), *answer(6))
    found = cache.statistics
    assert found["estimated_share"] == pytest.approx(found["block_recall"], rel=1e-4)
    assert all(share < 0.999 for share in found["block_recall"])


@pytest.mark.parametrize("attend_to", ["blocks", "tokens"])
def test_steps_that_reuse_a_choice_tell_no_share_where_means_would_stand_for_keys(injected, attend_to):
    settings = {"representative_type": "MEAN", "representative_num": 1, "rerank": "all", "attend_to": attend_to}
    # Layers 0 and 2 choose, with the first token of four.
    model, cache = injected(**settings, measure_recall=True, layer_step=2, token_step=4)
    logits(model, cache, tokens(70), *answer(1))
    chosen = cache.statistics
    first, reused, second = chosen["estimated_share"]
    assert reused is None
    assert [first, second] == pytest.approx(chosen["block_recall"][::2], rel=1e-4)
    logits(model, cache, *answer(3, 5))
    assert cache.statistics["estimated_share"] == chosen["estimated_share"]


def test_a_failed_forward_leaves_the_statistics_unchanged(injected):
    model, cache = injected(target_mass=0.9)
    logits(model, cache, tokens(60), *answer(3))
    before = cache.statistics
    handle = model.lm_head.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyError("behind the layers")))
    with pytest.raises(KeyError):
        logits(model, cache, *answer(1, 9))
    handle.remove()
    assert cache.statistics == before


@pytest.mark.parametrize(
    ("settings", "architecture"),
    combined(
        [
            {},
            {"rerank": 2},
            {"rerank": "all"},
            {"target_mass": 0.9, "min_blocks": 500},
            {"target_mass": 0.5, "max_dense_blocks": 500},
        ],
        ["llama", "gemma2", "gpt_oss"],
    ),
)
def test_a_covering_budget_is_exact(injected, architecture, settings):
    whole = {"layer_types": ["full_attention"] * 3} if architecture in ("gemma2", "gpt_oss") else {}
    model, cache = injected(architecture, whole, top_k_blocks=500, **settings)
    parts = [tokens(61), *answer(20)]
    actual = logits(model, cache, *parts)
    eject(model)
    with torch.no_grad():
        expected = model(torch.cat(parts, dim=1)).logits
    assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize(("kv_type", "has_codes"), [("FP16", True), ("Q8_0", True), ("Q4_0", False)])
def test_codes_of_four_bits_are_kept_of_keys_that_are_stored_in_more(injected, kv_type, has_codes):
    shape = {} if kv_type == "FP16" else {"head_dim": 32}
    model, cache = injected("llama", shape, kv_type=kv_type, rerank=2, block_size=16, sink_tokens=16, top_k_blocks=1)
    logits(model, cache, tokens(150), *answer(2))
    pool = cache.layers[0].pool
    assert (pool.key_codes is not None) == has_codes
    if pool.key_codes is not None:
        ids = cache.layers[0].block_ids(0)[1:3].astype(int)
        keys, means = (
            pool.key_storage.decode(pool.keys[ids]),
            pool.representative_storage.decode(pool.representatives[ids]),
        )
        differences = keys.float() - means[:, :, :1].float()
        torch.testing.assert_close(pool.key_codes[ids], encode(differences), rtol=0, atol=0)
