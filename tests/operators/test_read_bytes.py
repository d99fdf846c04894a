"""Bytes read per decoded token in whole models: those of all keys and values, and of the chosen ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_kv import HeteroCache, inject
from hetero_kv.cpu_ops.retrieval_step import RetrievalStep
from hetero_kv.families.retrieval import layer as retrieval_layer
from hetero_kv.rules.rule_file import parse_rules
from tests.operators.bounded_models import bounded
from tests.operators.shadowkv_models import injected as shadowkv
from tests.support.slow_variants import with_slow
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

RULES = [
    {"match": {"name": r"self_attn$"}, "replace": {"class": "RetrievalAttention"}},
    {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}},
]
SMALL = {"block_size": 4, "local_windows_len": 8, "sink_tokens": 4, "chunk_size": 16, "max_seq_len": 256}
QUEST = {"representative_type": "QUEST", "representative_num": 2}
MEANSTD = {"representative_type": "MEANSTD", "representative_num": 2, "group_reduce": "softmax"}
# A prompt of 60 tokens and one more are a block of the attention sink, 12 of the Context, and 9 tokens. A key or a
# value has 2 heads of 16 float32.
PROMPT, CONTEXT, AROUND, VECTOR = 60, 12, 13, 2 * 16 * 4
TOKEN, REPRESENTATIVES = 2 * VECTOR, 2 * VECTOR


def retrieving(model, **settings):
    long_context = {**SMALL, "kv_type": "FP32", "top_k_blocks": 3, "threads_num": 1, **settings}
    inject(model, parse_rules({"rules": RULES, "long_context": long_context}))
    return HeteroCache(model)


def after(model, cache, prompt=PROMPT, decoded=1, rows=1):
    """What is read of each layer, on average, when tokens have been decoded behind a prompt."""
    ids = torch.randint(2, 97, (rows, prompt + decoded), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids[:, :prompt], past_key_values=cache)
        assert cache.statistics["read_bytes"] == [None] * len(cache.layers)
        for token in ids[:, prompt:].split(1, dim=1):
            model(token, past_key_values=cache)
    return cache.statistics["read_bytes"]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("kv_type", "token"), [("FP32", TOKEN), ("FP16", TOKEN // 2)])
def test_where_everything_is_attended_to_all_keys_and_values_are_read(llama, rows, kv_type, token):
    cache = retrieving(llama, top_k_blocks="all", kv_type=kv_type)
    assert after(llama, cache, decoded=3, rows=rows) == [token * (PROMPT + 2)] * 3


CHOSEN = AROUND * TOKEN + 3 * 4 * TOKEN + CONTEXT * REPRESENTATIVES


@pytest.mark.parametrize(
    ("settings", "read"),
    [
        (QUEST, CHOSEN),
        ({**QUEST, "group_reduce": "softmax"}, CHOSEN),
        (MEANSTD, CHOSEN),
        ({**MEANSTD, "head_select_mode": "SEPARATE", "residual_attention": "estimate"}, CHOSEN + 9 * VECTOR),
        # Stored keys of six candidates: copies in four bits would come in tiles of 16 tokens.
        ({**MEANSTD, "residual_attention": "estimate", "rerank": 2}, CHOSEN + 9 * VECTOR + 6 * 4 * VECTOR),
        # All blocks' keys, and the representatives by which the rest counts.
        ({**MEANSTD, "residual_attention": "estimate", "rerank": "all"}, CHOSEN + 9 * VECTOR + CONTEXT * 4 * VECTOR),
        # Means of half precision, of 4 blocks around, 3 that are chosen, and 6 candidates.
        pytest.param(
            {**MEANSTD, "rerank": 2, "key_offset": "block_mean"},
            CHOSEN + 6 * 4 * VECTOR + 13 * VECTOR // 2,
            marks=pytest.mark.slow,
        ),
        # All blocks of the Context are attended to, and no representatives are read.
        ({**MEANSTD, "top_k_blocks": 12}, (PROMPT + 1) * TOKEN),
    ],
)
def test_bytes_of_chosen_blocks_are_counted(llama, settings, read):
    assert after(llama, retrieving(llama, **settings)) == [read] * 3


@pytest.mark.parametrize(
    ("settings", "estimated"), [(QUEST, 0), ({**MEANSTD, "residual_attention": "estimate"}, 4 + 1)]
)
def test_of_groups_that_are_not_opened_no_blocks_are_scored(llama, settings, estimated):
    # Of two groups of 5 blocks one is opened; two blocks are in none. Three blocks of those are attended to.
    cache = retrieving(llama, group_blocks=5, group_factor=1, **settings)
    read = AROUND * TOKEN + 3 * 4 * TOKEN + (2 + 5 + 2) * REPRESENTATIVES + estimated * VECTOR
    assert after(llama, cache) == [read] * 3


@pytest.mark.slow
def test_representatives_of_eight_bits_are_counted_as_they_are_stored():
    model = tiny_model("llama", head_dim=32)
    read = after(model, retrieving(model, representative_storage="Q8_0", residual_attention="estimate", **MEANSTD))
    # A vector of 2 heads of 32 float32, or of 34 bytes each.
    assert read == [(AROUND + 3 * 4) * 2 * 256 + CONTEXT * 2 * 68 + 9 * 68] * 3


@pytest.mark.parametrize("head_select_mode", ["SHARED", "SEPARATE"])
def test_of_preselected_tokens_the_candidates_alone_are_scored(llama, head_select_mode):
    # As snapkv: a token leaves Local with every step, so that each step chooses 20 of the 20 and what has left.
    blocks = {"block_size": 1, "preselect_block": True, "preselect_block_count": 20, "top_k_blocks": 20}
    cache = retrieving(
        llama, **blocks, representative_type="MEAN", head_select_mode=head_select_mode, max_seq_len=512
    )  # fmt: skip
    assert after(llama, cache, prompt=400) == [(4 + 8 + 20) * TOKEN + 21 * VECTOR] * 3


def test_steps_that_reuse_a_choice_read_no_representatives(llama):
    read = after(llama, retrieving(llama, layer_step=3, **QUEST))
    assert read == [CHOSEN, *[CHOSEN - CONTEXT * REPRESENTATIVES] * 2]


def test_under_a_target_mass_bytes_follow_the_taken_blocks(llama):
    cache = retrieving(llama, **MEANSTD, target_mass=0.8, top_k_blocks="all", min_blocks=0, head_select_mode="SEPARATE")
    read, blocks = after(llama, cache), cache.statistics["attended_blocks"]
    assert 0 < min(blocks) < max(blocks) < CONTEXT
    expected = AROUND * TOKEN + np.array(blocks) * 4 * TOKEN + CONTEXT * REPRESENTATIVES
    assert read == pytest.approx(expected.tolist())


# Keys less an offset have kernels of their own.
@pytest.mark.parametrize("key_offset", with_slow(["none", "block_mean"], slow=["block_mean"]))
def test_of_single_tokens_these_are_read_and_the_mean_values_of_what_is_left_of_blocks(llama, monkeypatch, key_offset):
    taken, call = [], RetrievalStep.__call__

    def noted(self, *args):
        result = call(self, *args)
        taken.append(args[-1].taken[0].tolist())
        return result

    monkeypatch.setattr(RetrievalStep, "__call__", noted)
    settings = {
        **MEANSTD,
        "residual_attention": "estimate",
        "rerank": "all",
        "attend_to": "tokens",
        "key_offset": key_offset,
    }
    # In half precision, one for each block.
    offset = VECTOR // 2 if key_offset == "block_mean" else 0
    read = after(llama, retrieving(llama, **settings))
    assert len(taken) == len(read) == 3
    for (tokens, looked, scored, _, _, touched, whole), found in zip(taken, read, strict=True):
        # Three blocks' tokens, out of more blocks than three; all are looked at.
        assert (tokens, looked, scored) == (12, CONTEXT, CONTEXT)
        assert 3 < touched <= 12
        around = AROUND * TOKEN + (4 + touched) * offset
        looks = CONTEXT * (REPRESENTATIVES + 4 * VECTOR + offset)
        assert found == around + 12 * TOKEN + looks + (CONTEXT - whole) * VECTOR


def test_a_window_on_the_compute_device_is_read_there(llama, monkeypatch):
    monkeypatch.setattr(retrieval_layer, "_needs_window", lambda device: True)
    # Of the model's float32 there, of half precision in the blocks.
    expected = AROUND * TOKEN + (CHOSEN - AROUND * TOKEN) // 2
    assert after(llama, retrieving(llama, kv_type="FP16", **QUEST)) == [expected] * 3


def test_the_model_s_own_windows_and_bounded_entries_are_read_whole(llama):
    mistral = tiny_model("mistral", sliding_window=8)
    assert after(mistral, retrieving(mistral)) == [8 * TOKEN] * len(mistral.model.layers)
    assert after(llama, bounded(llama, policy="streaming_llm", budget=20), decoded=3) == [21 * TOKEN] * 3


def test_shadowkv_reads_landmarks_and_what_its_slots_lack(llama):
    cache = shadowkv(llama, sparse_budget=12, outlier_chunks=1, rank=8)
    # 13 chunks of 4 and 9 recent tokens; an outlier and three chunks in slots.
    attended, landmarks = (9 + 4 + 12) * TOKEN, 13 * VECTOR
    missing = 2 * 3 * 4 * (8 + 16) * 4 + 2 * 8 * 16 * 4
    assert after(llama, cache) == [attended + landmarks + missing] * 3


def test_a_forward_that_fails_and_a_reset_count_nothing(llama):
    cache = retrieving(llama, **QUEST)
    before = after(llama, cache)
    handle = llama.lm_head.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyError("behind the layers")))
    with pytest.raises(KeyError), torch.no_grad():
        llama(torch.tensor([[5]]), past_key_values=cache)
    handle.remove()
    assert cache.statistics["read_bytes"] == before
    cache.reset()
    assert after(llama, cache) == before
