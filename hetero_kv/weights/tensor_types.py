"""The types of a GGUF file's tensors: those of the package gguf, and later ones by their published layout.

Layouts: `ggml/src/ggml-common.h` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import TypeAlias

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType


class LaterType(IntEnum):
    """Types that gguf 0.19 does not know, with their numbers in a file."""

    Q2_0 = 42


TensorType: TypeAlias = GGMLQuantizationType | LaterType
#: Type -> (columns of a block, its bytes).
BLOCK_SIZES: Mapping[int, tuple[int, int]] = {
    int(kind): size for kind, size in ((LaterType.Q2_0, (64, 18)), *GGML_QUANT_SIZES.items())
}


def tensor_type(number: int) -> TensorType:
    """The type with this number in a file. Raises ValueError if none is known."""
    try:
        return GGMLQuantizationType(number)
    except ValueError:
        return LaterType(number)


def type_named(name: str) -> TensorType:
    """The type of this name, as GGML spells it. Raises KeyError if none is known."""
    return GGMLQuantizationType[name] if name in GGMLQuantizationType.__members__ else LaterType[name]


def byte_shape(shape: tuple[int, ...], quantization: TensorType) -> tuple[int, ...]:
    """The shape of a tensor's bytes; `shape` has whole blocks in its last dimension."""
    columns, size = BLOCK_SIZES[quantization]
    return (*shape[:-1], shape[-1] // columns * size)
