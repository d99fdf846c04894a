"""The scores of sparse prefills: their rows, and the share of keys attended to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.sparse_prefill import DENSE, share_of_keys
from benchmarks.sparse_scores import plot, rows_of, table
from hetero_kv import HeteroCache, eject, inject
from hetero_kv.evals.outcome import Result
from hetero_kv.families.sparse_prefill import flexprefill
from hetero_kv.families.sparse_prefill.key_lists import KeyLines
from tests.support.tiny_models import tiny_model


def result(method, sample, score):
    return Result(sample, "niah", "0", 64, None, method, score=score)


def test_rows_have_the_samples_that_all_methods_answered():
    results = [result(DENSE, "a", 1.0), result(DENSE, "b", 0.5), result("flex", "b", 0.25), result(DENSE, "c", 0.0)]
    prefills = [
        {"method": DENSE, "keys": 1.0, "tokens_per_s": 10.0},
        {"method": "flex", "keys": 0.2, "tokens_per_s": 30.0},
        {"method": "flex", "keys": 0.4, "tokens_per_s": 50.0},
    ]
    dense, flex = rows_of(results, prefills)
    assert (dense["method"], dense["scores"], dense["keys"]) == (DENSE, [0.5], 1.0)
    assert (flex["scores"], flex["tokens_per_s"]) == ([0.25], 40.0)
    assert flex["keys"] == pytest.approx(0.3)
    assert "| `flex` | 30.0% | 40 | 0.25 (0.25 to 0.25) | 0.50 |" in table([dense, flex])


def test_the_plot_is_a_picture(tmp_path):
    rows = [{"method": name, "scores": [0.5], "keys": share, "tokens_per_s": 1.0} for name, share in (
        (DENSE, 1.0), ("minference:prefill_budget=256", 0.1), ("minference", 0.2))]  # fmt: skip
    plot({8192: rows, 16384: rows}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("recipe", "share"), [
    ("dense", 1.0),
    # The first 100 tokens in full. Behind them a block sees the first 64 and its own with the 63 before: 164 of 164,
    # 163 of 200, 191 of 264 and 163 of 300 tokens.
    ("flexprefill", (64 + 100 + 164 + 163 + 191 + 163) / (64 + 100 + 164 + 200 + 264 + 300)),
])  # fmt: skip
def test_the_share_is_of_keys_that_blocks_of_queries_attended_to(recipe, share, monkeypatch):
    nothing = np.empty(0, np.int64)
    monkeypatch.setattr(flexprefill, "keys_of", lambda chunk, *_: [KeyLines.of(nothing, nothing)] * chunk.q.shape[1])
    model = tiny_model("qwen2", max_position_embeddings=512)
    settings = {"chunk_size": 100, "max_seq_len": 400, "threads_num": 1, "prefill_from": 100, "prefill_last": 0}
    injection = inject(model, recipe, command_line=settings)
    try:
        with torch.no_grad():
            model(torch.randint(1, 97, (1, 300)), past_key_values=HeteroCache(model))
        prompts = [operator.prompt_attention for operator in injection.attention_operators()]
        assert share_of_keys(prompts) == pytest.approx(share)
    finally:
        eject(model)
