"""Random GGML blocks with finite scales."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from hetero_kv.cpu_ops.weight_formats import FORMATS

#: Where the float16 scales and minimums of a block lie.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (), "F16": (), "BF16": (),
}  # fmt: skip


def random_blocks(name, rows, columns, seed=0):
    """Every bit random but those of the scales, which are small: [rows, bytes of a row] uint8.

    Of F16 and BF16 the numbers are random.
    """
    layout, generator = FORMATS[name], np.random.default_rng(seed)
    if layout.number:
        numbers = generator.standard_normal((rows, columns)).astype(np.float32)
        return gguf.quantize(numbers, GGMLQuantizationType[name]).view(np.uint8)
    blocks = generator.integers(0, 256, (rows, columns // layout.columns, layout.block_bytes), np.uint8)
    for at in _HALVES[name]:
        scales = generator.uniform(-0.01, 0.01, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    if layout.exponents:
        blocks[..., 0] = generator.integers(110, 130, blocks.shape[:2])
    return blocks.reshape(rows, -1)


def dequantized(blocks, name):
    """The numbers, by the gguf package."""
    numbers = blocks.view(np.float16) if name == "F16" else blocks
    return gguf.dequantize(numbers, GGMLQuantizationType[name]).astype(np.float32)
