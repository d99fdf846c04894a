"""The numbers of GGML's blocks, by the package gguf, or by their layout if it only knows their size."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType


def numbers_of_blocks(data: np.ndarray, quantization: GGMLQuantizationType) -> np.ndarray:
    """The numbers of a tensor whose bytes are in the form that `gguf.dequantize` takes, as it gives them."""
    if quantization is not GGMLQuantizationType.Q1_0:
        numbers: np.ndarray = gguf.dequantize(data, quantization)
        return numbers
    columns, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    blocks = data.reshape(*data.shape[:-1], -1, block_bytes)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    signs = np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little").astype(np.float32) * 2 - 1
    return (scales * signs).reshape(*data.shape[:-1], blocks.shape[-2] * columns)
