"""The numbers of GGML's blocks, by the package gguf, or by their layout if it does not unpack them."""

from __future__ import annotations

import gguf
import numpy as np

from hetero_kv.weights.tensor_types import BLOCK_SIZES, TensorType


def numbers_of_blocks(data: np.ndarray, quantization: TensorType) -> np.ndarray:
    """The numbers of a tensor whose bytes are in the form that `gguf.dequantize` takes, as it gives them.

    Whole numbers stay such.
    """
    if quantization.name == "I32":
        return data
    if quantization.name not in _CODES:
        numbers: np.ndarray = gguf.dequantize(data, quantization)
        return numbers
    columns, block_bytes = BLOCK_SIZES[quantization]
    blocks = data.reshape(*data.shape[:-1], -1, block_bytes)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    return (scales * _CODES[quantization.name](blocks[..., 2:])).reshape(*data.shape[:-1], blocks.shape[-2] * columns)


def _signs(codes: np.ndarray) -> np.ndarray:
    return np.unpackbits(codes, axis=-1, bitorder="little").astype(np.float32) * 2 - 1


def _two_bits_less_one(codes: np.ndarray) -> np.ndarray:
    quarters = codes[..., None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    return quarters.reshape(*codes.shape[:-1], -1).astype(np.float32) - 1


#: Types whose blocks are a float16 scale and codes -> the numbers of the codes.
_CODES = {"Q1_0": _signs, "Q2_0": _two_bits_less_one}
