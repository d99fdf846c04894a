"""Page-locking follows the written memory and ends with it."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.adapter.rotary_table import RotaryTable
from hetero_kv.adapter.rotation import Rotation
from hetero_kv.families.shadowkv import layer as low_rank_layer
from hetero_kv.families.shadowkv.settings import ShadowKVSettings
from hetero_kv.gpu_ops import mapped_memory
from hetero_kv.gpu_ops.mapped_memory import MappedMemory
from hetero_kv.gpu_ops.rotary import RotaryLayout
from tests.support.caches import new_cache, prefill
from tests.support.devices import CPU, simulated_cuda

PAGE = mmap.PAGESIZE


class Driver:
    """CUDA's two calls; as the driver does, it refuses a page that is locked already."""

    def __init__(self, pages=10**9):
        self.locked, self.pages = {}, pages

    def cudaHostRegister(self, start, size, flags):
        assert start % PAGE == size % PAGE == 0
        if any(start < other + length and other < start + size for other, length in self.locked.items()):
            return 712
        if sum(self.locked.values()) + size > self.pages * PAGE:
            return 2
        self.locked[start] = size
        return 0

    def cudaHostUnregister(self, start):
        return 713 if self.locked.pop(start, None) is None else 0

    def holds(self, start, size):
        """Whether every byte from address `start` on is locked."""
        return all(
            any(first <= address < first + length for first, length in self.locked.items())
            for address in [*range(start, start + size, PAGE), start + size - 1]
        )


@settings(deadline=None)
@given(
    reaches=st.lists(st.integers(1, 40 * PAGE), min_size=1, max_size=6),
    offset=st.integers(0, 2 * PAGE),
    step=st.sampled_from([1, 3 * PAGE, 7 * PAGE + 5]),
)
def test_reached_memory_is_locked_once_and_released_at_the_end(reaches, offset, step):
    driver = Driver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", lambda: driver)
        patch.setattr(mapped_memory, "_STEP", step)
        tensor = torch.empty(50 * PAGE, dtype=torch.uint8)[offset : offset + 40 * PAGE]
        memory = MappedMemory(tensor, CPU)
        assert not driver.locked
        for size in reaches:
            assert memory.reach(size)
            assert driver.holds(tensor.data_ptr(), size)
        assert sum(driver.locked.values()) <= max(reaches) + 2 * step + 2 * PAGE
        del memory
        assert not driver.locked


def test_a_layer_locks_its_values_in_dram_once_for_itself_and_its_forks(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(low_rank_layer, "runs_triton", lambda tensor: True)
    settings = ShadowKVSettings(rank=8, project_generated=True)

    keys = torch.randn(1, 2, 3000, 16, generator=torch.Generator().manual_seed(0))
    cache = new_cache(lambda: low_rank_layer.LowRankLayer(settings), capacity=8000)
    (layer,) = cache.layers
    layer.factors.rotary = RotaryTable(Rotation(RotaryLayout(0)))
    layer.factors.rotary.record(torch.ones(1, 8000, 1), torch.zeros(1, 8000, 1), 0)
    prefill(cache, keys)
    values = layer.pool.values
    assert driver.holds(values.data_ptr(), layer.bytes_touched)
    fork = cache.fork()
    prefill(fork, keys[:, :, :2000])
    assert driver.holds(values.data_ptr(), layer.bytes_touched)
    chunks = torch.tensor([[[0, 7], [370, 1]]])
    assert torch.equal(fork.layers[0].fetched(chunks)[0, 1, 0], keys[0, 1, 2960:2968].half().float())
    cache.reset()
    del layer
    assert driver.locked
    del fork
    assert not driver.locked


def test_where_cuda_refuses_it_warns_once_and_says_no(monkeypatch):
    driver = Driver(pages=20)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(mapped_memory, "_STEP", PAGE)
    taken = []
    monkeypatch.setattr(mapped_memory, "_take_pending_error", taken.append)
    memory = MappedMemory(torch.empty(40 * PAGE, dtype=torch.uint8), CPU)
    assert memory.reach(10 * PAGE)
    assert not taken
    with pytest.warns(RuntimeWarning, match=r"could not page-lock .* error 2"):
        assert not memory.reach(30 * PAGE)
    assert not memory.reach(5)
    assert taken == [CPU]
    del memory
    assert not driver.locked


class Interrupting(Driver):
    """Raises as CPython raises Ctrl-C: before its first call of the driver, or when that has returned."""

    def __init__(self, is_locked):
        super().__init__()
        self.is_locked, self.calls = is_locked, 0

    def cudaHostRegister(self, start, size, flags):
        self.calls += 1
        if self.calls > 1:
            return super().cudaHostRegister(start, size, flags)
        if self.is_locked:
            super().cudaHostRegister(start, size, flags)
        raise KeyboardInterrupt


@pytest.mark.parametrize("is_locked", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_memory_locked_before_ctrl_c_is_known(monkeypatch, is_locked, again):
    driver = Interrupting(is_locked)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    memory = MappedMemory(torch.empty(40 * PAGE, dtype=torch.uint8), CPU)
    with pytest.raises(KeyboardInterrupt):
        memory.reach(PAGE)
    assert bool(driver.locked) == is_locked
    if again:
        assert memory.reach(30 * PAGE)
        assert driver.holds(memory.tensor.data_ptr(), 30 * PAGE)
    del memory
    assert not driver.locked


@pytest.mark.cuda
@pytest.mark.parametrize("host_pointers", [True, False])
def test_ranges_are_neighbours_only_where_a_gpu_uses_the_addresses_of_the_cpu(monkeypatch, host_pointers):
    monkeypatch.setattr(mapped_memory, "_STEP", PAGE)
    with simulated_cuda(devices=2, host_pointers=host_pointers):
        memory = MappedMemory(torch.empty(40 * PAGE, dtype=torch.uint8), torch.device("cuda", 1))
        assert memory.reach(PAGE)
        if host_pointers:
            assert memory.reach(30 * PAGE)
            assert memory.tensor[: 30 * PAGE].is_pinned()
        else:
            with pytest.warns(RuntimeWarning, match="reads page-locked memory at other addresses than the CPU"):
                assert not memory.reach(30 * PAGE)
        del memory


@pytest.mark.cuda
def test_a_pending_error_is_taken_from_the_gpu_that_reads(monkeypatch):
    with simulated_cuda(devices=2) as gpu:
        monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(pages=0))
        memory = MappedMemory(torch.empty(40 * PAGE, dtype=torch.uint8), torch.device("cuda", 1))
        with pytest.warns(RuntimeWarning, match="could not page-lock"):
            assert not memory.reach(PAGE)
        assert gpu.memory.peak[1] > 0
        assert gpu.memory.peak[0] == 0
        monkeypatch.undo()
