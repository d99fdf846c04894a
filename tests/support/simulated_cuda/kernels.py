"""Triton kernels on simulated tensors: their torch functions, or Triton's interpreter."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from hetero_kv.gpu_ops.block_choice import best_blocks_in_torch, block_scores_in_torch
from hetero_kv.gpu_ops.cached_entries import all_but_lowest_in_torch, append_token_in_torch, keep_in_torch
from hetero_kv.gpu_ops.column_sums import column_sums_in_torch
from hetero_kv.gpu_ops.draws import mixed_in_torch, share_in_torch
from hetero_kv.gpu_ops.flash import flash_attention_in_torch
from hetero_kv.gpu_ops.merge import merge_attention_in_torch
from hetero_kv.gpu_ops.merged_entries import merge_one_in_torch, similarities_in_torch
from hetero_kv.gpu_ops.packed_weights import (
    multiply_chosen_in_torch,
    multiply_in_torch,
    rows_in_torch,
    unpacked_in_torch,
)
from hetero_kv.gpu_ops.rebuild import rebuild_into_in_torch, rebuilt_chunks_in_torch
from hetero_kv.gpu_ops.resident_attention import attend_in_torch
from hetero_kv.gpu_ops.rotary import RotaryLayout, rotate_into_in_torch, unrotate_into_in_torch
from hetero_kv.gpu_ops.slot_formats import Slots
from hetero_kv.gpu_ops.window_step import join_parts_in_torch, take_token_in_torch
from tests.support.simulated_cuda import cluster_kernels, slot_kernels, sparse_prompts, token_kernels
from tests.support.simulated_cuda.copies import bytes_of
from tests.support.simulated_cuda.errors import SimulatedCudaError
from tests.support.simulated_cuda.row_memory import StackedRows, addresses_of, rows_of
from tests.support.simulated_cuda.tensor import SimulatedTensor, on_cpu

# Of the dimensions x, y and z.
_MOST_BLOCKS = (2**31 - 1, 65_535, 65_535)


def _merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out: Any, lse: Any, *_: Any, **__: Any) -> None:
    merged = merge_attention_in_torch(out_a, lse_a, out_b, lse_b)
    out.copy_(merged[0])
    lse.copy_(merged[1])


def _gather(stored: Any, where: Any, out: Any, *_: Any, **__: Any) -> None:
    out.copy_(stored[where])


def _rebuild(
    coefficients: Any, basis: Any, cos: Any, sin: Any, chunks: Any, slots: Any, out: Any, *_: Any, **fixed: Any
) -> None:
    layout = RotaryLayout(fixed["PAIRS"], fixed["OFFSET"], fixed["INTERLEAVED"])
    arguments = coefficients, basis, cos, sin, layout, chunks
    if fixed["SLOTTED"]:
        rebuild_into_in_torch(*arguments, slots, out)
    else:
        out.copy_(rebuilt_chunks_in_torch(*arguments, fixed["CHUNK"]))


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
    arguments = q, lse, keys, scale, softcap, factors, fixed["SQUARED"], fixed["HEADS"] > 1, past
    sums.copy_(column_sums_in_torch(*arguments))


def _append(
    key: Any, value: Any, keys: Any, values: Any, positions: Any, taken: int, position: int, *_: Any, **__: Any
) -> None:
    append_token_in_torch(key, value, keys, values, positions, taken, position)


def _all_but_lowest(scores: Any, index: Any, cached: int, first: int, last: int, *_: Any, **__: Any) -> None:
    index.copy_(all_but_lowest_in_torch(scores, first, last))


def _keep(*arguments: Any, **fixed: Any) -> None:
    parts, scores, index, kept, gathered = (
        arguments[:3],
        arguments[3:6],
        arguments[6],
        arguments[7:10],
        arguments[10:13],
    )
    count = fixed["SCORES"]
    found = keep_in_torch(parts, scores[:count], index, kept)
    for out, each in zip(gathered[:count], found, strict=True):
        out.copy_(each)


def _rotate(x: Any, cos: Any, sin: Any, out: Any, *_: Any, **fixed: Any) -> None:
    layout = RotaryLayout(fixed["PAIRS"], fixed["OFFSET"], fixed["INTERLEAVED"])
    (unrotate_into_in_torch if fixed["INVERSE"] else rotate_into_in_torch)(x, cos, sin, layout, out)


def _draw(positions: Any, out: Any, count: int, heads: int, row: int, head: int, constant: int, **fixed: Any) -> None:
    mixed = mixed_in_torch(positions, constant)
    out.copy_(share_in_torch(mixed) if fixed["BITS"] else mixed)


def _similarities(evicted: Any, kept: Any, out: Any, *_: Any, **__: Any) -> None:
    out.copy_(similarities_in_torch(evicted, kept))


def _merge_one(*arguments: Any, **_: Any) -> None:
    merge_one_in_torch(*arguments[:7])


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


def _take_token(
    q: Any, k: Any, v: Any, keys: Any, values: Any, sent_q: Any, sent_k: Any, sent_v: Any, sent_lse: Any, out: Any,
    slot: int, first: int, first_count: int, second: int, total: int, share: int, scale: float, softcap: float,
    *_: Any, **fixed: Any,
) -> None:  # fmt: skip
    runs, sent = (first, first_count, second, total - first_count), (sent_q, sent_k, sent_v, sent_lse)
    out.copy_(take_token_in_torch(q, k, v, keys, values, slot, runs, scale, softcap, sent, fixed["SPLITS"]))


def _join_parts(parts: Any, lse_of_parts: Any, other: Any, other_lse: Any, *results: Any, **fixed: Any) -> None:
    elsewhere = (other, other_lse) if fixed["HAS_OTHER"] else (None, None)
    join_parts_in_torch(parts, lse_of_parts, *elsewhere, *results)


def _score_blocks(
    q: Any, vectors: Any, number: Any, left_out: Any, scores: Any, count: int, capacity: int, kv_heads: int,
    scale: float, softcap: float, *_: Any, **fixed: Any,
) -> None:  # fmt: skip
    blocks, without = number if fixed["COUNTED"] else count, left_out if fixed["LEFT_OUT"] else None
    scores.copy_(block_scores_in_torch(q, vectors, blocks, fixed["BOUNDS"], scale, softcap, without))


def _choose_blocks(
    scores: Any, number: Any, chosen: Any, count: int, capacity: int, n: int, *_: Any, **fixed: Any
) -> None:
    blocks, is_shared = number if fixed["COUNTED"] else count, fixed["HEADS"] == scores.shape[1] > 1
    chosen.copy_(best_blocks_in_torch(scores, blocks, n, fixed["LARGEST"], fixed["SOFTMAX"], is_shared))


def _attend_resident(
    q: Any, k: Any, v: Any, keys: Any, values: Any, ids: Any, slot_keys: Any, slot_values: Any, offsets: Any,
    numbers: Any, sent_k: Any, sent_v: Any, lse: Any, out: Any, initial: int, ring: int, slots: int, scale: float,
    softcap: float, *_: Any, **fixed: Any,
) -> None:  # fmt: skip
    kept = Slots(slot_keys, slot_values, offsets if fixed["HAS_OFFSETS"] else None)
    places = (keys, values), initial, ids, kept, numbers
    further = fixed["PARTS"] - fixed["SPLITS"]
    attended = attend_in_torch(q, k, v, *places, scale, softcap, (sent_k, sent_v), fixed["WINDOW_SPLITS"], further)
    out.copy_(attended[0])
    lse.copy_(attended[1])


#: What each kernel computes, in milliseconds less than its interpreter takes. That they are the same is tested.
DEFINITIONS: dict[str, Callable[..., None]] = {
    "_merge": _merge,
    "_gather": _gather,
    "_rebuild": _rebuild,
    "_flash": _flash,
    "_column_sums": _column_sums,
    "_append": _append,
    "_all_but_lowest": _all_but_lowest,
    "_keep": _keep,
    "_rotate": _rotate,
    "_draw": _draw,
    "_similarities": _similarities,
    "_merge_one": _merge_one,
    "_multiply_packed": _multiply_packed,
    "_unpack_packed": _unpack_packed,
    "_rows_of_packed": _rows_of_packed,
    "_take_token": _take_token,
    "_join_parts": _join_parts,
    "_score_blocks": _score_blocks,
    "_choose_blocks": _choose_blocks,
    "_attend_resident": _attend_resident,
    **slot_kernels.DEFINITIONS,
    **sparse_prompts.DEFINITIONS,
    **token_kernels.DEFINITIONS,
    **cluster_kernels.DEFINITIONS,
}

#: What each of them writes to, by the names of its parameters; the interpreter's runs are checked by it.
WRITTEN: dict[str, tuple[str, ...]] = {
    "_merge": ("out", "lse"),
    "_gather": ("out",),
    "_rebuild": ("out",),
    "_flash": ("out", "lse"),
    "_column_sums": ("sums",),
    "_append": ("keys", "values", "positions"),
    "_all_but_lowest": ("index",),
    "_keep": ("kept_keys", "kept_values", "kept_positions", "kept_a", "kept_b", "kept_c"),
    "_rotate": ("out",),
    "_draw": ("out",),
    "_similarities": ("out",),
    "_merge_one": ("keys", "values"),
    "_multiply_packed": ("out",),
    "_unpack_packed": ("out",),
    "_rows_of_packed": ("out",),
    "_take_token": ("keys", "values", "sent_q", "sent_k", "sent_v", "sent_lse", "out"),
    "_join_parts": ("out", "lse"),
    "_score_blocks": ("scores",),
    "_choose_blocks": ("chosen",),
    "_attend_resident": ("keys", "values", "sent_k", "sent_v", "lse", "out"),
    **slot_kernels.WRITTEN,
    **sparse_prompts.WRITTEN,
    **token_kernels.WRITTEN,
    **cluster_kernels.WRITTEN,
}


def _rows_read(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The indices of dimension 0 that a kernel reads of a DRAM argument, by the parameter's name."""
    if name == "_gather":
        return {"stored": arguments["where"]}
    if name == "_fetch":
        row, head, listed = (arguments["misses"] >= 0).nonzero(as_tuple=True)
        return {"stored": arguments["table"][row, arguments["misses"][row, head, listed]].long()}
    if name == "_fetch_tokens":
        return {"stored": token_kernels.blocks_read(arguments)}
    if name == "_attend_tokens":
        return dict.fromkeys(("slot_keys", "slot_values"), token_kernels.blocks_attended(arguments))
    return {}


@contextmanager
def interpreted(simulation: Any, by_interpreter: bool) -> Iterator[None]:
    """Within this context Triton's kernels run on the simulated device, if Triton is installed.

    Those that have no definition are interpreted in any case.
    """
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        name = self.fn.__name__
        named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        _require_grid(name, grid(named) if callable(grid) else grid)
        written = _queue(simulation, name, named)
        data = on_cpu(named)
        if rows := rows_of(name, data):
            writes = frozenset(rows) & frozenset(written)
            simulation.use_rows(name, lambda: addresses_of(data, rows), writes)
        if name in DEFINITIONS and not by_interpreter:
            reads_dram = any(not isinstance(each, SimulatedTensor) for each in _tensors(named).values())
            if simulation.capture is None or not (rows or reads_dram):
                # At the addresses of a capture may be nothing, and what is listed of DRAM follows from that.
                _compute(name, data, len(args), rows, written)
            simulation.computed(lambda: _compute(name, data, len(args), rows, written), ())
            return
        simulation.refuse_capturing("a kernel by the interpreter")
        kept = {each: data[each].clone() for each in _tensors(named) if each not in written or each in rows}
        InterpretedFunction(self.fn).run(*on_cpu(args), grid=grid, warmup=warmup, **on_cpu(kwargs))
        for each, before in kept.items():
            if not torch.equal(bytes_of(data[each]), bytes_of(before)):
                raise SimulatedCudaError(f"{name} writes to {each}, of which WRITTEN does not tell")

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return InterpretedFunction(self.fn)(*args, **kwargs)

    with patch.object(JITFunction, "run", run), patch.object(JITFunction, "__call__", call):
        yield


def _compute(
    name: str, named: dict[str, Any], count: int, rows: dict[str, Any], written: tuple[str, ...]
) -> None:  # fmt: skip
    """A kernel's numbers by its definition, whose operators on the CPU need no interception.

    count: of the arguments that are passed by position, the first ones of `named`.
    """
    with torch._C._DisableTorchDispatch():
        stacked = StackedRows(named, rows) if rows else None
        every = list((named if stacked is None else named | stacked.tensors).items())
        DEFINITIONS[name](*(value for _, value in every[:count]), **dict(every[count:]))
        if stacked is not None:
            stacked.write(written)


def _require_grid(name: str, grid: tuple[int, ...]) -> None:
    """Raise what a launch does for more blocks than CUDA takes of a dimension."""
    if any(blocks > most for blocks, most in zip(grid, _MOST_BLOCKS, strict=False)):
        raise RuntimeError(f"Triton Error [CUDA]: invalid argument ({name} in {' x '.join(map(str, grid))} blocks)")


def _tensors(named: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: each for name, each in named.items() if isinstance(each, torch.Tensor)}


def _queue(simulation: Any, name: str, named: dict[str, Any]) -> tuple[str, ...]:
    """The launch of a kernel with these arguments. Raises what CUDA does, or SimulatedCudaError.

    Returns which of the arguments it may write to.
    """
    arguments = _tensors(named)
    ours = {each: tensor for each, tensor in arguments.items() if isinstance(tensor, SimulatedTensor)}
    if not ours:
        raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
    places = {tensor.place for tensor in ours.values()}
    if len(places) > 1 or places.pop().index != simulation.index:
        raise SimulatedCudaError(f"{name} is launched on GPU {simulation.index}, on tensors of another")
    in_dram = {each: tensor for each, tensor in arguments.items() if each not in ours}
    # A kernel's outputs cannot be told from outside: an unlisted kernel may write to all its arguments.
    written = WRITTEN.get(name, tuple(ours))
    # A table of addresses is read, whatever is written where they point.
    writes = [each for each in written if each in ours and each not in rows_of(name, named)]
    reads = [tensor for each, tensor in ours.items() if each not in writes]
    simulation.launch(name, simulation.index, reads, [ours[each] for each in writes])
    if in_dram:
        data = on_cpu(named)
        simulation.read_in_place(name, in_dram, lambda: _rows_read(name, data))
    return written
