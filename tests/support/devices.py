"""The devices that tests run on: the CPU, and `cuda`, a GPU where there is one and a simulated one elsewhere."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from hetero_kv.gpu_ops import kernel_choice, mapped_memory, side_stream
from tests.support.simulated_cuda import simulated

CPU = torch.device("cpu")


def on_both(values, quick=(), slow=()):
    """Parameters (value, device) of a test that takes a value and the fixture `device`, with `indirect=["device"]`.

    On the CPU all values, those that are `slow` among the slow tests; on `cuda` those that are `quick` always, and the
    others among the slow tests.
    """
    values = list(values)
    assert {*quick, *slow} <= set(values)
    marks = {value: [pytest.mark.cuda] if value in quick else [pytest.mark.cuda, pytest.mark.slow] for value in values}
    on_cuda = [pytest.param(value, "cuda", marks=marks[value], id=f"cuda-{value}") for value in values]
    on_cpu = [
        pytest.param(value, "cpu", marks=pytest.mark.slow if value in slow else (), id=str(value)) for value in values
    ]
    return [*on_cpu, *on_cuda]


@contextmanager
def device_called(name: str) -> Iterator[torch.device]:
    """Within this context `name`, `cpu` or `cuda`, is there."""
    if name == "cpu" or torch.cuda.is_available():
        yield CPU if name == "cpu" else torch.device("cuda", 0)
        return
    with simulated_cuda():
        yield torch.device("cuda", 0)


@contextmanager
def simulated_cuda(**settings):
    """`simulated`, with nothing left in the project of other devices before, and nothing of this one after.

    A test that asks for it is skipped where there is a GPU: Triton's interpreter, by which it computes, would be left
    in the compiler that other tests of the process need.
    """
    if torch.cuda.is_available() and "PYTEST_CURRENT_TEST" in os.environ:
        pytest.skip("there is a GPU, and this is a test on a simulated one")
    _forget_devices()
    threads = torch.get_num_threads()
    # Of tiny tensors threads would wait for each other longer than they work.
    torch.set_num_threads(1)
    try:
        with simulated(**settings) as simulation:
            yield simulation
    finally:
        torch.set_num_threads(threads)
        _forget_devices()


def _forget_devices() -> None:
    kernel_choice._runs_on.cache_clear()
    mapped_memory.are_the_hosts.cache_clear()
    side_stream._streams.clear()


def model_on(device: torch.device, model: nn.Module) -> nn.Module:
    """The model itself on the CPU, a copy of it elsewhere."""
    return model if device.type == "cpu" else copy.deepcopy(model).to(device)
