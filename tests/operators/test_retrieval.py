"""Retrieval in whole models: exact when the budget covers, and choosing what its definition says when it does not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from cpu_ops.estimating_step import EstimatingStep
from cpu_ops.retrieval_step import EVERYTHING, RetrievalStep
from hetero_kv import HeteroCache, eject, inject
from hetero_kv.errors import HeteroKVError
from hetero_kv.operators import RetrievalAttention
from hetero_kv.rules.rule_file import parse_rules

TYPES = {"MAX": 1, "MEAN": 1, "MEANSTD": 2, "QUEST": 2, "DYNAMIC": 2, "FIXED": 3}
SMALL = {"block_size": 4, "local_windows_len": 8, "initial_len": 4, "chunk_size": 16, "max_seq_len": 512}
_LLAMA = tiny_model("llama", num_hidden_layers=4)


@pytest.fixture
def llama():
    yield _LLAMA
    if getattr(_LLAMA, "hetero_kv_injection", None) is not None:
        eject(_LLAMA)


def injected(model, **settings):
    """The model with these settings in every layer, and a new cache."""
    every = {"match": {"name": r"self_attn$"}, "replace": {"class": "RetrievalAttention"}}
    layer = {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}}
    inject(model, parse_rules({"rules": [every, layer], "long_context": {**SMALL, **settings}}))
    return HeteroCache(model)


def random_tokens(count, seed=0):
    return torch.randint(2, 97, (1, count), generator=torch.Generator().manual_seed(seed))


def logits(model, cache, *parts):
    """Logits of prompts and single tokens, one after the other."""
    with torch.no_grad():
        return torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)


def recorded(monkeypatch):
    """A list that fills with (layer, token, positions in the Context, q, cache layer) of every selection."""
    record, given = [], []
    attend = RetrievalAttention._attend_natively

    def noting(call):
        def noted(native, q, k, v, position, table, first, end, which, positions, *rest):
            largest = call(native, q, k, v, position, table, first, end, which, positions, *rest)
            if which != EVERYTHING:
                given.append(positions.copy())
            return largest

        return noted

    def kept(self, native, layer, step, blocks, q, *rest):
        given.clear()
        masses = attend(self, native, layer, step, blocks, q, *rest)
        if given:
            by_kv_head = q.reshape(len(q), -1, native.group, q.shape[3])
            decoded = step.past - step.cohort.prompt_length
            record.append((self.layer_idx, decoded, given[0], by_kv_head.copy(), layer))
        return masses

    for kind in (RetrievalStep, EstimatingStep):
        monkeypatch.setattr(kind, "__call__", noting(kind.__call__))
    monkeypatch.setattr(RetrievalAttention, "_attend_natively", kept)
    return record


@pytest.mark.parametrize(("representative_type", "number"), list(TYPES.items()))
@pytest.mark.parametrize("head_select_mode", ["SHARED", "SEPARATE"])
@pytest.mark.parametrize("group_reduce", ["mean", "max", "softmax", "softmax_max"])
def test_the_blocks_chosen_while_decoding_are_the_references(
    llama, monkeypatch, representative_type, number, head_select_mode, group_reduce
):
    record = recorded(monkeypatch)
    cache = injected(
        llama,
        kv_type="FP32",
        representative_type=representative_type,
        representative_num=number,
        head_select_mode=head_select_mode,
        group_reduce=group_reduce,
        second_block_count=3,
    )
    logits(llama, cache, random_tokens(60))
    for token in random_tokens(25, 1).split(1, dim=1):
        record.clear()
        logits(llama, cache, token)
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


def test_the_mean_of_representatives_orders_blocks_as_infllms_sum(llama, monkeypatch):
    record = recorded(monkeypatch)
    four = {"representative_type": "FIXED", "representative_num": 2, "representative_reduce": "mean"}
    cache = injected(llama, kv_type="FP32", second_block_count=3, **four)
    logits(llama, cache, random_tokens(60), *random_tokens(9, 1).split(1, dim=1))
    for _, _, positions, q, layer in record[-4:]:
        ids = layer.block_ids(0)[layer.layout.sink_blocks : layer.context_end].astype(int)
        keys = layer.pool.keys[ids][:, :, [0, 2]]
        scores = np.einsum("hgd,bhrd->b", q[0], keys.numpy())
        assert positions[0, 0].tolist() == sorted(np.argsort(-scores, kind="stable")[:3].tolist())
        assert layer.pool.representatives.shape[2] == 1


def test_a_bound_has_no_mean(llama):
    quest = {"representative_type": "QUEST", "representative_num": 2, "representative_reduce": "mean"}
    with pytest.raises(HeteroKVError, match="representative_reduce is 'mean'; representative_type QUEST is no keys"):
        injected(llama, **quest)


def _by_head(*vectors):
    """[blocks, kv_heads, dim] -> [kv_heads, 1, blocks, dim], to be multiplied with [kv_heads, group, 1, dim]."""
    return [vector.swapaxes(0, 1)[:, None] for vector in vectors]


# Scores that are capped, and attention sinks that are learned, are part of what keys have received.
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss"])
def test_dynamic_representatives_of_generated_blocks_follow_the_attention_of_decoded_queries(architecture):
    windowless = {} if architecture == "llama" else {"layer_types": ["full_attention"] * 3}
    model = tiny_model(architecture, **windowless)
    injected(model, kv_type="FP32", second_block_count="all", representative_num=1)
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


@pytest.mark.parametrize(("layer_step", "token_step"), list(itertools.product([1, 2, 3], [1, 3])))
def test_blocks_are_reselected_by_the_schedule_and_reused_between(llama, monkeypatch, layer_step, token_step):
    record, chosen = recorded(monkeypatch), []
    best = RetrievalAttention._best
    monkeypatch.setattr(
        RetrievalAttention, "_best", lambda self, *args: (chosen.append(self.layer_idx), best(self, *args))[1]
    )
    cache = injected(
        llama, representative_type="MEAN", second_block_count=3, layer_step=layer_step, token_step=token_step
    )
    logits(llama, cache, random_tokens(70))
    last = {}
    for index, token in enumerate(random_tokens(9, 1).split(1, dim=1)):
        record.clear()
        chosen.clear()
        logits(llama, cache, token)
        due = [i for i in range(4) if i % layer_step == 0] if index % token_step == 0 else []
        assert chosen == due
        for layer_idx, decoded, positions, _, layer in record:
            assert decoded == index
            blocks = layer.layout.context_blocks(70 + index + 1)
            if layer_idx in due:
                last[layer_idx // layer_step] = positions, blocks
            chosen_last, seen = last[layer_idx // layer_step]
            # The blocks that have left Local since are attended to as well.
            assert positions[0, 0].tolist() == [*chosen_last[0, 0].tolist(), *range(seen, blocks)]


@pytest.mark.parametrize("head_select_mode", ["SHARED", "SEPARATE"])
def test_a_block_that_leaves_local_between_two_selections_is_attended_to(llama, monkeypatch, head_select_mode):
    record = recorded(monkeypatch)
    settings = {"second_block_count": 1, "token_step": 12, "head_select_mode": head_select_mode}
    cache = injected(llama, representative_type="MEAN", **settings)
    logits(llama, cache, random_tokens(70), random_tokens(1, 1))
    selected = cache.layers[0].context_blocks
    logits(llama, cache, *random_tokens(10, 2).split(1, dim=1))
    left = list(range(selected, cache.layers[0].context_blocks))
    assert len(left) == 3
    for _, _, positions, *_ in record[-4:]:
        assert all(each[1:].tolist() == left for each in positions[0])


def test_layers_behind_dense_ones_reselect_by_the_schedule_too(llama, monkeypatch):
    chosen, best = [], RetrievalAttention._best
    monkeypatch.setattr(
        RetrievalAttention, "_best", lambda self, *args: (chosen.append(self.layer_idx), best(self, *args))[1]
    )
    settings = {"second_block_count": 2, "layer_step": 2, "token_step": 2, "dense_layer_num": 1}
    cache = injected(llama, representative_type="MEAN", **settings)
    logits(llama, cache, random_tokens(70), *random_tokens(6, 1).split(1, dim=1))
    assert chosen == [1, 2] * 3


def test_dense_layers_attend_to_everything(llama, monkeypatch):
    record = recorded(monkeypatch)
    cache = injected(llama, representative_type="MEAN", second_block_count=2, dense_layer_num=3)
    logits(llama, cache, random_tokens(60), random_tokens(1, 1))
    assert [layer for layer, *_ in record] == [3]


def test_budgets_may_differ_by_layer(llama, monkeypatch):
    record = recorded(monkeypatch)
    cache = injected(llama, representative_type="MEAN", second_block_count="pyramid(1, 7)")
    logits(llama, cache, random_tokens(90), random_tokens(1, 1))
    assert [positions.shape[2] for _, _, positions, *_ in record] == [7, 5, 3, 1]
    eject(llama)
    with pytest.raises(HeteroKVError, match="second_block_count lists 2 numbers and the model has 4 layers"):
        injected(llama, second_block_count=[1, 2])


def test_preselection_restricts_the_answer_and_is_made_anew_for_the_next_turn(llama, monkeypatch):
    record = recorded(monkeypatch)
    cache = injected(
        llama, representative_type="MEAN", second_block_count=2, preselect_block=True, preselect_block_count=4
    )
    seen = []
    for turn in range(2):
        logits(llama, cache, random_tokens(80, turn))
        candidates = [set(layer.state.candidates[0, 0].tolist()) for layer in cache.layers]
        end = cache.layers[0].context_blocks
        record.clear()
        logits(llama, cache, *random_tokens(30, turn + 5).split(1, dim=1))
        for layer_idx, _, positions, *_ in record:
            assert all(p in candidates[layer_idx] or p >= end for p in positions[0, 0].tolist())
        seen.append(candidates)
    assert seen[0] != seen[1]


def test_blocks_that_leave_local_after_preselection_are_candidates_from_the_first_one_on(llama, monkeypatch):
    record = recorded(monkeypatch)
    # As many are chosen as were preselected, and the one that entered.
    cache = injected(
        llama, representative_type="MEAN", second_block_count=5, preselect_block=True, preselect_block_count=5
    )
    logits(llama, cache, random_tokens(80))
    end = cache.layers[0].context_blocks
    candidates = [set(layer.state.candidates[0, 0].tolist()) for layer in cache.layers]
    for operator in llama.hetero_kv_injection.attention_operators():
        operator.budget = 6
    for token in random_tokens(4, 5).split(1, dim=1):
        record.clear()
        logits(llama, cache, token)
    assert cache.layers[0].context_blocks == end + 1
    assert [set(positions[0, 0].tolist()) for _, _, positions, *_ in record] == [each | {end} for each in candidates]


def test_a_crop_into_what_was_preselected_makes_all_blocks_candidates(llama, monkeypatch):
    record = recorded(monkeypatch)
    cache = injected(
        llama, representative_type="MEAN", second_block_count=3, preselect_block=True, preselect_block_count=4
    )
    logits(llama, cache, random_tokens(83))
    cache.crop(-3)
    whole = [layer.state.candidates is None for layer in cache.layers]
    cache.crop(-40)
    blocks = cache.layers[0].context_blocks
    record.clear()
    logits(llama, cache, random_tokens(1, 3))
    assert all(positions.max() < blocks for _, _, positions, *_ in record)
    assert [whole, [layer.state.candidates is None for layer in cache.layers]] == [[False] * 4, [True] * 4]


def test_a_new_prompt_begins_the_count_of_token_step_anew(llama, monkeypatch):
    chosen, best = [], RetrievalAttention._best
    monkeypatch.setattr(
        RetrievalAttention, "_best", lambda self, *args: (chosen.append(self.layer_idx), best(self, *args))[1]
    )
    cache = injected(llama, representative_type="MEAN", second_block_count=3, token_step=4)
    selecting = []
    for turn, answer in ((70, 6), (9, 6)):
        logits(llama, cache, random_tokens(turn, turn))
        for token in random_tokens(answer, turn + 1).split(1, dim=1):
            chosen.clear()
            logits(llama, cache, token)
            selecting.append(chosen == [0, 1, 2, 3])
    assert selecting == [True, False, False, False, True, False] * 2


@pytest.mark.parametrize("representative_type", ["MEAN", "QUEST"])
@pytest.mark.parametrize("back", [3, 22])
def test_after_a_crop_blocks_that_are_written_anew_have_representatives_of_what_they_hold(
    llama, representative_type, back
):
    number = TYPES[representative_type]
    cache = injected(llama, representative_type=representative_type, representative_num=number, second_block_count=3)
    logits(llama, cache, random_tokens(60), *random_tokens(10, 1).split(1, dim=1))
    cache.crop(-back)
    logits(llama, cache, random_tokens(20, 2), *random_tokens(12, 3).split(1, dim=1))
    length = 70 - back + 32
    for layer in cache.layers:
        # One of attention sink, and two of Local at least.
        context = layer.block_ids(0)[1 : (length - 8) // 4].astype(int)
        keys = layer.pool.keys[context].float()
        expected = [keys.amax(2), keys.amin(2)] if representative_type == "QUEST" else [keys.mean(2)]
        vectors = torch.stack(expected, dim=2).to(layer.pool.representatives.dtype)
        assert torch.equal(layer.pool.representatives[context], vectors)


def test_recall_is_measured_and_never_falls_when_the_budget_grows(llama):
    recalls = []
    for budget in (0, 1, 2, 4, 8, "all"):
        cache = injected(llama, kv_type="FP32", second_block_count=budget, dense_layer_num=0, measure_recall=True)
        logits(llama, cache, random_tokens(80), random_tokens(1, 1))
        recalls.append(cache.layers[0].state.recall.mean)
        eject(llama)
    assert recalls == sorted(recalls)
    assert recalls[0] < 0.999
    assert recalls[-1] == pytest.approx(1, abs=1e-5)


def test_ktransformers_own_settings_are_accepted_as_they_are(llama):
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
    injection = inject(llama, parse_rules(f"extends: ktransformers.yaml\nlong_context:{block}"))
    settings = injection.operators["model.layers.0.self_attn"].settings
    assert (settings.second_block_count, settings.representative_type, settings.dense_layer_num) == (96, "DYNAMIC", 0)
    assert injection.engine.max_seq_len == 100_000
