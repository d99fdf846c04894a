"""Trials of fast paths are not repeated for a model that nothing has changed, and are for every other."""

from __future__ import annotations

import json
import logging
import os

import pytest
import torch

from hetero_kv import HeteroCache, open_model
from hetero_kv.adapter import kept_trials, llama_layer
from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.adapter.fused_decode_layer import FusedDecodeLayer
from hetero_kv.adapter.fused_prefill_layer import FusedPrefillLayer
from hetero_kv.models import packed_cache
from hetero_kv.threads import set_threads
from tests.models.test_packed_cache import written

NAMES = "the fused decode layer", "the fused prefill layer"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """The folder of what is kept; packed weights of any size and age are."""
    monkeypatch.setenv("HETERO_KV_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(packed_cache, "WORTH_KEEPING", 1)
    monkeypatch.setattr(packed_cache, "SETTLED_NS", 0)
    return tmp_path / "home" / "packed"


@pytest.fixture
def path(tmp_path):
    return written(tmp_path / "tiny.gguf")


@pytest.fixture
def tried(monkeypatch):
    """The layers that are tried, by name of the fast path and path."""
    found, agrees = [], llama_layer._agrees

    def noted(fast_path, layer, tolerance, name, level):
        found.append((name, fast_path.operator.layer_idx))
        return agrees(fast_path, layer, tolerance, name, level)

    monkeypatch.setattr(llama_layer, "_agrees", noted)
    return found


def started(path, **arguments):
    settings = {"dtype": "float32", "device": "cpu", "config": "dense", "keeps_trials": True, "max_seq_len": 64}
    return open_model(path, **settings | arguments).load().model


def fast_paths(model):
    operators = model.hetero_kv_injection.operators.values()
    return [(each._native, each._short) for each in operators if isinstance(each, ChunkedDecoderLayer)]


ALL = [(name, layer) for layer in range(2) for name in NAMES]
FIRST = ALL[:2]


def test_a_later_start_tries_the_first_layer_alone_and_computes_the_same(path, tried):
    first, second = (started(path) for _ in range(2))
    assert tried == ALL + FIRST
    ids = torch.arange(5)[None]
    logits = []
    for model in (first, second):
        cache = HeteroCache(model)
        with torch.no_grad():
            logits.append([model(part, past_key_values=cache).logits for part in (ids, ids[:, :1])])
    assert all(torch.equal(*both) for both in zip(*logits, strict=True))
    for layer in fast_paths(second):
        assert [type(each) for each in layer] == [FusedDecodeLayer, FusedPrefillLayer]
    assert [[each.found() for each in layer] for layer in fast_paths(first)] == [
        [each.found() for each in layer] for layer in fast_paths(second)
    ]


def test_only_those_who_ask_for_it_keep_them(path, tried):
    for _ in range(2):
        started(path, keeps_trials=False)
    assert tried == ALL * 2


CHANGES = {
    "weights": lambda path, patch: os.utime(path, (1, 1)),
    "code": lambda path, patch: patch.setattr(kept_trials, "file_states", lambda folder: ["other"]),
    "library": lambda path, patch: patch.setattr(kept_trials.metadata, "version", lambda name: "other"),
    "processor": lambda path, patch: patch.setattr(kept_trials, "isa", lambda: "other"),
    "environment": lambda path, patch: patch.setenv("MKL_CBWR", "COMPATIBLE"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_all_are_tried(path, tried, change, monkeypatch):
    started(path)
    CHANGES[change](path, monkeypatch)
    started(path)
    assert tried == ALL * 2


OTHERS = {"threads_num": 1}, {"block_size": 4}, {"config": "quest"}, {"dtype": "bfloat16"}


@pytest.mark.parametrize("settings", OTHERS)
def test_with_other_settings_all_are_tried(path, tried, settings):
    threads = torch.get_num_threads()
    started(path, threads_num=2)
    try:
        started(path, **{"threads_num": 2} | settings)
    finally:
        set_threads(threads)
    assert tried == ALL * 2


def test_damage_is_seen_and_told(path, tried, home, caplog):
    started(path)
    (kept,) = home.rglob(kept_trials.TRIALS)
    whole = kept.read_text()
    kept.write_text(whole.replace("0.", "1.", 1))
    with caplog.at_level(logging.WARNING):
        started(path)
    assert f"{kept} is damaged" in caplog.text
    assert tried == ALL * 2
    assert kept.read_text() == whole


def test_a_layer_that_differs_is_tried_and_told_at_every_start(path, tried, home, caplog, monkeypatch):
    monkeypatch.setattr(FusedDecodeLayer, "difference_from", lambda self, layer: 1.0)
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            model = started(path)
        assert "the fused decode layer differs from the layer" in caplog.text
        assert [decode for decode, _ in fast_paths(model)] == [None, None]
    assert tried == ALL * 2
    assert not list(home.rglob(kept_trials.TRIALS))


def test_results_that_the_first_layer_contradicts_go(path, tried, home, caplog):
    started(path)
    (kept,) = home.rglob(kept_trials.TRIALS)
    content = json.loads(kept.read_text().partition("\n")[2])
    # The scale of attention.
    content["results"] = {
        key: json.loads(json.dumps(found).replace("0.25", "0.5")) for key, found in content["results"].items()
    }
    text = json.dumps(content)
    kept.write_text(f"{kept_trials._digest(text)}\n{text}")
    with caplog.at_level(logging.WARNING):
        started(path)
    assert "its trials have other results than those kept" in caplog.text
    assert tried == ALL * 2
