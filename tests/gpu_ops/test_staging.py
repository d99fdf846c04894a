"""Numbers pass from a device to the CPU and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_kv.gpu_ops.staging import Staging
from tests.support.devices import simulated_cuda
from tests.support.simulated_cuda import SimulatedCudaError

DOWN, UP = ((2, 4, 1, 8), (2, 1, 1, 8), (2, 4)), ((2, 4, 1, 6), (2, 4))


def test_values_arrive_on_the_device_and_results_come_back(device):
    staging = Staging(device, DOWN, UP)
    for step in range(3):
        # Transposed, as a model's queries are.
        q = torch.randn(2, 1, 4, 8).transpose(1, 2).to(torch.bfloat16)
        k, lse = torch.randn(2, 1, 1, 8).to(torch.bfloat16), torch.randn(2, 4)
        sent = [q, k] if step == 1 else [q, k, lse]
        staging.send(*(tensor.to(device) for tensor in sent))
        for array, tensor in zip(staging.arrived(), sent, strict=False):
            assert torch.equal(torch.from_numpy(array), tensor.float())
        for number, array in enumerate(staging.back):
            array[...] = 10 * step + number
        out, whole = staging.sent_back()
        assert (out.shape, whole.shape) == UP
        assert (float(out.min()), float(whole.max())) == (10 * step, 10 * step + 1)


def test_deferred_values_travel_with_the_next_copy(device):
    staging = Staging(device, DOWN, UP, following=(2, 4))
    told = [np.full((2, 4), np.nan, np.float32) for _ in range(3)]
    for step, room in enumerate(told):
        staging.send(*(torch.full(shape, float(step), device=device) for shape in DOWN[:2]))
        q, k, _ = staging.arrived()
        assert (q.min(), q.max(), k.min(), k.max()) == (step,) * 4
        assert all((before == 10 * at).all() for at, before in enumerate(told[:step]))
        staging.follow(torch.full((2, 4), 10.0 * step, device=device), room)
        assert np.isnan(room).all()
    staging.settle()
    assert (told[2] == 20).all()


@pytest.mark.cuda
def test_deferred_values_need_no_extra_copy_and_no_extra_wait():
    with simulated_cuda() as gpu:
        staging = Staging(torch.device("cuda", 0), DOWN, UP, following=(2, 4))
        sent, room = [torch.ones(shape, device="cuda") for shape in DOWN], np.empty((2, 4), np.float32)
        gpu.record.clear()
        for _ in range(4):
            staging.send(*sent)
            staging.arrived()
            staging.follow(sent[2], room)
        assert (len(gpu.record.copies), len(gpu.record.waits)) == (4, 4)
        for _ in range(2):
            # The second time there is nothing.
            staging.settle()
        assert (len(gpu.record.copies), len(gpu.record.waits), len(gpu.record.pageable)) == (5, 5, 0)


def test_it_fits_the_shapes_and_the_device_that_it_was_made_for(device):
    staging = Staging(device, DOWN, UP)
    assert staging.fits(device, DOWN, UP)
    assert not staging.fits(device, DOWN, DOWN)
    assert not staging.fits(device, DOWN, UP, following=(2, 4))
    assert not staging.fits(torch.device("meta"), DOWN, UP)


@pytest.mark.cuda
def test_both_ways_are_one_asynchronous_copy_of_page_locked_memory_and_one_wait():
    with simulated_cuda() as gpu:
        staging = Staging(torch.device("cuda", 0), DOWN, UP)
        sent = [torch.ones(shape, device="cuda") for shape in DOWN]
        gpu.record.clear()
        staging.send(*sent)
        staging.arrived()
        staging.sent_back()
        found = [(copy.to_device, copy.is_pinned, copy.is_blocking) for copy in gpu.record.copies]
        assert found == [(False, True, False), (True, True, False)]
        assert [wait.cause for wait in gpu.record.waits] == ["event.synchronize"]


@pytest.mark.cuda
def test_writing_before_the_device_has_read_is_an_error():
    with simulated_cuda():
        staging = Staging(torch.device("cuda", 0), DOWN, UP)
        staging.back[0][...] = 1.0
        staging.sent_back()
        staging.back[0][...] = 2.0
        with pytest.raises(SimulatedCudaError, match="was written while a copy from it was in flight"):
            torch.cuda.synchronize()
