"""Compiles every Triton kernel for GPUs that need not be present, as it is launched; prints the results.

    python tests/gpu_ops/compiled_kernels.py [pairs | all]

A launch's arguments say for what it is specialised, strides and alignment among them: each is made by the function
that launches the kernel, with tensors of a model's shapes. With `all` each is compiled for every GPU, and those
of packed weights in every format too; with `pairs` each for one, else one launch of every kernel.
test_triton_kernels.py runs it in another process, since the interpreter's tests must not see compiled kernels.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from hetero_kv.gpu_ops.draws import FACTORS
from hetero_kv.gpu_ops.rotary import RotaryLayout
from hetero_kv.gpu_ops.slot_formats import GROUP_BYTES, Slots
from hetero_kv.gpu_ops.triton_kernels import (
    block_choice,
    cached_entries,
    column_sums,
    draws,
    flash,
    gather,
    merge,
    merged_entries,
    products,
    rebuild,
    resident_attention,
    resident_slots,
    rotary,
    window_step,
)
from tests.gpu_ops import compiled_clusters, compiled_packed, compiled_rows, compiled_sets, compiled_tokens
from tests.gpu_ops.compiled_numbers import BRAIN, DIM, HALF, SINGLE, zeros

#: Shared memory that a block of threads can have, bytes, by compute capability (CUDA C++ Programming Guide, "Technical
#: Specifications per Compute Capability").
SHARED = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}


@dataclass
class Device:
    """What Triton asks of the driver of a GPU before it launches a kernel."""

    capability: int

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def attending(dtype: torch.dtype, dim: int, *additions: Any) -> Callable[[], Any]:
    """A prompt's chunk behind a past in a longer buffer, as a model projects it."""
    q, keys = zeros(1, 200, 8, dim, dtype=dtype).transpose(1, 2), zeros(1, 2, 900, dim, dtype=dtype)
    past, own = keys[:, :, :300], zeros(1, 200, 2, dim, dtype=dtype).transpose(1, 2)
    return lambda: flash.flash_attention(q, past, past, own, own, 0.1, *additions)


def summing(dtype: torch.dtype, group_max: bool) -> Callable[[], Any]:
    q, keys = zeros(1, 8, 200, DIM, dtype=dtype), zeros(1, 2, 500, DIM, dtype=dtype)
    return lambda: column_sums.column_sums(q, zeros(1, 8, 200), keys, 0.1, None, None, False, group_max, 300)


def merging(dtype: torch.dtype) -> Callable[[], Any]:
    a, lse = zeros(1, 8, 200, DIM, dtype=dtype), zeros(1, 8, 200)
    return lambda: merge.merge_attention(a, lse, zeros(1, 200, 8, DIM).transpose(1, 2), lse)


def rebuilding(dtype: torch.dtype, layout: RotaryLayout) -> Callable[[], Any]:
    turns = zeros(4096, layout.pairs, dtype=dtype)
    coefficients, basis = zeros(1, 4096, 160, dtype=dtype), zeros(1, 8, 160, DIM, dtype=dtype)
    chunks = torch.zeros(1, 8, 9, dtype=torch.int64)
    return lambda: rebuild.rebuilt_chunks(coefficients, basis, turns, turns, layout, chunks, 8)


def rebuilding_into(dtype: torch.dtype) -> Callable[[], Any]:
    turns, chunks = zeros(4096, 64, dtype=dtype), torch.zeros(1, 8, 256, dtype=torch.int64)
    coefficients, basis = zeros(1, 4096, 160, dtype=dtype), zeros(1, 8, 160, DIM, dtype=dtype)
    strided = zeros(1, 8, 305, 8, DIM, dtype=dtype)[:, :, 48:-1]
    factors = coefficients, basis, turns, turns, RotaryLayout(64)
    return lambda: rebuild.rebuild_into(*factors, chunks, chunks, strided)


def taking(dtype: torch.dtype, heads: int, dim: int, softcap: float | None) -> Callable[[], Any]:
    q, k = zeros(1, 1, heads, dim, dtype=dtype).transpose(1, 2), zeros(1, 1, 8, dim, dtype=dtype).transpose(1, 2)
    window, runs = zeros(1, 8, 4352, dim, dtype=dtype), (0, 4000, 4100, 200)
    sent = zeros(*q.shape), zeros(*k.shape), zeros(*k.shape), zeros(1, 8, 16, heads // 8)
    return lambda: window_step.take_token(q, k, k, window, window, 7, runs, 0.1, softcap, sent, 16)


def joining(dtype: torch.dtype, dim: int) -> Callable[[], Any]:
    parts, other, out = zeros(1, 8, 16, 4, dim), zeros(1, 32, 1, dim), zeros(1, 32, 1, dim, dtype=dtype)
    return lambda: window_step.join_parts(parts, zeros(1, 8, 16, 4), other, zeros(1, 8, 4), out, zeros(1, 32))


def joining_alone(dtype: torch.dtype) -> Callable[[], Any]:
    parts, out = zeros(1, 8, 32, 4, DIM), zeros(1, 32, 1, DIM, dtype=dtype)
    return lambda: window_step.join_parts(parts, zeros(1, 8, 32, 4), None, None, out, zeros(1, 32))


def scoring(dtype: torch.dtype, stored: torch.dtype, number: int, bounds: bool, left_out: int) -> Callable[[], Any]:
    q = zeros(1, 1, 32, DIM, dtype=dtype).transpose(1, 2)
    count: Any = 8000
    width = DIM // 32 * GROUP_BYTES[8] if stored is torch.uint8 else DIM
    vectors = zeros(8192, 1, 8, number, width, dtype=stored).permute(1, 2, 0, 3, 4)
    without = torch.zeros(1, 8, left_out, dtype=torch.int64) if left_out else None
    if not left_out:
        count = torch.zeros(3, dtype=torch.int64)[2:]
    return lambda: block_choice.score(q, vectors, count, bounds, 0.1, None if bounds else 30.0, without)


def choosing(n: int, largest: bool, softmax: bool, is_shared: bool) -> Callable[[], Any]:
    count: Any = 8000 if softmax else torch.zeros(3, dtype=torch.int64)[2:]
    return lambda: block_choice.choose(zeros(1, 8, 4, 8192), count, n, largest, softmax, is_shared)


def attending_resident(
    dtype: torch.dtype, dim: int, slots: int, softcap: float | None, bits: int = 0
) -> Callable[[], Any]:
    q, k = zeros(1, 1, 32, dim, dtype=dtype).transpose(1, 2), zeros(1, 1, 8, dim, dtype=dtype).transpose(1, 2)
    window, kept = zeros(1, 8, 352, dim, dtype=dtype), zeros(1, 8, slots, 16, dim, dtype=dtype)
    ids, numbers, sent = torch.zeros(1, 8, slots, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), zeros(*k.shape)
    places = (window, window), 16, ids, Slots(kept, kept), numbers
    if bits:
        stored = torch.zeros(1, 8, slots, 16, dim // 32 * GROUP_BYTES[bits], dtype=torch.uint8)
        offsets = zeros(1, 8, slots, 1, dim, dtype=HALF) if bits == 4 else None
        places = (window, window), 16, ids, Slots(stored, stored, offsets), numbers
    return lambda: resident_attention.attend(q, k, k, *places, 0.1, softcap, (sent, sent), 16)


def rotating(dtype: torch.dtype, layout: RotaryLayout, tokens: int) -> Callable[[], Any]:
    keys, turns = zeros(1, 8, 1056, DIM, dtype=dtype), zeros(4096, layout.pairs, dtype=dtype)[:tokens]
    return lambda: rotary.rotate_into(keys[:, :, :tokens], turns, turns, layout, zeros(*keys.shape, dtype=dtype))


def placing() -> None:
    chunks = torch.zeros(1, 8, 256, dtype=torch.int64)
    resident_slots.place(chunks, chunks, torch.zeros(8, dtype=torch.int32))


def dividing() -> None:
    chunks, numbers = torch.zeros(1, 8, 256, dtype=torch.int64), torch.zeros(8, dtype=torch.int32)
    resident_slots.divide(chunks, chunks, chunks, numbers, 0.3, chunks, torch.zeros(1, 8, 256, dtype=torch.int32))


def fetching(stored: torch.dtype, dtype: torch.dtype) -> Callable[[], Any]:
    chunks, table = torch.zeros(1, 8, 256, dtype=torch.int64), torch.zeros(1, 500, dtype=torch.int32)
    strided = zeros(1, 8, 305, 8, DIM, dtype=dtype)[:, :, 48:-1]
    return lambda: resident_slots.fetch(zeros(9, 8, 8, DIM, dtype=stored), table, chunks, chunks, strided)


def gathering() -> None:
    gather.gathered_rows(zeros(9, 8, DIM, dtype=HALF), torch.zeros(4, dtype=torch.int64), zeros(4, 8, DIM, dtype=HALF))


def room(dtype: torch.dtype, capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    vectors = (zeros(1, 8, capacity, DIM, dtype=dtype) for _ in range(2))
    return *vectors, torch.zeros(1, 8, capacity, dtype=torch.int64)


def appending(dtype: torch.dtype) -> Callable[[], Any]:
    token = zeros(1, 1, 8, DIM, dtype=dtype).transpose(1, 2)
    return lambda: cached_entries.append_token(token, token, *room(dtype, 1056), 1024, 5000)


def leaving_out(dtype: torch.dtype, first: int) -> Callable[[], Any]:
    return lambda: cached_entries.all_but_lowest(zeros(1, 8, 1025, dtype=dtype), first, first)


def keeping(dtype: torch.dtype, *scores: torch.dtype) -> Callable[[], Any]:
    lists, index = [zeros(1, 8, 1025, dtype=each) for each in scores], torch.zeros(1, 8, 1024, dtype=torch.int64)
    return lambda: cached_entries.keep(room(dtype, 1056), lists, index, room(dtype, 1056))


def drawing(constant: int, bits: int) -> Callable[[], Any]:
    return lambda: draws.draw(room(BRAIN, 1056)[2][..., :1025], constant, FACTORS, bits)


def comparing(dtype: torch.dtype) -> Callable[[], Any]:
    return lambda: merged_entries.similarities(room(dtype, 33)[0][:, :, :1], room(dtype, 1056)[0][:, :, :1024])


def merging_one(dtype: torch.dtype) -> Callable[[], Any]:
    kept, evicted = ([part[:, :, :count] for part in room(dtype, 1056)[:2]] for count in (1024, 1))
    likeness, matches = zeros(1, 8, 1), torch.zeros(1, 8, 1, dtype=torch.int64)
    return lambda: merged_entries.merge_one(*kept, *evicted, likeness, matches, matches.bool())


#: Launches of every kernel, with the heads of Llama 3, ones that are rotated in part, and wide ones.
LAUNCHES: dict[str, Callable[[], Any]] = {
    "flash, float16": attending(HALF, DIM),
    "flash, bfloat16, soft-capped, windowed, with a sink": attending(BRAIN, DIM, 50.0, 100, zeros(8, dtype=BRAIN)),
    "flash, float16, 64": attending(HALF, 64, None, 128),
    "flash, bfloat16, 256": attending(BRAIN, 256, 50.0),
    "flash, float32": attending(SINGLE, DIM),
    **compiled_sets.LAUNCHES,
    "column sums, bfloat16": summing(BRAIN, False),
    "column sums, float32, of groups": summing(SINGLE, True),
    "merge, bfloat16": merging(BRAIN),
    "rebuild, bfloat16": rebuilding(BRAIN, RotaryLayout(64)),
    "rebuild, float16, in part": rebuilding(HALF, RotaryLayout(16, offset=96, interleaved=True)),
    "rebuild into slots, bfloat16": rebuilding_into(BRAIN),
    "rotate, bfloat16": rotating(BRAIN, RotaryLayout(64), 1025),
    "rotate, float32, in part": rotating(SINGLE, RotaryLayout(16, offset=96, interleaved=True), 1),
    "take a token, bfloat16": taking(BRAIN, 32, DIM, None),
    "take a token, float16, soft-capped": taking(HALF, 16, 256, 30.0),
    "take a token, float32": taking(SINGLE, 32, 256, None),
    "join parts, bfloat16": joining(BRAIN, DIM),
    "join parts, float32": joining(SINGLE, 80),
    "join parts alone, bfloat16": joining_alone(BRAIN),
    "score, bfloat16, by bounds in float16": scoring(BRAIN, HALF, 2, True, 0),
    "score, bfloat16, with chunks left out": scoring(BRAIN, BRAIN, 1, False, 48),
    "score, float32": scoring(SINGLE, SINGLE, 4, False, 0),
    "score, bfloat16, by bounds in Q8_0": scoring(BRAIN, torch.uint8, 2, True, 0),
    "score, float16, in Q8_0": scoring(HALF, torch.uint8, 3, False, 0),
    "choose, by means": choosing(256, False, False, False),
    "choose, by shares": choosing(256, True, True, False),
    "choose, for all heads": choosing(96, True, False, True),
    "attend to slots, bfloat16": attending_resident(BRAIN, DIM, 256, None),
    "attend to slots, float16, soft-capped": attending_resident(HALF, 256, 256, 30.0),
    "attend to slots, float32": attending_resident(SINGLE, 256, 256, None),
    "attend to slots in Q8_0, bfloat16": attending_resident(BRAIN, DIM, 256, None, bits=8),
    "attend to slots in Q4_0, float16": attending_resident(HALF, DIM, 256, None, bits=4),
    "attend to a window alone, bfloat16": attending_resident(BRAIN, DIM, 0, None),
    "place": placing,
    "divide": dividing,
    "fetch, float16 for bfloat16": fetching(HALF, BRAIN),
    "fetch, bytes": fetching(torch.uint8, torch.uint8),
    "gather": gathering,
    "draw": drawing(104_729, 0),
    "draw, a share, of a large seed": drawing(77 * 15_485_863 * 1_000, 24),
    "similarities, bfloat16": comparing(BRAIN),
    "merge into one, bfloat16": merging_one(BRAIN),
    "merge into one, float32": merging_one(SINGLE),
    "append, bfloat16": appending(BRAIN),
    "all but the lowest, float32": leaving_out(SINGLE, 7),
    "all but the lowest, int64": leaving_out(torch.int64, 0),
    "keep, bfloat16, with three scores": keeping(BRAIN, SINGLE, SINGLE, SINGLE),
    "keep, float32, with whole numbers": keeping(SINGLE, torch.int64),
    **compiled_packed.LAUNCHES,
    **compiled_tokens.LAUNCHES,
    **compiled_clusters.LAUNCHES,
    **compiled_rows.LAUNCHES,
}
#: Launches of kernels that others launch too, for the slow tests.
FURTHER = (
    *compiled_rows.LAUNCHES,
    "flash, float16",
    "flash, float16, 64",
    "flash, bfloat16, 256",
    "flash, float32",
    *compiled_sets.FURTHER,
    "column sums, float32, of groups",
    "rebuild, float16, in part",
    "rotate, float32, in part",
    "take a token, bfloat16",
    "take a token, float32",
    "join parts, float32",
    "score, bfloat16, with chunks left out",
    "score, float32",
    "score, bfloat16, by bounds in Q8_0",
    "score, float16, in Q8_0",
    "choose, by means",
    "choose, for all heads",
    "attend to slots, bfloat16",
    "attend to slots, float32",
    "attend to a window alone, bfloat16",
    "fetch, bytes",
    "draw",
    "merge into one, float32",
    "all but the lowest, int64",
    "keep, float32, with whole numbers",
    *compiled_packed.FURTHER,
    *compiled_tokens.FURTHER,
    *compiled_clusters.FURTHER,
)


def compiled(launch: Callable[[], Any], capability: int) -> list[int]:
    """Bytes of machine code, and of shared memory, of the kernel that is launched."""
    found = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, warmup=True, **kwargs)
        found.append([len(kernel.asm["cubin"]), kernel.metadata.shared])

    driver.set_active(Device(capability))
    products._is_ampere = lambda tensor: capability >= 80
    JITFunction.run = compile_only
    try:
        launch()
    finally:
        JITFunction.run = run
    (only,) = found
    return only


if __name__ == "__main__":
    # One after the other, so that each of the GPUs has its turn.
    is_all = "all" in sys.argv
    names = [name for name in LAUNCHES if sys.argv[1:] or name not in FURTHER]
    turns = {name: list(SHARED) if is_all else [list(SHARED)[turn % 6]] for turn, name in enumerate(names)}
    turns |= {name: [list(SHARED)[turn % 6]] for turn, name in enumerate(compiled_packed.FORMS if is_all else ())}
    launches = LAUNCHES | compiled_packed.FORMS
    sizes = {f"{name}, sm_{each}": compiled(launches[name], each) for name, on in turns.items() for each in on}
    print(json.dumps({name: [*size, SHARED[int(name.rpartition("_")[2])]] for name, size in sizes.items()}))
