"""Rotates vectors to positions in a cache, by the table of a model's rotations."""

from __future__ import annotations

import numpy as np
import torch

from hetero_kv.adapter.rotary_table import RotaryTable
from hetero_kv.cpu_ops.rotary import rotate_rows
from hetero_kv.families.bounded.entry_buffer import kernel_threads
from hetero_kv.gpu_ops.rotary import rotate_into


def rotate_arrays(
    table: RotaryTable, vectors: np.ndarray, rotated: torch.Tensor, entries: tuple[int, int], start: int
) -> None:
    """Write the vectors at `entries` [first, end) to `rotated`, rotated to the cache positions from `start` on.

    Both are [batch, heads, capacity, k_dim] float32 on the CPU.
    """
    assert table.arrays is not None
    layout = table.rotation.layout
    channels = layout.offset, layout.interleaved
    rotate_rows(vectors, rotated.numpy(), entries, *table.arrays, start, channels, kernel_threads())


def rotate_tensors(table: RotaryTable, vectors: torch.Tensor, start: int, rotated: torch.Tensor) -> None:
    """Write vectors [batch, heads, n, k_dim] to `rotated`, rotated to the cache positions from `start` on."""
    positions = slice(start, start + vectors.shape[2])
    rotate_into(vectors, table.cos[positions], table.sin[positions], table.rotation.layout, rotated)
