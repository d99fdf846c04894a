"""Weights that stay packed under changing rules, as in evaluations of several methods."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType

from hetero_kv import HeteroCache, eject, inject, open_model
from hetero_kv.adapter.quantized_module import QuantizedModule
from hetero_kv.evals.packed_model import load_packed
from hetero_kv.rules.injecting import eject_around_packed_weights, suspended
from hetero_kv.rules.matching import InjectionError
from tests.support.slow_variants import with_few

SMALL = {"block_size": 4, "sink_tokens": 4, "local_windows_len": 4, "max_seq_len": 256, "kv_type": "FP32"}
IDS = torch.tensor([[5, 9, 77, 31, 200, 8] * 5])


@pytest.fixture(scope="module")
def q8_0_file(write_tiny_gguf, tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("packed") / "q8_0.gguf", kind=GGMLQuantizationType.Q8_0)


@pytest.fixture
def model(q8_0_file):
    return load_packed(q8_0_file, dtype="float32").model


def packed(model):
    """The modules of packed weights, each once."""
    return {module for module in model.modules() if isinstance(module, QuantizedModule)}


def answers(model):
    """Logits of a prompt and of three tokens behind it."""
    cache = HeteroCache(model, 64)
    with torch.no_grad():
        found = [model(IDS, past_key_values=cache).logits]
        found += [model(torch.tensor([[token]]), past_key_values=cache).logits for token in (7, 40, 3)]
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("recipe", with_few(["dense", "quest", "streaming_llm"], quick=["streaming_llm"]))
def test_a_method_over_them_computes_what_it_does_with_weights_of_its_own(q8_0_file, model, recipe):
    settings = SMALL if recipe != "streaming_llm" else {"budget": 16, "max_seq_len": 256}
    standing = packed(model)
    assert len(standing) == 2 * 7 + 2
    inject(model, recipe, command_line=settings)
    opened = open_model(q8_0_file, dtype="float32")
    inject(opened.model, recipe, command_line=settings)
    assert torch.equal(answers(model), answers(opened.load().model))
    eject(model)
    assert packed(model) == standing


def test_the_untouched_model_runs_with_them_and_has_no_rules(q8_0_file, model):
    assert getattr(model, "hetero_kv_injection", None) is None
    opened = open_model(q8_0_file, dtype="float32")
    inject(opened.model, "dense", command_line=SMALL)
    through_rules = opened.load().model(IDS, past_key_values=HeteroCache(opened.model, 64)).logits
    torch.testing.assert_close(model(IDS).logits, through_rules, rtol=1e-4, atol=1e-4)


def test_rules_that_are_suspended_leave_them(model):
    inject(model, "quest", command_line=SMALL)
    standing = packed(model)
    with suspended(model):
        assert packed(model) == standing
    assert packed(model) == standing


def test_rules_that_want_other_weights_are_refused_by_name_and_change_nothing(model):
    before = packed(model)
    with pytest.raises(InjectionError, match=r"weights of \S+ stay packed under all rules.*--unpacked"):
        inject(model, "dense", command_line={**SMALL, "weights": "q4_0"})
    assert packed(model) == before
    inject(model, "dense", command_line=SMALL)


def test_a_model_without_rules_has_nothing_to_be_left(model):
    with pytest.raises(InjectionError, match="no rules injected"):
        eject_around_packed_weights(model)
