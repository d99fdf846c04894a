"""Kernels keep to CUDA's grid limits for any number of tokens."""

from __future__ import annotations

import pytest
import torch

from hetero_kv.gpu_ops import cached_entries, draws, merged_entries, rebuild, rotary
from hetero_kv.gpu_ops.rotary import RotaryLayout
from tests.support.devices import simulated_cuda

pytest.importorskip("triton")
pytestmark = pytest.mark.cuda

#: One more than the dimensions y and z of a grid take.
MANY = 65_536


@pytest.fixture
def gpu(monkeypatch):
    from hetero_kv.gpu_ops.triton_kernels import cached_entries, draws, merged_entries, rebuild, rotary

    # A block for every token: what would take blocks of the size they have is gigabytes.
    for kernels in (cached_entries, merged_entries, rotary):
        monkeypatch.setattr(kernels, "_ELEMENTS", 1)
    monkeypatch.setattr(draws, "_BLOCK", 1)
    monkeypatch.setattr(rebuild, "_TOKENS", 1)
    with simulated_cuda() as simulation:
        yield simulation


def on_gpu(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to("cuda")


def rotated():
    x, cos, sin = on_gpu(1, 2, MANY, 4), on_gpu(MANY, 2), on_gpu(MANY, 2)
    out = torch.empty_like(x)
    rotary.rotate_into(x, cos, sin, RotaryLayout(2), out)
    return out


def kept():
    parts = on_gpu(1, 2, MANY + 1, 2), on_gpu(1, 2, MANY + 1, 2), torch.ones(1, 2, MANY + 1, device="cuda").long()
    room = tuple(torch.empty_like(part) for part in parts)
    index = torch.arange(MANY, device="cuda").expand(1, 2, -1)
    cached_entries.keep(parts, [on_gpu(1, 2, MANY)], index, room)
    # The room behind them is not written.
    return room[0][:, :, :MANY]


def compared():
    return merged_entries.similarities(on_gpu(1, 2, 1, 2), on_gpu(1, 2, MANY, 2))


def drawn():
    return draws.uniform(torch.arange(MANY, device="cuda").expand(1, 2, -1), 0, 0)


def rebuilt():
    chunks = torch.arange(MANY, device="cuda").expand(1, 2, -1)
    tables = on_gpu(MANY, 1), on_gpu(MANY, 1)
    return rebuild.rebuilt_chunks(on_gpu(1, MANY, 1), on_gpu(1, 2, 1, 2), *tables, RotaryLayout(1), chunks, 1)


@pytest.mark.parametrize(
    ("launching", "kernel"),
    [(rotated, "_rotate"), (kept, "_keep"), (compared, "_similarities"), (drawn, "_draw"), (rebuilt, "_rebuild")],
)
def test_the_long_axis_of_a_grid_is_the_one_that_takes_most(gpu, launching, kernel):
    assert launching().isfinite().all()
    assert kernel in {launch.name for launch in gpu.record.launches}


def test_a_grid_that_cuda_refuses_is_refused(gpu):
    with pytest.raises(RuntimeError, match="invalid argument"):
        draws.uniform(torch.zeros(1, MANY, 1, dtype=torch.int64, device="cuda"), 0, 0)
