"""Fused layers do not depend on the argument names of transformers' modules."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers.models.llama import modeling_llama

from hetero_kv import HeteroCache, inject
from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.adapter.fused_decode_layer import FusedDecodeLayer
from hetero_kv.adapter.fused_prefill_layer import FusedPrefillLayer
from hetero_kv.adapter.llama_layer import Trial
from tests.support.tiny_models import tiny_model

SETTINGS = {"block_size": 4, "max_seq_len": 256, "kv_type": "FP32", "weights": "q8_0"}
PROMPT = (torch.arange(110) % 90 + 2)[None, :]
# As in transformers 5.24: the cache under another name, and another argument of `update`.
OTHER_NAMES = [
    (r"\bpast_key_values\b", "cache"),
    (r"\.update\(key_states, value_states, self\.layer_idx\)", ".update(key_states, value_states, 0, kwargs={})"),
    (r"(OutputWithPast\([^)]*?)\bcache=cache", r"\1past_key_values=cache"),
    (r"(create_causal_mask\([^)]*?)\bcache=cache", r"\1past_key_values=cache"),
    (r"cache=outputs\.cache", "past_key_values=outputs.past_key_values"),
    (r", 0, kwargs", ", self.layer_idx, kwargs"),
]


@pytest.fixture
def renamed(tmp_path, monkeypatch):
    """A tiny Llama of transformers' own code, with other names of its private arguments."""
    if "past_key_values: Cache" not in (source := Path(modeling_llama.__file__).read_text()):
        return tiny_model("llama")
    for pattern, replacement in OTHER_NAMES:
        source = re.sub(pattern, replacement, source)
    file = tmp_path / "modeling_llama.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location("transformers.models.llama.modeling_renamed", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    original = tiny_model("llama")
    model = module.LlamaForCausalLM(original.config).eval()
    model.load_state_dict(original.state_dict())
    return model


def logits_of(model, name):
    cache = HeteroCache(model, 256)
    with torch.no_grad():
        prompt = model(PROMPT, **{name: cache}).logits
        steps = [model(torch.full((1, 1), 3 + step), **{name: cache}).logits for step in range(3)]
    return torch.cat([prompt, *steps], dim=1)


def test_both_fast_ways_are_taken_under_other_names(renamed, caplog):
    original = tiny_model("llama")
    for model in (original, renamed):
        inject(model, "quest", command_line=SETTINGS)
    assert torch.equal(logits_of(renamed, "cache"), logits_of(original, "past_key_values"))
    layers = [module for module in renamed.modules() if isinstance(module, ChunkedDecoderLayer)]
    assert all(isinstance(layer._native, FusedDecodeLayer) for layer in layers)
    assert all(isinstance(layer._short, FusedPrefillLayer) for layer in layers)
    assert not caplog.records


def test_a_failed_trial_is_reported_once_per_model(monkeypatch, caplog):
    def refuse(*args):
        raise TypeError("update() got an unexpected keyword argument 'more'")

    monkeypatch.setattr(Trial, "of", refuse)
    for _ in range(2):
        model = tiny_model("llama")
        inject(model, "quest", command_line=SETTINGS)
        with caplog.at_level(logging.WARNING):
            logits_of(model, "past_key_values")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4
    assert all("TypeError" in each for each in said)
    assert {each.split(":")[1].partition(" cannot")[0].strip() for each in said} == {
        "the fused decode layer", "the fused prefill layer",
    }  # fmt: skip
