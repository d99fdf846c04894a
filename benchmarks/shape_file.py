"""A GGUF file of random weights, which is written tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

# Offsets of a block's bytes that are float16 numbers, and what they become; MXFP4's first byte is an exponent.
_SCALES: dict[Kind, dict[int, float]] = {
    Kind.Q4_K: {0: 1e-4, 2: 7.5e-4},
    Kind.Q6_K: {208: 2e-5},
    Kind.Q8_0: {0: 2e-4},
    Kind.Q5_0: {0: 1.6e-3},
}
_SMALL_EXPONENT = 119


def more_bits(layer: int) -> Kind:
    """As Q4_K_M has it: every second matrix of values, and that down, has six bits."""
    return Kind.Q6_K if layer % 2 else Kind.Q4_K


def attention_keys(heads: int, groups: Any, dim: int, base: float) -> dict[str, Any]:
    """Metadata of attention; groups: the number of heads of keys, or of those of each layer."""
    return {
        "attention.head_count": heads,
        "attention.head_count_kv": groups,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "rope.freq_base": base,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }


class ShapeFile:
    """A GGUF file of random weights; tensors of one size share their random bits in memory."""

    def __init__(self, path: Path, architecture: str) -> None:
        self.writer = gguf.GGUFWriter(path, architecture)
        self.random = np.random.default_rng(0)
        self._blocks: dict[tuple[Kind, int], np.ndarray] = {}

    def matrix(self, name: str, rows: int, columns: int, kind: Kind = Kind.Q4_K, experts: int = 0) -> None:
        """Add a matrix of blocks, or one for each expert."""
        block, size = gguf.GGML_QUANT_SIZES[kind]
        count = rows * columns * max(experts, 1) // block
        if (kind, count) not in self._blocks:
            blocks = self.random.integers(0, 256, (count, size), np.uint8)
            for offset, scale in _SCALES.get(kind, {}).items():
                blocks[:, offset : offset + 2] = np.array([scale], np.float16).view(np.uint8)
            if kind is Kind.MXFP4:
                blocks[:, 0] = _SMALL_EXPONENT
            self._blocks[kind, count] = blocks
        stack = (experts,) if experts else ()
        data = self._blocks[kind, count].reshape(*stack, rows, columns // block * size)
        self.writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    def numbers(self, name: str, *shape: int, scale: float = 0.02, mean: float = 0.0) -> None:
        """Add float32 numbers."""
        numbers = mean + scale * self.random.standard_normal(shape)
        self.writer.add_tensor(name, numbers.astype(np.float32))

    def norms(self, prefix: str, **widths: int) -> None:
        """Add norms of these widths."""
        for name, width in widths.items():
            self.numbers(f"{prefix}{name}.weight", width, mean=1.0)

    def attention(
        self, prefix: str, width: int, queries: int, keys: int, kind: Kind = Kind.Q4_K, values: Kind = Kind.Q4_K,
        gated: bool = False,
    ) -> None:  # fmt: skip
        """Add an attention's projections; gated: the queries' has as many outputs again."""
        self.matrix(f"{prefix}attn_q", queries * (1 + gated), width, kind)
        self.matrix(f"{prefix}attn_k", keys, width, kind)
        self.matrix(f"{prefix}attn_v", keys, width, values)
        self.matrix(f"{prefix}attn_output", width, queries, kind)

    def experts(
        self, prefix: str, width: int, count: int, inner: int, kind: Kind = Kind.Q4_K, down: Kind = Kind.Q4_K
    ) -> None:
        """Add a router and experts."""
        self.numbers(f"{prefix}ffn_gate_inp.weight", count, width)
        self.matrix(f"{prefix}ffn_gate_exps", inner, width, kind, count)
        self.matrix(f"{prefix}ffn_up_exps", inner, width, kind, count)
        self.matrix(f"{prefix}ffn_down_exps", width, inner, down, count)

    def gated(self, prefix: str, width: int, inner: int, down: Kind = Kind.Q4_K, suffix: str = "") -> None:
        """Add a gated MLP."""
        self.matrix(f"{prefix}ffn_gate{suffix}", inner, width)
        self.matrix(f"{prefix}ffn_up{suffix}", inner, width)
        self.matrix(f"{prefix}ffn_down{suffix}", width, inner, down)

    def mamba2(
        self, prefix: str, width: int, heads: int, dim: int, state: int, groups: int, kind: Kind = Kind.Q4_K,
        normed: bool = True,
    ) -> None:  # fmt: skip
        """Add a Mamba-2 mixer; its output projection is of Q4_K. normed: whether its result is normalised in groups."""
        inner, channels = heads * dim, heads * dim + 2 * groups * state
        self.matrix(f"{prefix}ssm_in", inner + channels + heads, width, kind)
        self.numbers(f"{prefix}ssm_conv1d.weight", channels, 4, scale=0.3)
        self.numbers(f"{prefix}ssm_conv1d.bias", channels)
        self.numbers(f"{prefix}ssm_dt.bias", heads)
        self.numbers(f"{prefix}ssm_a", heads, 1, mean=-1.0, scale=0.1)
        self.numbers(f"{prefix}ssm_d", heads, 1, mean=1.0)
        if normed:
            self.numbers(f"{prefix}ssm_norm.weight", groups, inner // groups, mean=1.0)
        self.matrix(f"{prefix}ssm_out", width, inner)
