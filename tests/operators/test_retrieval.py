"""Retrieval in whole models chooses by its definition and the representatives of its blocks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.errors import HeteroKVError
from hetero_kv.rules.rule_file import parse_rules
from tests.operators.retrieval_models import injected, logits, random_tokens, recorded
from tests.support.slow_variants import combined, with_slow
from tests.support.tiny_models import tiny_model

TYPES = {"MAX": 1, "MEAN": 1, "MEANSTD": 2, "QUEST": 2, "DYNAMIC": 2, "FIXED": 3}


# How representatives score is one thing, and what becomes of the scores of a group and of its kv heads another.
@pytest.mark.parametrize(
    ("representative_type", "heads"),
    combined(list(TYPES), list(itertools.product(["mean", "max", "softmax", "softmax_max"], ["SHARED", "SEPARATE"]))),
)
def test_the_blocks_chosen_while_decoding_are_the_references(deep_llama, monkeypatch, representative_type, heads):
    number, (group_reduce, head_select_mode) = TYPES[representative_type], heads
    record = recorded(monkeypatch)
    cache = injected(
        deep_llama,
        kv_type="FP32",
        representative_type=representative_type,
        representative_num=number,
        head_select_mode=head_select_mode,
        group_reduce=group_reduce,
        top_k_blocks=3,
    )
    logits(deep_llama, cache, random_tokens(60))
    for token in random_tokens(25, 1).split(1, dim=1):
        record.clear()
        logits(deep_llama, cache, token)
        for _, _, positions, q, layer in record:
            first, end = layer.layout.sink_blocks, layer.context_end
            ids = layer.block_ids(0)[first:end]
            keys, vectors = layer.pool.keys[ids.astype(int)], layer.pool.representatives[ids.astype(int)]
            if representative_type == "QUEST":
                high, low = (q[0][:, :, None] * part.numpy() for part in _by_head(keys.amax(2), keys.amin(2)))
                scores = np.maximum(high, low).sum(-1)
            elif representative_type == "MEANSTD":
                mean, deviation = _by_head(keys.mean(2).numpy(), keys.std(2, correction=0).numpy())
                scores = (q[0][:, :, None] * mean).sum(-1) + np.sqrt((q[0][:, :, None] ** 2 * deviation**2).sum(-1))
            else:
                scores = np.einsum("hgd,bhrd->hgbr", q[0], vectors.numpy()).max(-1)
            if group_reduce.startswith("softmax"):
                scores = torch.from_numpy(scores * 0.25).softmax(-1).numpy()
            per_head = scores.mean(1) if group_reduce in ("mean", "softmax") else scores.max(1)
            lists = [per_head.sum(0)] if head_select_mode == "SHARED" else list(per_head)
            expected = [sorted(np.argsort(-scores, kind="stable")[:3].tolist()) for scores in lists]
            assert positions[0].tolist() == expected


def test_the_mean_of_representatives_orders_blocks_as_infllms_sum(deep_llama, monkeypatch):
    record = recorded(monkeypatch)
    four = {"representative_type": "FIXED", "representative_num": 2, "representative_reduce": "mean"}
    cache = injected(deep_llama, kv_type="FP32", top_k_blocks=3, **four)
    logits(deep_llama, cache, random_tokens(60), *random_tokens(9, 1).split(1, dim=1))
    for _, _, positions, q, layer in record[-4:]:
        ids = layer.block_ids(0)[layer.layout.sink_blocks : layer.context_end].astype(int)
        keys = layer.pool.keys[ids][:, :, [0, 2]]
        scores = np.einsum("hgd,bhrd->b", q[0], keys.numpy())
        assert positions[0, 0].tolist() == sorted(np.argsort(-scores, kind="stable")[:3].tolist())
        assert layer.pool.representatives.shape[2] == 1


def test_a_bound_has_no_mean(deep_llama):
    quest = {"representative_type": "QUEST", "representative_num": 2, "representative_reduce": "mean"}
    with pytest.raises(
        HeteroKVError, match="representative_reduce is 'mean'; representative_type QUEST does not consist of keys"
    ):
        injected(deep_llama, **quest)


def _by_head(*vectors):
    """[blocks, kv_heads, dim] -> [kv_heads, 1, blocks, dim], to be multiplied with [kv_heads, group, 1, dim]."""
    return [vector.swapaxes(0, 1)[:, None] for vector in vectors]


# Scores that are capped, and attention sinks that are learned, are part of what keys have received.
@pytest.mark.parametrize("architecture", with_slow(["llama", "gemma2", "gpt_oss"], slow=["llama"]))
def test_dynamic_representatives_of_generated_blocks_follow_the_attention_of_decoded_queries(architecture):
    windowless = {} if architecture == "llama" else {"layer_types": ["full_attention"] * 3}
    model = tiny_model(architecture, **windowless)
    injected(model, kv_type="FP32", top_k_blocks="all", representative_num=1)
    for operator in model.hetero_kv_injection.attention_operators():
        operator.accumulates = True
        operator.budget = 500
    cache = HeteroCache(model)
    prompt, answer = random_tokens(20), random_tokens(40, 1)
    logits(model, cache, prompt, *answer.split(1, dim=1))
    eject(model)
    with torch.no_grad():
        # The untouched model's own attention probabilities, [1, heads, 60, 60] per layer.
        model.config._attn_implementation = "eager"
        attentions = model(torch.cat([prompt, answer], dim=1), output_attentions=True).attentions
    assert len(attentions) == 3
    for layer, attention in zip(cache.layers, attentions, strict=True):
        by_kv_head = attention[0].unflatten(0, (2, 2)).sum(1)
        for block in range(6, layer.context_end):
            # Generated tokens are watched from their own step until their block enters the Context.
            last = (block + 1) * 4 + 8 - 1
            received = by_kv_head[:, block * 4 : last, block * 4 : block * 4 + 4].sum(1)
            best = received.argmax(dim=1)
            pool_id = int(layer.block_ids(0)[block])
            for head in range(2):
                expected = layer.pool.keys[pool_id, head, best[head]]
                assert torch.equal(layer.pool.representatives[pool_id, head, 0], expected)


@pytest.mark.parametrize(("back", "representative_type"), combined([22, 3], ["MEAN", "QUEST"]))
def test_after_a_crop_rewritten_blocks_have_new_representatives(deep_llama, representative_type, back):
    number = TYPES[representative_type]
    cache = injected(deep_llama, representative_type=representative_type, representative_num=number, top_k_blocks=3)
    logits(deep_llama, cache, random_tokens(60), *random_tokens(10, 1).split(1, dim=1))
    assert cache.is_croppable
    cache.crop(-back)
    logits(deep_llama, cache, random_tokens(20, 2), *random_tokens(12, 3).split(1, dim=1))
    length = 70 - back + 32
    for layer in cache.layers:
        # One of attention sink, and two of Local at least.
        context = layer.block_ids(0)[1 : (length - 8) // 4].astype(int)
        keys = layer.pool.keys[context].float()
        expected = [keys.amax(2), keys.amin(2)] if representative_type == "QUEST" else [keys.mean(2)]
        vectors = torch.stack(expected, dim=2).to(layer.pool.representatives.dtype)
        assert torch.equal(layer.pool.representatives[context], vectors)


def test_recall_is_measured_and_never_falls_when_the_budget_grows(deep_llama):
    recalls = []
    for budget in (0, 1, 2, 4, 8, "all"):
        cache = injected(deep_llama, kv_type="FP32", top_k_blocks=budget, dense_layer_num=0, measure_recall=True)
        logits(deep_llama, cache, random_tokens(80), random_tokens(1, 1))
        recalls.append(cache.layers[0].state.recall.mean)
        eject(deep_llama)
    assert recalls == sorted(recalls)
    assert recalls[0] < 0.999
    assert recalls[-1] == pytest.approx(1, abs=1e-5)


def test_ktransformers_own_settings_are_accepted_as_they_are(deep_llama):
    pasted = """
    chunk_size: 4096 # prefill chunk size
    max_seq_len: 100000 # KVCache length
    block_size: 128 # KVCache block size
    local_windows_len: 4096 # The KVCache of length local_windows_len is stored on the GPU.
    second_select_num: 96 # After preselection, each time select the number of KVCache blocks.
    threads_num: 64 # CPU thread num
    anchor_type: DYNAMIC # KVCache block representative token selection method.
    kv_type: FP16
    dense_layer_num: 0 # The first few layers do not need to fill or select KVCache
    anchor_num: 1 # The number of representative tokens within a KVCache block.
    preselect_block: False # Whether to preselect.
    head_select_mode: SHARED # All kv_heads jointly select.
    preselect_block_count: 96 # Number of preselected blocks.
    layer_step: 1 # Select every few layers.
    token_step: 1 # Select every few tokens.
    """
    block = "\n".join(line[2:] for line in pasted.splitlines())
    injection = inject(deep_llama, parse_rules(f"extends: ktransformers.yaml\nlong_context:{block}"))
    settings = injection.operators["model.layers.0.self_attn"].settings
    assert (settings.top_k_blocks, settings.representative_type, settings.dense_layer_num) == (96, "DYNAMIC", 0)
    assert injection.engine.max_seq_len == 100_000
