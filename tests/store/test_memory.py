"""Lazily allocated memory, and files mapped into it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from hetero_kv.store.memory import map_file, reserve

PAGE = mmap.PAGESIZE


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 9 * PAGE, dtype=np.uint8).tobytes())
    descriptor = os.open(path, os.O_RDONLY)
    yield path.read_bytes(), descriptor
    os.close(descriptor)


@pytest.mark.parametrize(("start", "size", "offset"), [(0, 4 * PAGE, PAGE), (40, 5 * PAGE + 7, 40), (0, PAGE + 1, 0)])
def test_whole_pages_are_the_files_until_they_are_written_to(file, start, size, offset):
    content, descriptor = file
    memory = reserve(8 * PAGE)
    memory[:] = 255
    target = memory[start : start + size]
    before, behind = map_file(target, descriptor, offset)
    assert before == -start % PAGE
    assert (size - before - behind) % PAGE == 0
    assert behind < PAGE
    assert target[before : size - behind].tobytes() == content[offset + before : offset + size - behind]
    assert (memory[: start + before] == 255).all()
    assert (memory[start + size - behind :] == 255).all()
    target[before] ^= 1
    assert os.pread(descriptor, 1, offset + before)[0] == content[offset + before]
    assert target[before] != content[offset + before]


def test_misaligned_and_small_arrays_are_read_instead_of_mapped(file):
    memory = reserve(4 * PAGE)
    assert map_file(memory[1:], file[1], 0) == (4 * PAGE - 1, 0)
    assert map_file(memory[: PAGE - 1], file[1], 0) == (PAGE - 1, 0)
    assert not memory.any()


def test_too_little_memory_is_an_error_and_zero_bytes_always_fit():
    with pytest.raises(MemoryError, match="Unable to allocate"):
        reserve(1 << 62)
    assert reserve(0).size == 0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells what backs memory")
def test_a_short_beginning_of_large_memory_is_backed_by_small_pages():
    memory = reserve(16 << 20)
    assert (memory.size, memory.ctypes.data % PAGE) == (16 << 20, 0)
    before = _resident(memory)
    memory[: 1 << 16] = 1
    assert _resident(memory) - before == 1 << 16
    memory[-1] = 1
    assert not memory[1 << 16 : -1].any()


def _resident(memory: np.ndarray) -> int:
    """Bytes of the mappings around an array that are backed by memory."""
    first, end, found, counts = memory.ctypes.data, memory.ctypes.data + memory.size, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *rest = line.split()
        if "-" in head and not head.endswith(":"):
            start, stop = (int(each, 16) for each in head.split("-"))
            counts = start < end and first < stop
        elif head == "Rss:" and counts:
            found += int(rest[0]) << 10
    return found
