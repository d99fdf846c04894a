"""The simulated device refuses what CUDA refuses, and records launches, copies and waits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._device import _device_constructors

from hetero_kv.gpu_ops.merge import merge_attention, merge_attention_in_torch
from tests.support.devices import simulated_cuda
from tests.support.simulated_cuda import Copy

pytestmark = pytest.mark.cuda


@pytest.fixture
def gpu():
    with simulated_cuda(devices=2) as simulation:
        yield simulation


def test_tensors_say_cuda_and_hold_numbers(gpu):
    ours = torch.arange(6.0, device="cuda").view(2, 3)
    assert (ours.device, ours.is_cuda) == (torch.device("cuda", 0), True)
    assert torch.equal((ours @ ours.T).cpu(), torch.tensor([[5.0, 14.0], [14.0, 50.0]]))
    ours[0, 1:] = 9.0
    ours[torch.tensor([1], device="cuda")] += 1
    assert ours.tolist() == [[0.0, 9.0, 9.0], [4.0, 5.0, 6.0]]
    assert ours[:, [0, 2]].cpu().tolist() == [[0.0, 9.0], [4.0, 6.0]]
    assert float(ours.sum()) == 33.0


@pytest.mark.parametrize(
    "mixing",
    [
        lambda ours, host, other: ours + host,
        lambda ours, host, other: ours @ other,
        lambda ours, host, other: torch.cat([ours, host]),
        lambda ours, host, other: torch.nn.functional.scaled_dot_product_attention(ours, ours, host),
        lambda ours, host, other: ours.__setitem__(torch.tensor([0], device="cuda"), host[:1]),
    ],
)
def test_tensors_of_several_devices_are_refused(gpu, mixing):
    ours, host, other = torch.ones(3, 3, device="cuda"), torch.ones(3, 3), torch.ones(3, 3, device="cuda:1")
    with pytest.raises(RuntimeError, match="same device"):
        mixing(ours, host, other)


def test_numpy_and_devices_that_are_not_there_are_refused(gpu):
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        np.asarray(torch.ones(2, device="cuda"))
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(2, device="cuda:2")


@pytest.mark.parametrize(
    ("capability", "dtype", "dims", "message"),
    [
        ((7, 5), torch.float16, (16, 16), "Ampere"),
        ((8, 9), torch.float32, (16, 16), "fp16 and bf16"),
        ((8, 9), torch.float16, (16, 24), "one head dim"),
        ((8, 9), torch.float16, (20, 20), "multiple of 8"),
        ((8, 9), torch.float16, (264, 264), "up to 256"),
    ],
)
def test_flash_attention_accepts_cudas_inputs(capability, dtype, dims, message):
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    with simulated_cuda(capability=capability):
        q, k, v = (torch.ones(1, 2, 4, dim, dtype=dtype, device="cuda") for dim in (dims[0], *dims))
        with pytest.raises(RuntimeError, match=message):
            flash(q, k, v, 0.0, False, False, scale=1.0)


def test_flash_attention_computes_attention(gpu):
    q, k, v = (torch.randn(1, 2, 5, 16, dtype=torch.bfloat16, device="cpu").to("cuda") for _ in range(3))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=0.25)
    expected = torch.nn.functional.scaled_dot_product_attention(*(t.cpu().float() for t in (q, k, v)), is_causal=True)
    assert torch.allclose(out.cpu().float(), expected, atol=2e-2)
    assert (lse.dtype, lse.shape) == (torch.float32, (1, 2, 5))


def test_launches_copies_and_waits_are_recorded_with_the_causing_line(gpu):
    a, b = torch.ones(1, 2, 1, 8, device="cuda"), torch.zeros(1, 2, 1, device="cuda")
    gpu.record.clear()
    merge_attention(a, b, a, b)
    assert gpu.record.launches
    assert all(launch.line.startswith("hetero_kv/gpu_ops/") for launch in gpu.record.own_launches)
    assert len(gpu.record.own_launches) == len(gpu.record.launches)
    assert (gpu.record.copies, gpu.record.waits) == ([], [])
    a.cpu()
    assert gpu.record.copies == [Copy(64, to_device=False, is_pinned=False, is_blocking=True, line="elsewhere")]
    assert [wait.cause for wait in gpu.record.waits] == ["blocking copy from the device"]


@pytest.mark.parametrize(
    ("asks", "waits"),
    [
        (lambda ours: ours.sum().item(), 1),
        (lambda ours: ours[ours > 0], 1),
        (lambda ours: ours[[0, 1]], 1),
        (lambda ours: ours.nonzero(), 1),
        (lambda ours: torch.tensor([1.0], device="cuda"), 1),
        (lambda ours: ours[1:].mul(2).sum(), 0),
        (lambda ours: ours.to(torch.float16).contiguous(), 0),
    ],
)
def test_the_host_waits_where_it_has_to_know_a_number(gpu, asks, waits):
    ours = torch.ones(4, device="cuda")
    gpu.record.clear()
    asks(ours)
    assert len(gpu.record.waits) == waits


def test_a_copy_knows_its_bytes_and_whether_its_host_side_is_page_locked(gpu):
    ours, pinned = torch.ones(8, device="cuda"), torch.empty(8, pin_memory=True)
    pageable = torch.empty(8)
    gpu.record.clear()
    pinned.copy_(ours, non_blocking=True)
    pageable.copy_(ours, non_blocking=True)
    ours.copy_(pageable[:1], non_blocking=True)
    ours[:2].copy_(pinned[:2])
    found = [(copy.nbytes, copy.to_device, copy.is_pinned, copy.is_blocking) for copy in gpu.record.copies]
    assert found == [
        (32, False, True, False),
        # Nothing arrives in pageable memory behind the host's back.
        (32, False, False, True),
        # Of a copy that has to be spread first the driver sees other memory.
        (32, True, False, False),
        (8, True, True, True),
    ]


def test_memory_that_is_registered_is_page_locked_as_far_as_it_reaches(gpu):
    pool = torch.zeros(4096)
    driver = torch.cuda.cudart()
    assert driver.cudaHostRegister(pool.data_ptr(), 4096, 3) == 0
    assert driver.cudaHostRegister(pool.data_ptr() + 4096, 4096, 3) == 0
    assert driver.cudaHostRegister(pool.data_ptr() + 100, 8, 3) == 712
    assert pool[:2048].is_pinned()
    assert not pool[:2049].is_pinned()
    assert driver.cudaHostUnregister(pool.data_ptr()) == 0
    assert not pool[:8].is_pinned()


def test_live_bytes_and_their_peak(gpu):
    a = torch.empty(1000, dtype=torch.uint8, device="cuda:1")
    view = a[10:20]
    b = a + 1
    assert torch.cuda.memory_allocated("cuda:1") == 2000
    del a, b
    # A view holds all of it.
    assert torch.cuda.memory_allocated("cuda:1") == 1000
    del view
    assert torch.cuda.memory_allocated("cuda:1") == 0
    assert torch.cuda.max_memory_allocated("cuda:1") == 2000
    assert torch.cuda.max_memory_allocated("cuda:0") == 0
    torch.cuda.reset_peak_memory_stats("cuda:1")
    assert torch.cuda.max_memory_allocated("cuda:1") == 0


@pytest.mark.parametrize("interpret", [False, True])
def test_triton_kernels_run_on_it(interpret):
    pytest.importorskip("triton")
    parts = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3)
    with simulated_cuda(interpret=interpret) as gpu:
        ours = [part.to("cuda") for part in parts]
        merged = merge_attention(*ours)
        # The first time it is tried whether Triton runs here.
        assert [launch.name for launch in gpu.record.launches][-1] == "_merge"
        for actual, expected in zip(merged, merge_attention_in_torch(*parts), strict=True):
            assert torch.allclose(actual.cpu(), expected, atol=1e-6)


def test_a_device_context_makes_tensors_on_its_device_also_behind_a_simulated_one():
    _device_constructors.cache_clear()
    with simulated_cuda(), torch.device("cpu"):
        torch.empty(1)
    with torch.device("meta"):
        assert torch.tensor([]).device.type == "meta"
