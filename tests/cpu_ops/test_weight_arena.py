"""Packed weights lie in large arrays without overlap; an array is freed with its last part."""

import gc
import weakref

import numpy as np
import pytest

from hetero_kv.cpu_ops import weight_arena
from hetero_kv.cpu_ops.weight_arena import WeightArena


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(weight_arena, "_CHUNK_BYTES", 4096)


def test_parts_begin_on_lines_and_do_not_overlap(small_chunks):
    arena, parts = WeightArena(), []
    for number, size in enumerate((1, 64, 100, 700, 1500, 1999, 2000, 5000, 3)):
        part = arena.empty(size)
        assert part.shape == (size,)
        assert part.ctypes.data % 64 == 0
        part[:] = number
        parts.append(part)
    assert [set(part.tolist()) for part in parts] == [{number} for number in range(len(parts))]


def test_a_chunk_goes_with_its_last_part(small_chunks):
    arena = WeightArena()
    first, second = arena.empty(1500), arena.empty(1500)
    chunk = weakref.ref(first.base)
    assert second.base is first.base
    arena.empty(1500)
    del first
    gc.collect()
    assert chunk() is not None
    second[:] = 1
    del second
    gc.collect()
    assert chunk() is None


def test_a_large_part_is_an_array_of_its_own(small_chunks):
    arena = WeightArena()
    assert not np.shares_memory(arena.empty(3000), arena.empty(10))
