"""The tensors of a GGUF file are used, known to be without effect, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
)

from hetero_kv import HeteroCache, inject, load_model, open_model
from hetero_kv.models import ModelError
from hetero_kv.models.gguf.architectures import inverse_transforms
from hetero_kv.models.gguf.config_from_file import configuration_of
from hetero_kv.models.gguf.weights import WeightMap
from tests.models.tiny_gguf import header, write
from tests.support.tiny_qwen2 import TOKENS

IDS = torch.tensor([[5, 9, 77, 31, 200, 8, 40, 41]])
LAYER = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
WIDTHS = {"attn_k": (32, 64), "attn_v": (32, 64), "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}


def llama_tensors(layers=2):
    """Names and shapes of a tiny Llama's file."""
    shapes = {"token_embd.weight": (97, 64), "output_norm.weight": (64,), "output.weight": (97, 64)}
    for layer in range(layers):
        for name in LAYER:
            shapes[f"blk.{layer}.{name}.weight"] = (64,) if name.endswith("norm") else WIDTHS.get(name, (64, 64))
    return shapes


def mapped(file):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration_of(file))
    return WeightMap.of(model, file)


@pytest.fixture(scope="module")
def llama_file():
    return header("llama", tensors=llama_tensors())


@pytest.fixture(scope="module")
def llama():
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(configuration_of(header("llama", tensors=llama_tensors())))


def test_every_tensor_has_its_place(llama_file):
    weights = mapped(llama_file)
    assert len(weights.targets) == len(llama_tensors()) == len({each.path for each in weights.targets.values()})


names = st.sampled_from(sorted(set(gguf.TENSOR_NAMES.values()))).map(lambda name: name.format(bid=1, xid=0))


@given(name=names, suffix=st.sampled_from([".weight", ".bias", ".scale", ".input_scale"]))
def test_a_further_tensor_is_refused_by_its_name(llama, llama_file, name, suffix):
    if f"{name}{suffix}" in llama_tensors() or name.startswith("rope_"):
        return
    more = replace(llama_file.tensors[1], name=f"{name}{suffix}")
    with pytest.raises(ModelError, match="tensors that this version has no place for in LlamaForCausalLM") as raised:
        WeightMap.of(llama, replace(llama_file, tensors=(*llama_file.tensors, more)))
    assert f"({name}{suffix})" in str(raised.value)


@given(number=st.integers(1, len(llama_tensors()) - 1))
def test_a_tensor_that_is_missing_is_named(llama, llama_file, number):
    tensors = list(llama_file.tensors)
    del tensors[number]
    with pytest.raises(ModelError, match=r"has no weights for 1 parameters of LlamaForCausalLM \(\w+"):
        WeightMap.of(llama, replace(llama_file, tensors=tuple(tensors)))


@pytest.mark.parametrize("rows", [1, 31, 33])
def test_a_tensor_of_another_shape_than_its_transform_takes_is_named(llama, rows):
    file = header("llama", tensors=llama_tensors() | {"blk.1.attn_k.weight": (rows, 64)})
    weights = WeightMap.of(llama, file)
    (info,) = (each for each in file.tensors if each.name == "blk.1.attn_k.weight")
    refused = pytest.raises(ModelError, match=rf"'blk\.1\.attn_k\.weight' of .* is \[{rows}, 64\], which does not fit")
    with refused:
        weights.row_order(info)
    with refused:
        weights.numbers(info, np.zeros(info.shape, np.float32))


def by_pairs(rows, heads):
    """Llama's: of each head both halves of a pair side by side."""
    return rows.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def by_kind(rows, heads, kinds):
    """Bloom's and Falcon's: by head, what is of one kind behind each other, in a file all of a kind."""
    rows = rows.reshape(heads, sum(kinds), -1)
    ends = np.cumsum(kinds)
    parts = (rows[:, end - count : end].reshape(-1) for end, count in zip(ends, kinds, strict=True))
    return np.concatenate(list(parts))


def by_place(rows, heads):
    """A delta net's: the first value head of every key head, then the second."""
    return rows.reshape(heads, 2, -1).swapaxes(0, 1).reshape(-1)


def sizes(**values):
    return SimpleNamespace(new_decoder_architecture=True, multi_query=False, **values)


@given(groups=st.integers(1, 4), per_group=st.integers(1, 3), dim=st.integers(1, 4).map(lambda half: 2 * half))
def test_the_converters_row_order_is_reversed(groups, per_group, dim):
    heads = groups * per_group
    config = sizes(
        num_attention_heads=heads,
        num_key_value_heads=groups,
        num_kv_heads=groups,
        linear_num_key_heads=groups,
        linear_num_value_heads=2 * groups,
        linear_key_head_dim=dim,
    )
    queries, keys = np.arange(heads * dim), np.arange(groups * dim)
    merged, falcon = np.arange(3 * heads * dim), np.arange((heads + 2 * groups) * dim)
    values, net = np.arange(2 * groups * dim), np.arange(4 * groups * dim)
    behind = np.concatenate([net[: 2 * groups * dim], by_place(net[2 * groups * dim :], groups)])
    for change, written in (
        (inverse_transforms.QUERY_ROWS, by_pairs(queries, heads)),
        (inverse_transforms.KEY_ROWS, by_pairs(keys, groups)),
        (inverse_transforms.QKV_BY_HEAD, by_kind(merged, heads, (1, 1, 1))),
        (inverse_transforms.FALCON_QKV, by_kind(falcon, groups, (per_group, 1, 1))),
        (inverse_transforms.VALUE_HEADS, by_place(values, groups)),
        (inverse_transforms.VALUE_HEADS_BEHIND, behind),
    ):
        assert change.keeps_blocks
        np.testing.assert_array_equal(change.apply(written, config), np.arange(len(written)))
    columns = by_place(values, groups)[None]
    assert inverse_transforms.VALUE_HEAD_COLUMNS.keeps_blocks
    np.testing.assert_array_equal(inverse_transforms.VALUE_HEAD_COLUMNS.apply(columns, config)[0], values)


EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "rope.dimension_count": 16}
MIXTURE = {
    "attn_q_norm.weight": (64,),
    "attn_k_norm.weight": (32,),
    "ffn_gate_inp.weight": (4, 64),
    "ffn_gate_exps.weight": (4, 32, 64),
    "ffn_up_exps.weight": (4, 32, 64),
    "ffn_down_exps.weight": (4, 64, 32),
    "exp_probs_b.bias": (4,),
}


def minimax_file(without=()):
    tensors = {name: shape for name, shape in llama_tensors().items() if ".ffn_" not in name or "norm" in name}
    tensors |= {f"blk.{layer}.{name}": shape for layer in range(2) for name, shape in MIXTURE.items()}
    kept = {name: shape for name, shape in tensors.items() if name not in without}
    return header("minimax-m2", EXPERTS, kept)


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        # A buffer, and half of a parameter.
        ("blk.1.exp_probs_b.bias", r"layers\.1\.mlp\.e_score_correction_bias"),
        ("blk.0.ffn_up_exps.weight", r"layers\.0\.mlp\.experts\.gate_up_proj"),
        ("blk.0.ffn_gate_exps.weight", r"layers\.0\.mlp\.experts\.gate_up_proj"),
    ],
)
def test_a_buffer_or_half_a_parameter_without_a_tensor_is_named(name, parameter):
    assert "blk.1.exp_probs_b.bias" in mapped(minimax_file()).targets
    with pytest.raises(ModelError, match=rf"has no weights for 1 parameters of MiniMaxM2ForCausalLM \(.*{parameter}"):
        mapped(minimax_file(without=(name,)))


def converted(model, order=True):
    """A Llama's tensors as llama.cpp's converter writes them: halves of a head's rotated pairs side by side."""
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    theirs = ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
              "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
    state = model.state_dict()
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for layer in range(model.config.num_hidden_layers):
        for name, path in zip(LAYER, theirs, strict=True):
            for suffix in ("weight", "bias"):
                numbers = state.get(f"model.layers.{layer}.{path}.{suffix}")
                if numbers is None:
                    continue
                if order and name in heads:
                    halves = numbers.reshape(heads[name], 2, -1, *numbers.shape[1:])
                    numbers = halves.swapaxes(1, 2).reshape(numbers.shape)
                tensors[f"blk.{layer}.{name}.{suffix}"] = numbers
    return {name: numbers.numpy() for name, numbers in tensors.items()}


@pytest.fixture(scope="module")
def biased_llama():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-6,
        initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


METADATA = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": 16,
}


@pytest.fixture(scope="module")
def write_llama(biased_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")

    def written(name, kind=None, metadata=METADATA, **tensors):
        return write(folder / name, "llama", metadata, converted(biased_llama) | tensors, kind)

    return written


def test_biases_are_read_and_the_converters_order_is_undone(write_llama, biased_llama):
    path = write_llama("biased.gguf")
    expected = biased_llama(IDS).logits
    for model in (load_model(path, dtype="float32").model, open_model(path, dtype="float32").load().model):
        torch.testing.assert_close(model(IDS).logits, expected)


def test_blocks_stay_packed_in_another_order(write_llama):
    path = write_llama("packed.gguf", GGMLQuantizationType.Q8_0)
    opened = open_model(path, dtype="float32")
    inject(opened.model, "dense", command_line={"block_size": 4, "max_seq_len": 64, "kv_type": "FP32"})
    model = opened.load().model
    assert model.model.layers[0].self_attn.q_proj.quantized.name == "Q8_0"
    long = IDS.repeat(1, 4)
    expected = load_model(path, dtype="float32").model(long).logits
    found = model(long, past_key_values=HeteroCache(model, 64)).logits
    assert (found - expected).norm() / expected.norm() < 0.03


def test_the_scale_of_a_matrix_is_refused(write_llama):
    path = write_llama("scaled.gguf", **{"blk.0.attn_q.scale": np.ones(1)})
    for load in (load_model, lambda path: open_model(path).load()):
        with pytest.raises(ModelError, match=r"no place for in LlamaForCausalLM \(blk\.0\.attn_q\.scale\); give"):
            load(path)


def test_types_without_kernels_are_told_in_one_line(write_llama, caplog, monkeypatch):
    monkeypatch.delitem(__import__("hetero_kv.cpu_ops.weight_formats", fromlist=["FORMATS"]).FORMATS, "Q5_1")
    opened = open_model(write_llama("rare.gguf", GGMLQuantizationType.Q5_1), dtype="float32")
    inject(opened.model, "dense", command_line={"max_seq_len": 64})
    opened.load()
    (record,) = (record for record in caplog.records if "without kernels" in record.message)
    assert record.message.endswith("tensors of types without kernels are converted: 16 of Q5_1 to Q8_0")


@pytest.fixture(scope="module")
def minimax(tmp_path_factory):
    """A tiny MiniMax-M2 with a bias of its experts that is a buffer, and its file."""
    torch.manual_seed(2)
    config = MiniMaxM2Config(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, num_local_experts=4, num_experts_per_tok=2,
        rms_norm_eps=1e-6, initializer_range=0.2, rotary_dim=8, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = MiniMaxM2ForCausalLM(config).eval()
    tensors = converted(model, order=False)
    for number, layer in enumerate(model.model.layers):
        layer.mlp.e_score_correction_bias.normal_()
        gate, up = layer.mlp.experts.gate_up_proj.detach().chunk(2, dim=1)
        parts = {
            "attn_q_norm.weight": layer.self_attn.q_norm.weight,
            "attn_k_norm.weight": layer.self_attn.k_norm.weight,
            "ffn_gate_inp.weight": layer.mlp.gate.weight,
            "ffn_gate_exps.weight": gate,
            "ffn_up_exps.weight": up,
            "ffn_down_exps.weight": layer.mlp.experts.down_proj,
            "exp_probs_b.bias": layer.mlp.e_score_correction_bias,
        }
        tensors |= {f"blk.{number}.{name}": part.detach().numpy() for name, part in parts.items()}
    heads = {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 8}
    metadata = METADATA | EXPERTS | heads | {"rope.freq_base": config.rope_parameters["rope_theta"]}
    return model, write(tmp_path_factory.mktemp("minimax") / "tiny.gguf", "minimax-m2", metadata, tensors)


def test_buffers_are_loaded_with_rules_and_without(minimax):
    model, path = minimax
    expected = model(IDS).logits
    torch.testing.assert_close(load_model(path, dtype="float32").model(IDS).logits, expected)
    opened = open_model(path, dtype="float32")
    inject(opened.model, "dense", command_line={"block_size": 4, "max_seq_len": 64, "kv_type": "FP32"})
    found = opened.load().model(IDS, past_key_values=HeteroCache(opened.model, 64)).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
