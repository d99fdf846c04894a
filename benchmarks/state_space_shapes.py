"""The shapes of models with state-space layers, for `benchmarks.shapes`."""

from __future__ import annotations

from typing import Any

from gguf import GGMLQuantizationType as Kind

from benchmarks.shape_file import ShapeFile, attention_keys, more_bits


def falcon_h1(file: ShapeFile, layer: int) -> None:
    """Add a layer of Falcon-H1 1.5B: attention and a state side by side, then an MLP."""
    prefix = f"blk.{layer}."
    file.norms(prefix, attn_norm=2048)
    # llama.cpp's name of this one has no suffix.
    file.numbers(f"{prefix}ffn_norm", 2048, mean=1.0)
    file.attention(prefix, 2048, 1024, 256, values=more_bits(layer))
    file.mamba2(prefix, 2048, 48, 64, 256, 1, normed=False)
    file.gated(prefix, 2048, 4096, down=more_bits(layer))


def _nemotron_kind(layer: int) -> str:
    """A state, an MLP or attention, about as often as in the model: 27 of its 56 layers, 25 and 4."""
    return "attention" if layer % 14 == 6 else "mlp" if layer % 2 else "state"


def nemotron(file: ShapeFile, layer: int) -> None:
    """Add a layer of Nemotron Nano 9B v2: a state, attention or an MLP."""
    prefix, kind = f"blk.{layer}.", _nemotron_kind(layer)
    file.norms(prefix, attn_norm=4480)
    # Blocks of 256 do not fit its width.
    if kind == "state":
        file.mamba2(prefix, 4480, 128, 80, 128, 8, Kind.Q5_0)
    elif kind == "attention":
        for name in ("q", "k", "v"):
            file.matrix(f"{prefix}attn_{name}", 5120 if name == "q" else 1024, 4480, Kind.Q5_0)
        file.matrix(f"{prefix}attn_output", 4480, 5120)
    else:
        file.matrix(f"{prefix}ffn_up", 15680, 4480, Kind.Q5_0)
        file.matrix(f"{prefix}ffn_down", 4480, 15680, Kind.Q8_0 if layer % 4 == 3 else Kind.Q5_0)


FALCON_H1 = {
    "context_length": 1 << 17,
    "embedding_length": 2048,
    "feed_forward_length": 4096,
    "rope.dimension_count": 128,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 256,
    "ssm.group_count": 1,
    "ssm.time_step_rank": 48,
    "ssm.inner_size": 3072,
    **attention_keys(8, 2, 128, 1e11),
}
_NEMOTRON = {
    "context_length": 1 << 17,
    "embedding_length": 4480,
    "attention.head_count": 40,
    "attention.key_length": 128,
    "attention.value_length": 128,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
    "rope.dimension_count": 128,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 128,
    "ssm.group_count": 8,
    "ssm.time_step_rank": 128,
    "ssm.inner_size": 10240,
}


def nemotron_keys(layers: int) -> dict[str, Any]:
    """The metadata of so many layers."""
    kinds = [_nemotron_kind(layer) for layer in range(layers)]
    return {
        **_NEMOTRON,
        "attention.head_count_kv": [8 * (kind == "attention") for kind in kinds],
        "feed_forward_length": [15680 * (kind == "mlp") for kind in kinds],
    }
