"""Random GGML blocks with finite scales."""

import gguf
import numpy as np

from hetero_kv.cpu_ops.weight_formats import FORMATS
from hetero_kv.weights.block_numbers import numbers_of_blocks
from hetero_kv.weights.tensor_types import type_named

#: Types of few files. IQ2_XS, IQ3_S and NVFP4 have what these have, and kernels are compiled for each type.
RARE = ("Q1_0", "Q2_0", "TQ1_0", "TQ2_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_S", "IQ3_XXS")

#: What each of these has, others have: minimums, fifth and third bits, tables, and scales of two levels.
COMBINED = ("Q4_1", "Q5_1", "Q3_K", "Q5_K", "IQ4_XS")

#: Types whose kernels are compiled in slow tests alone.
SELDOM = (*RARE, *COMBINED)

#: Where the float16 scales and minimums of a block lie.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (), "F16": (), "BF16": (),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "Q1_0", "Q2_0"), (0,)), "IQ1_M": (),
    "TQ1_0": (52,), "TQ2_0": (64,), "NVFP4": (),
}  # fmt: skip


def random_blocks(name, rows, columns, seed=0):
    """Every bit random but those of the scales, which are small: [rows, bytes of a row] uint8.

    Of F16 and BF16 the numbers are random.
    """
    layout, generator = FORMATS[name], np.random.default_rng(seed)
    if layout.number:
        numbers = generator.standard_normal((rows, columns)).astype(np.float32)
        return gguf.quantize(numbers, gguf.GGMLQuantizationType[name]).view(np.uint8)
    blocks = generator.integers(0, 256, (rows, columns // layout.columns, layout.block_bytes), np.uint8)
    for at in _HALVES[name]:
        blocks[..., at : at + 2] = scales_of(generator, blocks.shape[:2])[..., None].view(np.uint8)
    if name == "IQ1_M":
        # Quarters of the scale are the highest bits of four words.
        quarters = scales_of(generator, blocks.shape[:2]).view(np.uint16)[..., None] >> (0, 4, 8, 12) & 15
        blocks[..., 49::2] = blocks[..., 49::2] & 15 | quarters.astype(np.uint8) << 4
    if layout.bytes_as == "e8m0":
        blocks[..., 0] = generator.integers(110, 130, blocks.shape[:2])
    return blocks.reshape(rows, -1)


def scales_of(generator, shape):
    return generator.uniform(-0.01, 0.01, shape).astype(np.float16)


def dequantized(blocks, name):
    """The numbers, by the gguf package."""
    numbers = blocks.view(np.float16) if name == "F16" else blocks
    return numbers_of_blocks(numbers, type_named(name)).astype(np.float32)
