"""Failures at a chosen place of a call: when something is written, allocated or computed.

Places are, in the engine and in the model that it runs in:

- a function of the store or of a kernel that begins: a write, an allocation of blocks, a kernel call;
- a function of torch or numpy that is about to be called: each of them may find no memory.

Left out is what `interrupted_forwards` leaves out.
"""

from __future__ import annotations

import random
from collections import Counter
from types import FrameType
from typing import Any

import hetero_kv.store
from hetero_kv import cpu_ops, gpu_ops
from tests.engine.interrupted_forwards import Moments, is_ours

_STORES_AND_KERNELS = tuple(package.__path__[0] for package in (hetero_kv.store, cpu_ops, gpu_ops))
#: What torch says on a CPU without memory.
NO_MEMORY = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 64"
#: What is raised, by turns, and what a call of a model raises then.
RAISED = MemoryError("no memory"), RuntimeError(NO_MEMORY), RuntimeError("a kernel failed"), KeyboardInterrupt()


class Faults(Moments):
    """A profiler that counts a call's places, and raises at one of them.

    Args:
        at: the place, from 0; None counts only.
        error: what it raises there; a MemoryError if nothing is said.
    """

    def __init__(self, at: int | None = None, error: BaseException | None = None) -> None:
        super().__init__(at)
        self.error = error or MemoryError("no memory")

    def _moment(self, frame: FrameType, event: str, argument: Any) -> FrameType | None:
        if event == "call":
            return frame if frame.f_code.co_filename.startswith(_STORES_AND_KERNELS) else None
        is_allocating = event == "c_call" and is_ours(frame.f_code.co_filename) and _is_numeric(argument)
        return frame if is_allocating else None

    def _raised(self) -> BaseException:
        return type(self.error)(*self.error.args)


def _is_numeric(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    modules = getattr(function, "__module__", None), type(owner).__module__, getattr(owner, "__module__", None)
    return any(str(module).partition(".")[0] in ("torch", "numpy") for module in modules)


def sampled(places: int, drawn: int, chance: random.Random, ends: int = 2) -> list[int]:
    """As many as `ends` of the first of `places`, and of the last, and up to `drawn` of those between."""
    between = range(ends, max(ends, places - ends))
    outer = set(range(places)) - set(between)
    return sorted(outer | set(chance.sample(between, min(drawn, len(between)))))


def require_no_leak(*caches: Any) -> None:
    """Fail unless exactly the sequences of these caches, which are all caches of their stores, reference the blocks."""
    referenced: dict[int, Counter[int]] = {}
    allocators: dict[int, Any] = {}
    for cache in caches:
        for group in cache.groups:
            for allocator in group.store.allocators.values():
                allocators[id(allocator)] = allocator
                assert len(allocator.pools) <= len(group.layers)
            for sequence in group.sequences:
                for table in sequence.tables.values():
                    referenced.setdefault(id(table.allocator), Counter()).update(table.ids.tolist())
                    if table.length:
                        lengths = table.allocator.lengths[table.ids]
                        assert (lengths[:-1] == table.allocator.block_size).all()
                        assert lengths.sum() >= table.length
    for key, allocator in allocators.items():
        holders = referenced.get(key, Counter())
        counted = {block: allocator.references(block) for block in range(allocator.num_blocks)}
        assert {block: count for block, count in counted.items() if count} == dict(holders)
        assert allocator.free_blocks == allocator.num_blocks - len(holders)
