"""MInference's patterns: when the search runs, and what it saves."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.families.sparse_prefill import attention, known_patterns, minference
from hetero_kv.families.sparse_prefill.minference import MeasuredPattern, Pattern
from hetero_kv.gpu_ops.attention import chunk_attention
from tests.families.sparse_prompts import logits
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model


def test_patterns_are_found_once_and_kept(qwen2, own_folder, monkeypatch, caplog):
    ids = torch.randint(1, 97, (1, 500), generator=torch.Generator().manual_seed(2))
    settings = {"prefill_budget": 256, "error_budget": 1.0}
    exact = logits(qwen2, "dense", ids)
    with caplog.at_level(logging.WARNING):
        first = logits(qwen2, "minference", ids, **settings)
    assert torch.equal(first, exact)
    (file,) = own_folder.iterdir()
    assert [record.message.count(str(file)) for record in caplog.records] == [1]
    kept = json.loads(file.read_text())["layers"]
    assert len(kept) == 3
    assert all(len(each["heads"]) == 4 and each["tokens"] == 500 for each in kept.values())

    def searched(*_):
        raise AssertionError("searched again")

    monkeypatch.setattr(minference, "measured_patterns", searched)
    second = logits(qwen2, "minference", ids, **settings)
    assert not torch.allclose(second, exact, atol=1e-2)
    # Another price chooses among the tried patterns; another budget repeats the search.
    assert not torch.equal(logits(qwen2, "minference", ids, **settings | {"error_budget": 0.0}), second)
    with pytest.raises(AssertionError, match="searched again"):
        logits(qwen2, "minference", ids, prefill_budget=128)
    other = tiny_model("qwen2", seed=5, max_position_embeddings=2048)
    with pytest.raises(AssertionError, match="searched again"):
        logits(other, "minference", ids, **settings)


def searches(monkeypatch, queries, least):
    """Records the arguments of pattern searches, with this many queries, for prompts of at least 64 * least tokens."""
    seen, measured_patterns = [], minference.measured_patterns
    monkeypatch.setattr(minference, "TRIED_QUERIES", queries)
    monkeypatch.setattr(attention, "_SEARCHED_FROM", least)
    monkeypatch.setattr(
        minference,
        "measured_patterns",
        lambda chunk, exact, budget: seen.append((chunk, exact)) or measured_patterns(chunk, exact, budget),
    )
    return seen


@pytest.mark.parametrize("chunk_size", with_few([40, 200, 400, 401, 1000], (40, 400, 401)))
def test_patterns_are_searched_by_a_prompts_last_queries_in_whatever_chunks_they_are(qwen2, monkeypatch, chunk_size):
    ids = torch.randint(1, 97, (1, 401), generator=torch.Generator().manual_seed(2))
    seen = searches(monkeypatch, 256, 2)
    logits(qwen2, "minference", ids, chunk_size=chunk_size, prefill_from=128)
    assert [chunk.q[:, :, -256:].shape[2] for chunk, _ in seen] == [256] * 3
    for chunk, exact in seen:
        last = chunk.last(256)
        assert (last.past, last.total) == (145, 401)
        expected, _ = chunk_attention(last.q, last.past_k, last.past_v, last.k, last.v, last.scale, None)
        torch.testing.assert_close(exact[:, :, -256:], expected, rtol=1e-4, atol=1e-5)


def test_patterns_are_searched_behind_no_turn_that_has_fewer_queries(qwen2, monkeypatch):
    seen = searches(monkeypatch, 256, 4)
    turns = torch.randint(1, 97, (1, 1000), generator=torch.Generator().manual_seed(2)).split([200, 250, 256, 294], 1)
    inject(qwen2, "minference", command_line={"chunk_size": 100, "max_seq_len": 1024, "prefill_from": 64})
    try:
        cache, found = HeteroCache(qwen2), []
        with torch.no_grad():
            for turn in turns:
                qwen2(turn, past_key_values=cache)
                found.append(len(seen))
    finally:
        eject(qwen2)
    assert found == [0, 0, 3, 3]
    assert seen[0][0].total == 706


def test_patterns_are_searched_behind_a_turn_under_a_policy_by_what_it_attends_to(qwen2, monkeypatch):
    seen = searches(monkeypatch, 256, 4)
    settings = {"prefill": "minference", "prefill_from": 64, "budget": 100, "chunk_size": 128, "max_seq_len": 1024}
    lengths, price_at = [], minference.price_at
    monkeypatch.setattr(minference, "price_at", lambda price, length: lengths.append(length) or price_at(price, length))
    inject(qwen2, "h2o", command_line=settings)
    try:
        cache = HeteroCache(qwen2)
        with torch.no_grad():
            for tokens in (200, 300, 200):
                ids = torch.randint(1, 97, (1, tokens), generator=torch.Generator().manual_seed(tokens))
                qwen2(ids, past_key_values=cache)
    finally:
        eject(qwen2)
    assert [chunk.total for chunk, _ in seen] == [400] * 3
    assert set(lengths) == {300}


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 2, "layers": 3}', "{" * 5000, '{"format": 1, "layers": {"key": {}}}']
)
def test_a_damaged_file_of_patterns_is_none(own_folder, content):
    known = known_patterns.KnownPatterns("some/model")
    own_folder.mkdir()
    known.path.write_text(content)
    assert known.of_layer("key", 2) is None
    tried = [
        [
            MeasuredPattern(Pattern("a_shape", 1, 2), 0.25, 70.5),
            MeasuredPattern(Pattern("block_sparse", 0, 64), 0.0, 128.0),
        ]
    ] * 2
    known.add("key", tried, 9)
    assert known.of_layer("key", 2) == tried
    assert known.path.parent == own_folder


_ROW = ["a_shape", 1, 2, 0.1, 64.0]


@pytest.mark.parametrize(
    "row",
    [
        *([*_ROW[:place], wrong, *_ROW[place + 1 :]] for place, wrong in enumerate(["b_shape", -1, True, -0.1, "64"])),
        _ROW[:3],
        [*_ROW, 1],
        [*_ROW[:3], float("nan"), 64.0],
        7,
    ],
)
def test_an_entry_that_is_no_pattern_is_none(own_folder, row):
    known = known_patterns.KnownPatterns("model")
    known.add("other", [], 1)
    said = json.loads(known.path.read_text())
    for heads, is_known in ([[_ROW]], True), ([[_ROW, row]], False), ([[]], False), ([row], False):
        said["layers"]["key"] = {"heads": heads}
        known.path.write_text(json.dumps(said))
        assert (known.of_layer("key", 1) is not None) is is_known
    assert known.of_layer("other", 1) is None


def test_a_folder_that_cannot_be_written_is_warned_of(own_folder, caplog):
    own_folder.write_text("a file")
    known_patterns.KnownPatterns("model").add("key", [], 1)
    assert "cannot be saved, and will be searched again" in caplog.text
