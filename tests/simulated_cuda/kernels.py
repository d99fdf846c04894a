"""Triton kernels on simulated tensors: what torch says they compute, or Triton's interpreter."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from gpu_ops.column_sums import column_sums_in_torch
from gpu_ops.flash import flash_attention_in_torch
from gpu_ops.merge import merge_attention_in_torch
from gpu_ops.packed_weights import multiply_chosen_in_torch, multiply_in_torch, rows_in_torch, unpacked_in_torch
from gpu_ops.rebuild import rebuilt_chunks_in_torch
from gpu_ops.rotary import RotaryLayout
from simulated_cuda.errors import SimulatedCudaError
from simulated_cuda.tensor import SimulatedTensor, on_cpu


def _merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out: Any, lse: Any, *_: Any, **__: Any) -> None:
    merged = merge_attention_in_torch(out_a, lse_a, out_b, lse_b)
    out.copy_(merged[0])
    lse.copy_(merged[1])


def _gather(stored: Any, where: Any, out: Any, *_: Any, **__: Any) -> None:
    out.copy_(stored[where])


def _rebuild(coefficients: Any, basis: Any, cos: Any, sin: Any, chunks: Any, out: Any, *_: Any, **fixed: Any) -> None:
    layout = RotaryLayout(fixed["PAIRS"], fixed["OFFSET"], fixed["INTERLEAVED"])
    out.copy_(rebuilt_chunks_in_torch(coefficients, basis, cos, sin, layout, chunks, fixed["CHUNK"]))


def _flash(
    q: Any, past_k: Any, past_v: Any, k: Any, v: Any, sink: Any, out: Any, lse: Any, n: int, past: int, own: int,
    window: int, scale: float, softcap: float, *_: Any, **fixed: Any,
) -> None:  # fmt: skip
    width, scores = window if fixed["WINDOWED"] else None, sink if fixed["HAS_SINK"] else None
    attended = flash_attention_in_torch(q, past_k, past_v, k, v, scale, softcap, width, scores)
    out.copy_(attended[0])
    lse.copy_(attended[1])


def _column_sums(
    q: Any, lse: Any, keys: Any, weights: Any, sums: Any, n: int, length: int, past: int, scale: float, softcap: float,
    *_: Any, **fixed: Any,
) -> None:  # fmt: skip
    factors = weights if fixed["WEIGHTED"] else None
    given = q, lse, keys, scale, softcap, factors, fixed["SQUARED"], fixed["HEADS"] > 1, past
    sums.copy_(column_sums_in_torch(*given))


def _multiply_packed(x: Any, data: Any, bias: Any, chosen: Any, out: Any, *_: Any, **fixed: Any) -> None:
    name, rows = fixed["NAME"], out.shape[1]
    if fixed["HAS_EXPERTS"]:
        out.copy_(multiply_chosen_in_torch(x, data, name, rows, chosen))
    else:
        out.copy_(multiply_in_torch(x, data, name, rows, bias if fixed["HAS_BIAS"] else None))


def _unpack_packed(data: Any, out: Any, first_tile: int, *_: Any, **fixed: Any) -> None:
    rows, columns = out.shape
    out.copy_(unpacked_in_torch(data, fixed["NAME"], 16 * first_tile + rows, columns)[16 * first_tile :])


def _rows_of_packed(data: Any, ids: Any, out: Any, rows: int, columns: int, *_: Any, **fixed: Any) -> None:
    out.copy_(rows_in_torch(data, fixed["NAME"], rows, columns, ids))


#: What each kernel computes, in milliseconds less than its interpreter takes. That they are the same is tested.
DEFINITIONS: dict[str, Callable[..., None]] = {
    "_merge": _merge,
    "_gather": _gather,
    "_rebuild": _rebuild,
    "_flash": _flash,
    "_column_sums": _column_sums,
    "_multiply_packed": _multiply_packed,
    "_unpack_packed": _unpack_packed,
    "_rows_of_packed": _rows_of_packed,
}


@contextmanager
def interpreted(simulation: Any, by_interpreter: bool) -> Iterator[None]:
    """Within this context Triton's kernels are launched on the simulated device; without Triton there are none.

    Those that have no definition are interpreted in any case.
    """
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        name = self.fn.__name__
        _queue(simulation, name, [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)])
        if name in DEFINITIONS and not by_interpreter:
            DEFINITIONS[name](*on_cpu(args), **on_cpu(kwargs))
        else:
            InterpretedFunction(self.fn).run(*on_cpu(args), grid=grid, warmup=warmup, **on_cpu(kwargs))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return InterpretedFunction(self.fn)(*args, **kwargs)

    with patch.object(JITFunction, "run", run), patch.object(JITFunction, "__call__", call):
        yield


def _queue(simulation: Any, name: str, given: list[torch.Tensor]) -> None:
    """The launch of a kernel with these tensors. Raises what CUDA does, or SimulatedCudaError."""
    ours = [each for each in given if isinstance(each, SimulatedTensor)]
    if not ours:
        raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
    if len({each.place for each in ours}) > 1 or ours[0].place.index != simulation.index:
        raise SimulatedCudaError(f"{name} is launched on GPU {simulation.index}, on tensors of another")
    for each in given:
        if not isinstance(each, SimulatedTensor) and not simulation.pinned.covers(each):
            raise SimulatedCudaError(f"{name} reads DRAM that is not page-locked: an illegal address")
    # What a kernel writes is not to be seen from outside: whatever it is given is held to be written.
    simulation.launch(name, simulation.index, [], ours)
