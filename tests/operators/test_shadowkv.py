"""ShadowKV in whole models: exact at full rank with a covering budget, and by its definition below that."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from transformers import DynamicCache

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.families.shadowkv.layer import LowRankLayer
from hetero_kv.operators import ShadowKVAttention
from hetero_kv.rules.rule_file import parse_rules
from tests.operators.shadowkv_models import (
    CHUNKED,
    COVERING,
    FULL_RANK,
    conversation,
    error_of,
    injected,
    logits,
    model_of,
    random_tokens,
    relative_error,
    shadowkv_in,
)
from tests.support.devices import on_both
from tests.support.slow_variants import with_slow
from tests.support.tiny_models import ARCHITECTURES, tiny_model


# Heads that share no keys, and rotations of a part, others have as well.
@pytest.mark.parametrize(
    ("architecture", "device"),
    on_both(ARCHITECTURES, slow={*ARCHITECTURES} - {"gpt_oss", "glm"}),
    indirect=["device"],
)
def test_full_rank_and_a_covering_budget_are_full_attention_over_two_turns(architecture, device):
    plus = len(architecture) % 2 == 0
    rank = FULL_RANK.get(architecture, 32)
    model = model_of(architecture)
    parts = conversation(120, 25, 21, 6, batch=2)
    error, cache = error_of(model, parts, device, rank=rank, project_generated=plus)
    assert error < 2e-5
    layers = [layer for layer in cache.layers if isinstance(layer, LowRankLayer)]
    assert layers
    assert all(layer.context.length >= 144 and layer.counted.hit_rate > 0.5 for layer in layers)


@pytest.mark.parametrize(
    ("architecture", "plus"),
    with_slow(
        list(itertools.product(["llama", "glm", "smollm3"], [False, True])),
        slow={*itertools.product(["llama", "glm", "smollm3"], [False, True])} - {("glm", True)},
    ),
)
def test_it_stays_exact_over_150_generated_tokens_and_a_second_turn(architecture, plus):
    parts = conversation(61, 150, 30, 5)
    error, cache = error_of(model_of(architecture), parts, project_generated=plus)
    assert error < 2e-5
    assert cache.get_seq_length() == 246


@pytest.mark.parametrize("scaling", ["yarn", "llama3"])
def test_scaled_rotations_are_undone_too(scaling):
    rope = {"rope_type": scaling, "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    if scaling == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=256)
    error, _ = error_of(model, conversation(90, 12, 20, 3))
    assert error < 2e-5


@pytest.mark.parametrize("scaling", ["dynamic", pytest.param("longrope", marks=pytest.mark.slow)])
@pytest.mark.parametrize("plus", with_slow([False, True], slow=[True]))
def test_keys_are_rebuilt_with_the_rotation_they_were_stored_with_where_it_changes_as_a_sequence_grows(scaling, plus):
    def new_model():
        # Their rotary modules keep what the longest sequence so far made of them, so that each side needs its own.
        if scaling == "dynamic":
            rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
            return tiny_model("llama", rope_parameters=rope, max_position_embeddings=64)
        factors = {"short_factor": [1 + i / 10 for i in range(8)], "long_factor": [2 + i / 3 for i in range(8)]}
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **factors}
        return tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=64)

    # Past 64 tokens, the length that both change at, while an answer is generated.
    parts = conversation(50, 30, 40, 5)
    cached, whole, ours = new_model(), new_model(), new_model()
    expected = logits(cached, DynamicCache(config=cached.config), *parts)
    actual = logits(ours, injected(ours, project_generated=plus), *parts)
    assert relative_error(actual, expected) < 2e-5
    # One forward over everything turns all keys alike, which no cache does.
    assert relative_error(logits(whole, None, torch.cat(parts, dim=1)), expected) > 0.1


# Its kernels in bfloat16: tests/cpu_ops/test_shadowkv_kernels.py.
@pytest.mark.slow
def test_half_precision_models_agree_to_their_precision():
    model = copy.deepcopy(model_of("llama")).bfloat16()
    parts = conversation(120, 20, 20, 5)
    with torch.no_grad():
        expected = logits(model, DynamicCache(config=model.config), *parts)
    actual = logits(model, injected(model, value_type="BF16"), *parts)
    assert relative_error(actual, expected) < 0.05


# Groups of 32 need heads of 32 channels.
@pytest.mark.parametrize(("value_type", "head_dim", "tolerance"), [("FP16", 16, 5e-3), ("Q8_0", 32, 5e-2)])
def test_values_are_exact_to_their_storage_type(value_type, head_dim, tolerance):
    model = tiny_model("llama", head_dim=head_dim)
    error, _ = error_of(model, conversation(90, 20, 20, 5), rank=2 * head_dim, value_type=value_type)
    assert 1e-6 < error < tolerance


def recorded(monkeypatch):
    """A list that fills with (operator, layer, call, output) of every decode step."""
    record = []
    decode_step = ShadowKVAttention.decode_step

    def kept(self, layer, step, call):
        out = decode_step(self, layer, step, call)
        record.append((self, layer, call, out))
        return out

    monkeypatch.setattr(ShadowKVAttention, "decode_step", kept)
    return record


def attended_by_definition(operator, layer, call):
    """Attention of a step over outliers, chosen chunks and Recent, by the keys that the layer gives back."""
    keys, values = (part.new_empty(2, 2, layer.stored_length, 16) for part in (call.k, call.v))
    layer.load(keys, values)
    outliers, chosen = layer.context.outliers, operator.chosen(layer, call)
    assert chosen.shape[2] == 5
    attended = torch.zeros(2, 2, layer.chunks, dtype=torch.bool)
    attended.scatter_(2, torch.cat([outliers.ids, chosen], dim=2), True)
    seen = attended.repeat_interleave(4, dim=2)
    seen = torch.nn.functional.pad(seen, (0, layer.stored_length - layer.context.length), value=True)
    assert (seen.sum(dim=2) == 20 + 12 + len(layer.recent_keys)).all()
    scores = call.q.unflatten(1, (2, 2))[:, :, :, 0] @ keys.transpose(2, 3) * call.scale
    return (scores.masked_fill(~seen[:, :, None], float("-inf")).softmax(dim=-1) @ values).flatten(1, 2)


@pytest.mark.parametrize("plus", with_slow([False, True], slow=[False]))
def test_a_step_attends_to_outliers_chosen_and_recent_tokens_by_the_keys_of_rank_r(llama, monkeypatch, plus):
    record, expected = recorded(monkeypatch), []
    cache = injected(llama, rank=9, sparse_budget=20, project_generated=plus)
    logits(llama, cache, random_tokens(150, 1, batch=2))
    attend, project = ShadowKVAttention.decode_step, LowRankLayer.project

    def attending(self, layer, step, call):
        def looked_at(layer, step):
            # What a token attends to is there until a chunk leaves Recent behind it.
            expected.append(attended_by_definition(self, layer, call))
            project(layer, step)

        monkeypatch.setattr(LowRankLayer, "project", looked_at)
        return attend(self, layer, step, call)

    monkeypatch.setattr(ShadowKVAttention, "decode_step", attending)
    logits(llama, cache, *random_tokens(23, 2, batch=2).split(1, dim=1))
    assert len(expected) == len(record) == 23 * 3
    for (_, _, _, out), reference in zip(record, expected, strict=True):
        torch.testing.assert_close(out[:, :, 0], reference, rtol=1e-4, atol=1e-5)


def test_outliers_and_recent_tokens_have_exact_keys_and_the_others_the_best_of_their_rank(llama, monkeypatch):
    prompt, rank = random_tokens(200, 3), 9
    cache = injected(llama, rank=rank)
    logits(llama, cache, prompt)
    with monkeypatch.context() as patched:
        for operator in llama.hetero_kv_injection.attention_operators():
            patched.setattr(operator, "_sized", type(operator.settings)(**{**COVERING, "local_chunks": 100}))
        covering = HeteroCache(llama)
    logits(llama, covering, prompt)
    for layer, exact in zip(cache.layers, covering.layers, strict=True):
        keys, values = torch.empty(1, 2, 200, 16), torch.empty(1, 2, 200, 16)
        layer.load(keys, values)
        true, end = exact.recent_keys.entries, layer.context.length
        assert torch.equal(values, exact.recent_values.entries)
        assert torch.equal(keys[:, :, end:], true[:, :, end:])
        is_outlier = torch.zeros(1, 2, layer.chunks, dtype=torch.bool).scatter_(2, layer.context.outliers.ids, True)
        is_outlier = is_outlier.repeat_interleave(4, dim=2)
        assert torch.equal(keys[:, :, :end][is_outlier], true[:, :, :end][is_outlier])
        # Rotation keeps norms, so that the error of the rotated keys is that of the factored ones.
        rebuilt = layer.factors.keys_between(0, end)
        table = layer.factors.rotary
        angle = torch.atan2(table.sin, table.cos)[:end]
        pairs = torch.complex(true[0, :, :end, :8].double(), true[0, :, :end, 8:].double())
        plain = torch.view_as_real(pairs * torch.exp(-1j * angle.double()))
        singular_values = torch.linalg.svdvals(plain.transpose(0, 1).flatten(1))
        least = singular_values[rank:].square().sum().sqrt()
        assert float((rebuilt - true[:, :, :end]).double().norm()) == pytest.approx(float(least), rel=1e-3)


def test_a_share_of_the_sequence_is_counted_in_whole_chunks_and_stays_for_the_answer(llama, monkeypatch):
    record = recorded(monkeypatch)
    cache = injected(llama, sparse_budget=0.1, outlier_chunks=0, project_generated=True)
    logits(llama, cache, random_tokens(150), *random_tokens(40, 1).split(1, dim=1))
    assert {layer.context.outliers.residents.ids.shape[2] for _, layer, _, _ in record} == {4}


def test_a_short_sequence_is_kept_exactly_and_has_no_factors(llama):
    cache = injected(llama, rank=32, sparse_budget=4)
    parts = [random_tokens(38, 1), *random_tokens(30, 2).split(1, dim=1)]
    actual = logits(llama, cache, *parts)
    assert all(layer.factors.basis is None and layer.counted.hit_rate is None for layer in cache.layers)
    eject(llama)
    with torch.no_grad():
        assert relative_error(actual, llama(torch.cat(parts, dim=1)).logits) < 1e-5


def test_generated_tokens_stay_exact_or_are_projected_as_they_leave_the_local_chunks(llama):
    lengths = {}
    for plus in (False, True):
        cache = injected(llama, rank=16, project_generated=plus)
        logits(llama, cache, random_tokens(100), *random_tokens(41, 1).split(1, dim=1))
        lengths[plus] = [(layer.context.length, len(layer.recent_keys)) for layer in cache.layers]
        eject(llama)
    # (100 // 4 - 2) * 4, and (141 // 4 - 2) * 4.
    assert lengths[False] == [(92, 49)] * 3
    assert lengths[True] == [(132, 9)] * 3


def test_a_turn_outside_the_subspace_is_factored_again_beyond_the_threshold(llama):
    factored, shares = [], []
    for limit in (0.0, 1.0):
        cache = injected(llama, rank=6, refactor_above=limit)
        logits(llama, cache, random_tokens(100))
        first = [layer.counted.energy_outside for layer in cache.layers]
        logits(llama, cache, random_tokens(100, 1))
        factored.append([layer.counted.factored for layer in cache.layers])
        shares.append([layer.counted.energy_outside for layer in cache.layers])
        assert all(0 < share < 1 for share in first)
        eject(llama)
    assert factored == [[2] * 3, [1] * 3]
    # A basis that knows the new keys holds more of them than one that does not.
    assert sum(shares[0]) < sum(shares[1])


def test_recall_grows_with_the_budget_up_to_one(llama):
    recalls = []
    for budget in (4, 16, 64, "all"):
        settings = {**COVERING, "sparse_budget": budget}
        rules = parse_rules({"rules": [CHUNKED, shadowkv_in("self_attn$", settings)]})
        inject(llama, rules, command_line={"measure_recall": True, "max_seq_len": 256})
        cache = HeteroCache(llama)
        logits(llama, cache, random_tokens(150), random_tokens(1, 1))
        recalls.append(cache.statistics["block_recall"][0])
        eject(llama)
    assert recalls == sorted(recalls)
    assert recalls[0] < 0.999
    assert recalls[-1] == pytest.approx(1, abs=1e-5)
