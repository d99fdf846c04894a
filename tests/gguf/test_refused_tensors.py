"""Tensors that a model has no use for, or cannot be made of, are refused by name."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hetero_kv import load_model
from hetero_kv.models import ModelError
from tests.support.gguf_models.container import Layout

#: Expert tensors of 4 experts, 64 inputs and 32 outputs.
EXPERTS = {"ffn_down_exps.bias": (4, 64), "ffn_gate_exps.weight": (4, 32, 64), "ffn_gate_up_exps.weight": (4, 64, 64)}


def refused(layout, path, message):
    layout.write(path)
    with pytest.raises(ModelError, match=message) as error:
        load_model(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", ["gpt2", "bloom", "mamba", "nemotron_h", "gemma4"])
@pytest.mark.parametrize("tensors", [["rope_freqs"], ["rope_factors_long", "rope_factors_short"]])
def test_factors_of_a_rotation_that_the_model_lacks(written, tmp_path, name, tensors):
    layout = Layout.of(written(name).path)
    layout.tensors = [each for each in layout.tensors if each.name != "rope_freqs.weight"]
    for tensor in tensors:
        layout.add(f"{tensor}.weight", [8], [3.0] * 8)
    if (name, tensors) == ("gemma4", ["rope_freqs"]):
        message = r"rope_freqs\.weight that is no share of a head"
    else:
        message = rf"has the tensor {tensors[0]}\.weight, which scales a rotation that models of {name} do not have"
    refused(layout, tmp_path / "more.gguf", message)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen3moe", "blk.0.ffn_down_exps.bias"),
        ("llama4", "blk.1.ffn_down_exps.bias"),
        ("nemotron_h_moe", "blk.1.ffn_gate_exps.weight"),
        ("nemotron_h_moe", "blk.1.ffn_gate_up_exps.weight"),
        # Its parameter has gates and ups in turn, and a merged tensor would have all gates first.
        ("gpt-oss", "blk.0.ffn_gate_up_exps.weight"),
    ],
)
def test_experts_that_the_model_has_no_place_for(written, tmp_path, name, tensor):
    layout = Layout.of(written(name).path)
    shape = EXPERTS[tensor.split(".", 2)[2]]
    if name == "gpt-oss":
        parts = [f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "up")]
        layout.tensors = [each for each in layout.tensors if each.name not in parts]
    layout.add(tensor, list(shape[::-1]), np.ones(shape))
    refused(layout, tmp_path / "more.gguf", rf"tensors that this version has no place for .*\({re.escape(tensor)}\)")


@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3next", "qwen35", "bailingmoe3", "kimi-linear"])
@pytest.mark.parametrize("factor", [-1.0, 0.0])
def test_decays_without_a_logarithm(written, tmp_path, name, factor):
    layout = Layout.of(written(name).path)
    layout.numbers("blk.0.ssm_a")[:] *= factor
    refused(layout, tmp_path / "decay.gguf", r"'blk\.0\.ssm_a' .*A_log cannot be made \(a logarithm of 0 or less")


@pytest.mark.parametrize("numbers", [[4, 0], [-1, 0], [0.0, 1.0]], ids=["too many", "negative", "fractions"])
def test_tables_of_other_experts_than_the_models(written, tmp_path, numbers):
    layout = Layout.of(written("deepseek4").path)
    table = next(each for each in layout.tensors if each.name == "blk.0.ffn_gate_tid2eid.weight")
    if isinstance(numbers[0], float):
        table.kind = 0
    table.data[:8] = np.array(numbers, np.float32 if table.kind == 0 else np.int32).tobytes()
    refused(
        layout, tmp_path / "table.gguf", r"'blk\.0\.ffn_gate_tid2eid\.weight' .* other numbers than those of 4 expe"
    )


@pytest.mark.parametrize(
    ("name", "tensor", "parameter"),
    [
        ("llama", "attn_v.weight", "self_attn.v_proj.weight"),
        ("qwen3moe", "ffn_down_exps.weight", "mlp.experts.down_proj"),
        ("deepseek2", "attn_k_b.weight", "self_attn.kv_b_proj.weight"),
    ],
)
def test_numbers_beyond_the_range_of_the_dtype(written, tmp_path, name, tensor, parameter):
    layout = Layout.of(written(name).path)
    layout.numbers(f"blk.0.{tensor}").flat[3] = 1e5
    layout.write(tmp_path / "large.gguf")
    with pytest.raises(
        ModelError, match=rf"large has numbers in model\.layers\.0\.{re.escape(parameter)} that float16"
    ):
        load_model(tmp_path / "large.gguf", dtype="float16", device="cpu")
    load_model(tmp_path / "large.gguf", dtype="bfloat16", device="cpu")


def test_a_falcon_h1_whose_output_is_its_embedding(written, tmp_path):
    layout = Layout.of(written("falcon-h1").path)
    layout.tensors = [each for each in layout.tensors if each.name != "output.weight"]
    layout.move_together()
    refused(layout, tmp_path / "tied.gguf", r"has no tensor output\.weight: .* which no key states; give")


@pytest.mark.parametrize("name", ["llama", "deepseek2"])
def test_a_vocabulary_without_a_model(written, tmp_path, name):
    layout = Layout.of(written(name).path)
    layout.tensors = []
    refused(layout, tmp_path / "vocabulary.gguf", r"has no tensor token_embd\.weight; give the file of a whole model")
