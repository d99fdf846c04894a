"""The simulated device reports mistakes that a GPU would compute wrong results with."""

from __future__ import annotations

import pytest
import torch

from hetero_kv.gpu_ops.gather import gathered_rows
from hetero_kv.gpu_ops.mapped_memory import MappedMemory
from hetero_kv.gpu_ops.side_stream import joined, on_side_stream
from tests.support.devices import simulated_cuda
from tests.support.simulated_cuda import SimulatedCudaError

pytestmark = pytest.mark.cuda


@pytest.fixture
def gpu():
    with simulated_cuda(devices=2) as simulation:
        yield simulation


def test_reads_before_the_wait_return_poison(gpu):
    host, ours = torch.zeros(4, pin_memory=True), torch.ones(4, device="cuda")
    host.copy_(ours, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    assert host.isnan().all()
    arrived.synchronize()
    assert host.tolist() == [1.0] * 4


def test_an_event_that_was_recorded_before_a_copy_says_nothing_of_it(gpu):
    host, ours = torch.zeros(4, pin_memory=True), torch.ones(4, device="cuda")
    early = torch.cuda.Event()
    early.record()
    host.copy_(ours, non_blocking=True)
    early.synchronize()
    assert host.isnan().all()


def test_waiting_for_one_stream_is_not_waiting_for_another(gpu):
    host, ours, side = torch.zeros(4, pin_memory=True), torch.ones(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(ours, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert host.isnan().all()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.current_stream().synchronize()
    assert host.tolist() == [1.0] * 4


def test_non_blocking_copies_to_the_cpu_are_incomplete_before_the_wait(gpu):
    host = torch.ones(4, device="cuda").to("cpu", non_blocking=True)
    assert host.isnan().all()
    torch.cuda.synchronize()
    assert host.tolist() == [1.0] * 4


@pytest.mark.parametrize("to_device", [True, False])
def test_a_staging_buffer_that_is_written_before_its_copy_is_done(gpu, to_device):
    staging, ours = torch.ones(4, pin_memory=True), torch.zeros(4, device="cuda")
    if to_device:
        ours.copy_(staging, non_blocking=True)
    else:
        staging.copy_(ours, non_blocking=True)
    staging[0] = 7.0
    with pytest.raises(SimulatedCudaError, match="was written while a copy"):
        torch.cuda.synchronize()


def test_a_staging_buffer_that_waits_for_its_copy(gpu):
    staging, ours = torch.ones(4, pin_memory=True), torch.zeros(4, device="cuda")
    ours.copy_(staging, non_blocking=True)
    torch.cuda.synchronize()
    staging[0] = 7.0
    torch.cuda.synchronize()
    assert ours.tolist() == [1.0] * 4


def test_a_stream_that_does_not_wait_for_another(gpu):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        ours = torch.ones(4, device="cuda")
    with pytest.raises(SimulatedCudaError, match="reads memory that another stream may still write"):
        ours.sum()
    torch.cuda.current_stream().wait_stream(side)
    assert float(ours.sum()) == 4.0
    torch.cuda.synchronize()


def test_a_stream_that_writes_what_another_reads(gpu):
    ours, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ours.sum()
    with pytest.raises(SimulatedCudaError, match="writes memory that another stream may still use"):
        ours.zero_()
    torch.cuda.synchronize()


def test_memory_that_is_freed_while_another_stream_uses_it(gpu):
    ours, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ours.sum()
    del ours
    with pytest.raises(SimulatedCudaError, match="freed while another stream"):
        torch.cuda.synchronize()


def test_the_projects_side_stream_is_used_as_it_must_be(gpu):
    ours = torch.ones(4, device="cuda")
    with on_side_stream(ours.device):
        made = ours + 1
    assert joined(made).tolist() == [2.0] * 4


def test_a_side_stream_that_nobody_joins(gpu):
    ours = torch.ones(4, device="cuda")
    with on_side_stream(ours.device):
        made = ours + 1
    with pytest.raises(SimulatedCudaError, match="another stream"):
        made.sum()
    torch.cuda.synchronize()


def test_a_kernel_that_reads_dram_which_is_not_page_locked(gpu):
    pytest.importorskip("triton")
    stored, where = torch.arange(64.0).view(8, 8), torch.tensor([3, 5])
    like = torch.empty(0, device="cuda")
    with pytest.raises(SimulatedCudaError, match="not page-locked"):
        gathered_rows(stored, where, like, is_mapped=True)
    torch.cuda.cudart().cudaHostRegister(stored.data_ptr(), stored.nbytes, 3)
    assert torch.equal(gathered_rows(stored, where, like, is_mapped=True).cpu(), stored[where])


def read_in_place(stored):
    """Have a kernel launched that reads row 3 of page-locked memory."""
    pytest.importorskip("triton")
    gathered_rows(stored, torch.tensor([3]), torch.empty(0, device="cuda"), is_mapped=True)


def test_memory_that_is_written_while_a_kernel_reads_it(gpu):
    stored = torch.arange(64.0).view(8, 8).pin_memory()
    read_in_place(stored)
    stored[4] = 0.0
    torch.cuda.synchronize()
    read_in_place(stored)
    stored[3] = 0.0
    with pytest.raises(SimulatedCudaError, match="written while a kernel may still read it"):
        torch.cuda.synchronize()


def test_memory_that_is_freed_while_a_kernel_reads_it(gpu):
    read_in_place(torch.arange(64.0).view(8, 8).pin_memory())
    with pytest.raises(SimulatedCudaError, match="freed while a kernel may still read it"):
        torch.cuda.synchronize()


def test_memory_that_is_unregistered_while_a_kernel_reads_it(gpu):
    pytest.importorskip("triton")
    stored, like = torch.zeros(8, 8), torch.empty(0, device="cuda")
    assert torch.cuda.cudart().cudaHostRegister(stored.data_ptr(), stored.nbytes, 3) == 0
    gathered_rows(stored, torch.tensor([3]), like, is_mapped=True)
    torch.cuda.cudart().cudaHostUnregister(stored.data_ptr())
    with pytest.raises(SimulatedCudaError, match="unregistered while it may still be read"):
        torch.cuda.synchronize()


def test_mapped_memory_is_unlocked_when_nobody_reads_it(gpu):
    pytest.importorskip("triton")
    stored = torch.zeros(8, 8)
    mapped = MappedMemory(stored, torch.device("cuda", 0))
    assert mapped.reach(stored.nbytes)
    read_in_place(mapped.tensor)
    del mapped
    assert not stored.is_pinned()
    torch.cuda.synchronize()


def test_a_kernel_that_is_launched_on_another_gpu_than_its_tensors(gpu):
    merge = pytest.importorskip("hetero_kv.gpu_ops.triton_kernels.merge")
    parts = torch.ones(1, 1, 1, 16, device="cuda:1"), torch.ones(1, 1, 1, device="cuda:1")
    with pytest.raises(SimulatedCudaError, match="launched on GPU 0"):
        merge.merge_attention(*parts, *parts)
