"""Encoding and decoding of storage formats by gguf and numpy: the reference of codecs and kernels."""

import gguf
import numpy as np

from hetero_kv.cpu_ops.storage import BFLOAT16, Q4_0, Q8_0

GGML = {
    BFLOAT16: gguf.GGMLQuantizationType.BF16,
    Q8_0: gguf.GGMLQuantizationType.Q8_0,
    Q4_0: gguf.GGMLQuantizationType.Q4_0,
}


def encoded(vectors, dtype):
    """[..., dim] float32 as a pool of `dtype` holds them."""
    if dtype not in GGML:
        return vectors.astype(dtype)
    data = gguf.quants.quantize(np.ascontiguousarray(vectors, np.float32), GGML[dtype])
    return np.ascontiguousarray(data).view(dtype)


def decoded(stored):
    """What a pool's array means, [..., dim] float64."""
    if stored.dtype not in GGML:
        return stored.astype(np.float64)
    data = stored.view(np.uint8)
    return gguf.quants.dequantize(data, GGML[stored.dtype]).astype(np.float64)
