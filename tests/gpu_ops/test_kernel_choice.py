"""Whether Triton runs on a GPU is found out once, and a temporary failure does not decide it."""

from __future__ import annotations

import pytest
import torch

from hetero_kv.gpu_ops.kernel_choice import runs_triton
from tests.support.devices import simulated_cuda

merge = pytest.importorskip("hetero_kv.gpu_ops.triton_kernels.merge")
pytestmark = pytest.mark.cuda


@pytest.fixture
def ours():
    with simulated_cuda():
        yield torch.zeros(1, device="cuda")


def failing_once(monkeypatch, error):
    def merged(*parts):
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(merge, "merge_attention", merged)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        MemoryError(),
    ],
)
def test_memory_that_runs_out_says_nothing_of_triton(ours, monkeypatch, error):
    failing_once(monkeypatch, error)
    with pytest.raises(type(error)):
        runs_triton(ours)
    assert runs_triton(ours)


def test_a_reason_against_triton_is_reported_once_and_remembered(ours, monkeypatch):
    failing_once(monkeypatch, RuntimeError("Failed to find C compiler"))
    with pytest.warns(RuntimeWarning, match="Failed to find C compiler"):
        assert not runs_triton(ours)
    assert not runs_triton(ours)
