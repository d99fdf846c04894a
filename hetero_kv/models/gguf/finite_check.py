"""Checks from a tensor's bytes, without unpacking them, that all its numbers are finite."""

from __future__ import annotations

import numpy as np

from hetero_kv.weights.block_numbers import numbers_of_blocks
from hetero_kv.weights.tensor_types import BLOCK_SIZES, TensorType

_HALF, _SINGLE, _BRAIN = 0x7C00, 0x7F800000, 0x7F80
#: Number types -> (an integer type of their size, the exponent's bits, which are all set if a number is not finite).
_EXPONENTS = {"F16": (np.uint16, _HALF), "F32": (np.uint32, _SINGLE), "BF16": (np.uint16, _BRAIN)}
#: Block types -> the offsets of a block's float16 scales, bytes. All other content of a block is integers, which the
#: scales multiply. The layouts are in GGML's ggml-common.h.
_SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,), "IQ4_NL": (0,),
    "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "Q1_0": (0,), "Q2_0": (0,), "NVFP4": (),
}  # fmt: skip
# Numbers that are checked at once, so that copies stay smaller than a tensor.
_PIECE = 1 << 22


def all_finite(data: np.ndarray, quantization: TensorType) -> bool:
    """Whether a tensor has neither infinities nor NaN.

    Args:
        data: the tensor's bytes, [n] uint8; n is a multiple of its type's block size.
    """
    name = quantization.name
    if name == "I32":
        return True
    if name in _EXPONENTS:
        word, exponent = _EXPONENTS[name]
        numbers = data.view(word)
        return all(_finite(numbers[start : start + _PIECE], exponent) for start in range(0, len(numbers), _PIECE))
    if name in _SCALES:
        _, block_bytes = BLOCK_SIZES[quantization]
        blocks = data.reshape(-1, block_bytes)
        return all(_finite(_halves(blocks, place), _HALF) for place in _SCALES[name])
    if name == "IQ1_M":
        # The first bits of four words are a quarter of the scale each, and the last quarter has its exponent's.
        words = data.reshape(-1, BLOCK_SIZES[quantization][1])
        return _finite(words[:, 55].astype(np.uint16) >> 4 << 12 | words[:, 53].astype(np.uint16) >> 4 << 8, _HALF)
    return bool(np.isfinite(numbers_of_blocks(data, quantization)).all())


def _finite(bits: np.ndarray, exponent: int) -> bool:
    return not ((bits & bits.dtype.type(exponent)) == exponent).any()


def _halves(blocks: np.ndarray, place: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, place : place + 2]).view(np.uint16)
