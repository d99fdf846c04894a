"""Matrices of GGML's rare types stay in their blocks, as many bytes as in the file, and are multiplied by them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from hetero_kv import HeteroCache, inject, load_model, open_model
from hetero_kv.cpu_ops.weight_formats import FORMATS
from hetero_kv.models.gguf.file import GGUFFile
from hetero_kv.weights.block_numbers import numbers_of_blocks
from hetero_kv.weights.packed_weight import PackedWeight
from hetero_kv.weights.tensor_types import type_named
from tests.models.tiny_gguf import write
from tests.support.quantized_blocks import RARE, random_blocks
from tests.support.slow_variants import with_slow
from tests.support.tiny_qwen2 import TOKENS

HIDDEN = 256
METADATA = {
    "block_count": 1,
    "context_length": 512,
    "embedding_length": HIDDEN,
    "feed_forward_length": HIDDEN,
    "attention.head_count": 4,
    "attention.head_count_kv": 4,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": 64,
}
IDS = torch.tensor([[5, 9, 77, 31, 200, 8, 40, 41]])
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def blocks(name, rows, seed):
    """Random blocks whose numbers are of a trained matrix's size."""
    found = random_blocks(name, rows, HIDDEN, seed)
    if name == "NVFP4":
        found.reshape(rows, -1, 36)[..., :4] &= 31
    return found


@pytest.mark.parametrize("name", with_slow(["NVFP4", "IQ2_XS", "IQ3_S", *RARE], slow=RARE))
def test_a_model_keeps_its_blocks_and_computes_with_their_numbers(name, tmp_path):
    kind = type_named(name)
    tensors = {f"blk.0.{matrix}.weight": (blocks(name, HIDDEN, number), kind) for number, matrix in enumerate(MATRICES)}
    random = np.random.default_rng(0).standard_normal((len(TOKENS), HIDDEN))
    head = blocks(name, len(TOKENS), 9), kind
    tensors |= {
        # So small that attention looks at every token.
        "blk.0.attn_norm.weight": np.full(HIDDEN, 0.03),
        "blk.0.ffn_norm.weight": np.ones(HIDDEN),
        "output_norm.weight": np.ones(HIDDEN),
        "token_embd.weight": random,
        "output.weight": head,
    }
    path = write(tmp_path / "rare.gguf", "llama", METADATA, tensors)
    opened = open_model(path, dtype="float32")
    inject(opened.model, "dense", command_line={"block_size": 4, "max_seq_len": 64, "kv_type": "FP32"})
    model = opened.load().model
    stored = [info for info in GGUFFile.read(path).tensors if info.quantization is kind]
    kept = {id(each): each for module in model.modules() for each in vars(module).values()}
    packed = [each for each in kept.values() if isinstance(each, PackedWeight) and each.name == name]
    assert len(packed) == len(stored) == len(MATRICES) + 1
    # Rows are padded to sixteen.
    padding = -(-len(TOKENS) // 16) * 16 / len(TOKENS)
    most = 1.23 if name == "TQ1_0" else 1.05
    assert sum(each.data.nbytes for each in packed) <= most * padding * sum(info.nbytes for info in stored)
    expected = load_model(path, dtype="float32").model(IDS).logits
    found = model(IDS, past_key_values=HeteroCache(model, 64)).logits
    assert (found - expected).norm() / expected.norm() < 0.03


def test_q1_0_is_the_scale_or_minus_the_scale_by_each_bit():
    block = np.concatenate(
        [np.array([0.5], np.float16).view(np.uint8), np.array([0b101] + [0] * 14 + [0x80], np.uint8)]
    )
    expected = np.full(128, -0.5, np.float32)
    expected[[0, 2, 127]] = 0.5
    assert (numbers_of_blocks(block[None], GGMLQuantizationType.Q1_0) == expected).all()


def test_q2_0_is_minus_one_to_two_times_the_scale_by_each_two_bits():
    block = np.concatenate(
        [np.array([0.5], np.float16).view(np.uint8), np.array([0b11_10_01_00] + [0] * 14 + [0x40], np.uint8)]
    )
    expected = np.full(64, -0.5, np.float32)
    expected[[1, 2, 3, 63]] = 0.0, 0.5, 1.0, 0.0
    assert (numbers_of_blocks(block[None], type_named("Q2_0")) == expected).all()


def test_the_documentation_lists_the_types_that_stay_packed():
    text = (Path(__file__).parents[2] / "docs" / "gguf_files.md").read_text()
    listed = text.partition("as they are stored if their type is one of these: ")[2].partition(". ")[0]
    # Other tests take formats away and put them back, which changes their order.
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(FORMATS)
