"""GGUF files of real models' shapes with few layers and random weights, for measurements of speed.

    python -m benchmarks.shapes NAME LAYERS FILE.gguf

A layer has the widths, the experts and the storage types of a usual Q4_K_M file. Weights are random bits under small
scales: the model's texts mean nothing, and its numbers stay finite.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers

from benchmarks.shape_file import ShapeFile, attention_keys, more_bits
from benchmarks.state_space_shapes import FALCON_H1, falcon_h1, nemotron, nemotron_keys

_END = "<|endoftext|>"
_NORMAL, _CONTROL = 1, 3


@dataclass(frozen=True)
class Shape:
    """A model's shape.

    Attributes:
        architecture: GGUF's name.
        vocabulary: number of tokens.
        pre: how text is split.
        keys: layers -> metadata behind the architecture's name.
        tensors: (file, layer) -> None, adds a layer's tensors.
        width: of the hidden states.
        embedding: storage type of the embedding.
        head: storage type of the output matrix; None for a tied one.
        last_norm: name of the norm before it.
    """

    architecture: str
    vocabulary: int
    pre: str
    width: int
    keys: Callable[[int], dict[str, Any]]
    tensors: Callable[[ShapeFile, int], None]
    embedding: Kind = Kind.Q4_K
    head: Kind | None = Kind.Q6_K
    last_norm: str = "output_norm"


def _qwen3(file: ShapeFile, layer: int) -> None:
    prefix = f"blk.{layer}."
    file.norms(prefix, attn_norm=2048, ffn_norm=2048, attn_q_norm=128, attn_k_norm=128)
    file.attention(prefix, 2048, 4096, 512, values=more_bits(layer))
    file.experts(prefix, 2048, 128, 768, down=more_bits(layer))


def _qwen35(file: ShapeFile, layer: int) -> None:
    prefix = f"blk.{layer}."
    file.norms(prefix, attn_norm=2048, post_attention_norm=2048)
    if layer % 4 == 3:
        file.norms(prefix, attn_q_norm=256, attn_k_norm=256)
        file.attention(prefix, 2048, 4096, 512, values=more_bits(layer), gated=True)
    else:
        file.matrix(f"{prefix}attn_qkv", 8192, 2048)
        file.matrix(f"{prefix}attn_gate", 4096, 2048)
        file.matrix(f"{prefix}ssm_alpha", 32, 2048, Kind.Q8_0)
        file.matrix(f"{prefix}ssm_beta", 32, 2048, Kind.Q8_0)
        file.matrix(f"{prefix}ssm_out", 2048, 4096)
        file.numbers(f"{prefix}ssm_a", 32, mean=-1.0, scale=0.1)
        file.numbers(f"{prefix}ssm_dt.bias", 32)
        file.numbers(f"{prefix}ssm_conv1d.weight", 8192, 4, scale=0.3)
        file.norms(prefix, ssm_norm=128)
    file.experts(prefix, 2048, 256, 512, down=more_bits(layer))
    file.gated(prefix, 2048, 512, suffix="_shexp")
    file.numbers(f"{prefix}ffn_gate_inp_shexp.weight", 2048)


def _gpt_oss(file: ShapeFile, layer: int) -> None:
    prefix = f"blk.{layer}."
    file.norms(prefix, attn_norm=2880, post_attention_norm=2880)
    file.attention(prefix, 2880, 4096, 512, Kind.Q8_0, Kind.Q8_0)
    for name, width in {"q": 4096, "k": 512, "v": 512, "output": 2880}.items():
        file.numbers(f"{prefix}attn_{name}.bias", width)
    file.numbers(f"{prefix}attn_sinks.weight", 64)
    file.experts(prefix, 2880, 32, 2880, Kind.MXFP4, Kind.MXFP4)
    file.numbers(f"{prefix}ffn_gate_inp.bias", 32)
    for name in ("gate", "up", "down"):
        file.numbers(f"{prefix}ffn_{name}_exps.bias", 32, 2880)


def _gemma3(file: ShapeFile, layer: int) -> None:
    prefix = f"blk.{layer}."
    file.norms(
        prefix, attn_norm=3840, post_attention_norm=3840, ffn_norm=3840, post_ffw_norm=3840, attn_q_norm=256,
        attn_k_norm=256,
    )  # fmt: skip
    file.attention(prefix, 3840, 4096, 2048, values=more_bits(layer))
    file.gated(prefix, 3840, 15360, down=more_bits(layer))


def _llama31(file: ShapeFile, layer: int) -> None:
    prefix = f"blk.{layer}."
    if layer == 0:
        # Llama 3.1's RoPE scaling: 8 for waves longer than 8,192 tokens, none for those shorter than 2,048.
        turns = 8192 * 5e5 ** -(np.arange(64) / 64) / (2 * np.pi)
        kept = np.clip((turns - 1) / 3, 0, 1)
        file.writer.add_tensor("rope_freqs.weight", (1 / (kept + (1 - kept) / 8)).astype(np.float32))
    file.norms(prefix, attn_norm=4096, ffn_norm=4096)
    file.attention(prefix, 4096, 4096, 1024, values=more_bits(layer))
    file.gated(prefix, 4096, 14336, down=more_bits(layer))


def _attends(layer: int) -> bool:
    return layer in (2, 6, 10, 14, 18, 21)


def _lfm2(file: ShapeFile, layer: int) -> None:
    prefix = f"blk.{layer}."
    file.norms(prefix, attn_norm=2048, ffn_norm=2048)
    if _attends(layer):
        file.norms(prefix, attn_q_norm=64, attn_k_norm=64)
        file.attention(prefix, 2048, 2048, 512, values=more_bits(layer))
    else:
        file.numbers(f"{prefix}shortconv.conv.weight", 2048, 3, scale=0.5)
        file.matrix(f"{prefix}shortconv.in_proj", 3 * 2048, 2048)
        file.matrix(f"{prefix}shortconv.out_proj", 2048, 2048)
    if layer < 2:
        file.gated(prefix, 2048, 7168, down=more_bits(layer))
        return
    file.experts(prefix, 2048, 32, 1792, down=more_bits(layer))
    file.numbers(f"{prefix}exp_probs_b.bias", 32)


_QWEN3 = {
    "context_length": 1 << 18,
    "embedding_length": 2048,
    "feed_forward_length": 6144,
    "expert_count": 128,
    "expert_used_count": 8,
    "expert_feed_forward_length": 768,
    **attention_keys(32, 4, 128, 1e6),
}
_QWEN35 = {
    "context_length": 1 << 18,
    "embedding_length": 2048,
    "expert_count": 256,
    "expert_used_count": 8,
    "expert_feed_forward_length": 512,
    "expert_shared_feed_forward_length": 512,
    "rope.dimension_count": 64,
    "rope.dimension_sections": [11, 11, 10, 0],
    "ssm.conv_kernel": 4,
    "ssm.state_size": 128,
    "ssm.group_count": 16,
    "ssm.time_step_rank": 32,
    "ssm.inner_size": 4096,
    "full_attention_interval": 4,
    **attention_keys(16, 2, 256, 1e7),
}
_GPT_OSS = {
    "context_length": 1 << 17,
    "embedding_length": 2880,
    "feed_forward_length": 2880,
    "expert_count": 32,
    "expert_used_count": 4,
    "expert_feed_forward_length": 2880,
    "attention.sliding_window": 128,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 32.0,
    "rope.scaling.original_context_length": 4096,
    **attention_keys(64, 8, 64, 1.5e5),
}
_GEMMA3 = {
    "context_length": 1 << 17,
    "embedding_length": 3840,
    "feed_forward_length": 15360,
    "attention.sliding_window": 1024,
    "rope.scaling.type": "linear",
    "rope.scaling.factor": 8.0,
    **attention_keys(16, 8, 256, 1e6),
}
_LLAMA31 = {
    "context_length": 1 << 17,
    "embedding_length": 4096,
    "feed_forward_length": 14336,
    "rope.dimension_count": 128,
    **attention_keys(32, 8, 128, 5e5),
}
_LFM2 = {
    "context_length": 1 << 17,
    "embedding_length": 2048,
    "feed_forward_length": 7168,
    "expert_count": 32,
    "expert_used_count": 4,
    "expert_feed_forward_length": 1792,
    "leading_dense_block_count": 2,
    "expert_gating_func": 2,
    "shortconv.l_cache": 3,
    "vocab_size": 65536,
    **{
        key: value
        for key, value in attention_keys(32, 8, 64, 1e6).items()
        if key not in ("attention.key_length", "attention.value_length")
    },
}
SHAPES = {
    "qwen3-30b-a3b": Shape("qwen3moe", 151936, "qwen2", 2048, lambda layers: _QWEN3, _qwen3),
    "qwen3.5-35b-a3b": Shape("qwen35moe", 248320, "qwen35", 2048, lambda layers: _QWEN35, _qwen35),
    "gpt-oss-20b": Shape(
        "gpt-oss", 201088, "gpt-4o", 2880, lambda layers: _GPT_OSS, _gpt_oss, Kind.Q8_0, Kind.Q8_0
    ),
    "llama-3.1-8b": Shape("llama", 128256, "llama-bpe", 4096, lambda layers: _LLAMA31, _llama31),
    "gemma-3-12b": Shape("gemma3", 262144, "qwen2", 3840, lambda layers: _GEMMA3, _gemma3, Kind.Q6_K, None),
    "lfm2-8b-a1b": Shape(
        "lfm2moe", 65536, "lfm2", 2048,
        lambda layers: {**_LFM2, "attention.head_count_kv": [8 * _attends(layer) for layer in range(layers)]},
        _lfm2, Kind.Q6_K, None, "token_embd_norm",
    ),
    "falcon-h1-1.5b": Shape("falcon-h1", 65537, "falcon-h1", 2048, lambda layers: FALCON_H1, falcon_h1),
    "nemotron-nano-9b-v2": Shape(
        "nemotron_h", 131072, "tekken", 4480, nemotron_keys, nemotron, Kind.Q5_0, Kind.Q8_0
    ),
}  # fmt: skip
"""By name."""


def write(path: Path, name: str, layers: int) -> None:
    """Write a file of shape `name` with `layers` layers. Raises KeyError for an unknown name."""
    shape = SHAPES[name]
    file = ShapeFile(path, shape.architecture)
    writer = file.writer
    for key, value in {"block_count": layers, **shape.keys(layers)}.items():
        if isinstance(value, list):
            writer.add_array(f"{shape.architecture}.{key}", value)
        else:
            kinds = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
            writer.add_key_value(
                f"{shape.architecture}.{key}", value, kinds.get(type(value), gguf.GGUFValueType.STRING)
            )
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    rest = [f"<|{number}|>" for number in range(shape.vocabulary - len(letters) - 1)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(shape.pre)
    writer.add_token_list([*letters, *rest, _END])
    writer.add_token_types([_NORMAL] * len(letters) + [_CONTROL] * (len(rest) + 1))
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(shape.vocabulary - 1)
    file.matrix("token_embd", shape.vocabulary, shape.width, shape.embedding)
    if shape.head is not None:
        file.matrix("output", shape.vocabulary, shape.width, shape.head)
    file.norms("", **{shape.last_norm: shape.width})
    for layer in range(layers):
        shape.tensors(file, layer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("layers", type=int)
    parser.add_argument("file", type=Path)
    flags = parser.parse_args(arguments)
    write(flags.file, flags.name, flags.layers)


if __name__ == "__main__":
    main()
