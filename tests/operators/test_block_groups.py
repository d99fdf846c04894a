"""Groups of blocks in whole models: their representatives are those of their keys, however these arrive."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.cpu_ops.retrieval_step import RetrievalStep
from hetero_kv.cpu_ops.step_contract import EVERYTHING
from hetero_kv.families.retrieval import layer as retrieval_layer
from hetero_kv.families.retrieval import representatives, short_turn
from hetero_kv.operators import RetrievalAttention
from hetero_kv.rules.rule_file import parse_rules
from tests.operators.token_parts import answer, logits, tokens
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"block_size": 4, "local_windows_len": 8, "sink_tokens": 4, "chunk_size": 16, "max_seq_len": 256}
MEANSTD = {
    "representative_type": "MEANSTD",
    "representative_num": 2,
    "group_reduce": "softmax",
    "residual_attention": "estimate",
}
GROUPS = {"group_blocks": 3, "group_factor": 1, "top_k_blocks": 4, "head_select_mode": "SEPARATE"}
RULES = [
    {"match": {"name": r"self_attn$"}, "replace": {"class": "RetrievalAttention"}},
    {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}},
]


def injected(model, **settings):
    long_context = {**SMALL, "kv_type": "FP32", "threads_num": 1, **MEANSTD, **GROUPS, **settings}
    inject(model, parse_rules({"rules": RULES, "long_context": long_context}))
    return HeteroCache(model)


@pytest.fixture
def checked(monkeypatch):
    """Holds what stands for each group of every decoded token's Context to its keys and values; counts the tokens."""
    seen, layers, call, attend = [], [], RetrievalStep.__call__, RetrievalAttention._attend_natively

    def noted(self, native, groups, *rest, **named):
        layers[:] = [groups[0].layer, self]
        return attend(self, native, groups, *rest, **named)

    def recorded(native, q, k, v, ranges, table, which, *rest):
        largest = call(native, q, k, v, ranges, table, which, *rest)
        if which != EVERYTHING:
            _, first, end = ranges[:, 0]
            pool, operator = layers[0].pool, layers[1]
            size = operator.settings.group_blocks
            whole = (end - first) // size
            for row in table[:, first : first + whole * size].astype(int):
                groups = torch.from_numpy(row.reshape(whole, size))
                keys, values = (part[groups].transpose(1, 2).flatten(2, 3) for part in (pool.keys, pool.values))
                expected = operator.representative_type.compute(keys, 0, None)
                np.testing.assert_allclose(pool.group_representatives[groups[:, -1]], expected, rtol=1e-4, atol=1e-5)
                if pool.group_value_means is not None:
                    means = pool.group_value_means[groups[:, -1], :, 0]
                    np.testing.assert_allclose(means, values.mean(2), rtol=1e-4, atol=1e-5)
            seen.append((whole, rest[-1].taken.sum(axis=0).tolist()))
        return largest

    monkeypatch.setattr(RetrievalStep, "__call__", recorded)
    monkeypatch.setattr(RetrievalAttention, "_attend_natively", noted)
    return seen


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"target_mass": 0.9, "rerank": 2, "head_select_mode": "SHARED"}, marks=pytest.mark.slow),
        pytest.param({"layer_step": 2, "token_step": 5}, marks=pytest.mark.slow),
        {"preselect_block": True, "preselect_block_count": 3, "top_k_blocks": 2},
        pytest.param(
            {"representative_type": "QUEST", "group_reduce": "mean", "residual_attention": "drop"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_groups_are_kept_as_blocks_fill_and_turns_and_forks_part(llama, checked, monkeypatch, settings):
    monkeypatch.setattr(short_turn, "LEAST_PAST", 1)
    cache = injected(llama, **settings)
    logits(llama, cache, tokens(70), *answer(27))
    cache.crop(-33)
    logits(llama, cache, tokens(7, 2), *answer(30, 3))
    fork = cache.fork()
    logits(llama, cache, *answer(14, 4))
    logits(llama, fork, *answer(14, 5))
    assert len(checked) == 3 * (27 + 30 + 14 + 14)
    assert {whole for whole, _ in checked} >= {4, 5, 6, 7}
    assert any(0 < taken[4] < 2 * whole for whole, taken in checked)


# Rows and beams of blocks without groups: test_ragged.py; forks with groups are above.
@pytest.mark.slow
def test_rows_of_several_lengths_and_beams_have_groups_of_their_own(llama, checked):
    cache = injected(llama)
    ids, mask = tokens(70, rows=2), torch.ones(2, 70, dtype=torch.long)
    mask[0, :23] = 0
    greedy = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    together = llama.generate(ids, attention_mask=mask, past_key_values=cache, **greedy)
    for row, start in ((0, 23), (1, 0)):
        alone = llama.generate(ids[row : row + 1, start:], past_key_values=HeteroCache(llama), **greedy)
        assert torch.equal(together[row, 70:], alone[0, 70 - start :])
    llama.generate(tokens(60, 6, rows=2), past_key_values=HeteroCache(llama), num_beams=2, **greedy)
    assert len(checked) > 3 * 15 * 4


def test_a_window_on_the_compute_device_changes_nothing(llama, checked, monkeypatch):
    parts = tokens(70), *answer(12)
    expected = logits(llama, injected(llama, target_mass=0.8), *parts)
    eject(llama)
    monkeypatch.setattr(retrieval_layer, "_needs_window", lambda device: True)
    actual = logits(llama, injected(llama, target_mass=0.8), *parts)
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_with_all_groups_opened_the_answers_are_those_without_groups(architecture):
    model, parts = tiny_model(architecture), (tokens(70), *answer(20))
    found = []
    for settings in ({"group_blocks": 1}, {"group_blocks": 2, "group_factor": 100}):
        found.append(logits(model, injected(model, **settings), *parts))
        eject(model)
    assert torch.equal(*found)


@pytest.mark.parametrize("settings", [{}, {"target_mass": 0.9, "min_blocks": 500}])
def test_a_covering_budget_is_exact(llama, settings):
    parts = tokens(61), *answer(20)
    actual = logits(llama, injected(llama, **{**GROUPS, "top_k_blocks": 500}, **settings), *parts)
    eject(llama)
    with torch.no_grad():
        expected = llama(torch.cat(parts, dim=1)).logits
    assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("name", [name for name in representatives.names() if representatives.get(name).combined])
def test_a_groups_representatives_are_those_of_all_its_keys(name):
    kind = representatives.get(name)
    keys = (
        torch.randn(6, 2, 4, 16, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 7)[:, None, None, None]
    )
    blocks = kind.compute(keys, kind.counts[0], None).view(2, 3, 2, -1, 16)
    together = keys.view(2, 3, 2, 4, 16).transpose(1, 2).flatten(2, 3)
    expected = kind.compute(together, kind.counts[0], None)
    torch.testing.assert_close(kind.combined(blocks), expected, rtol=1e-5, atol=1e-5)
