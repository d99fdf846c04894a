"""The threads of parallel regions: they wait for a region in compiled code, and spin before they sleep.

A decoded token has some hundred regions of 20 to 300 microseconds each, with gaps of 10 to 100 between them. A thread
that sleeps is woken in 5 to 50 microseconds, by CPU and system. Spinning through the gaps saves that, but only while
the machine has a core for each thread: if another program needs one, a thread that spins keeps it from the thread that
it waits for. So the time to spin follows from what spinning brings. If the caller of a region spins in vain for its
other threads, the time is halved; if they are done in time, it grows again.

GNU OpenMP, whose threads torch uses, has one time to spin for all programs, and hardly any if two threads of a process
each have a pool. It is what other systems than Linux use here.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from functools import cache
from typing import Any

import numba
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from hetero_kv.cpu_ops.atomics import FUTEX, WAIT, WAKE, add_atomic, futex, load_atomic, pause, store_atomic
from hetero_kv.cpu_ops.code_version import CODE_VERSION
from hetero_kv.cpu_ops.kernel_address import address_of

REGION = types.int64(types.int64, types.int64, types.int64)
"""The signature of regions: (thread, threads, address of the arguments), returning 0."""

#: How long a thread spins at most, in microseconds: longer than nearly all gaps inside a token.
MOST_SPINNING = 200.0
#: How long it spins at least.
LEAST_SPINNING = 4.0
#: Threads besides the caller's that the team has at most.
MOST_WORKERS = 1023

_I64 = ir.IntType(64)
# The team's block of memory: lines of 64 bytes, so that threads that write different lines do not disturb each other.
_LINE = 64
_REGION, _ARGUMENTS, _THREADS, _WORKERS, _MOST, _LEAST = range(0, 48, 8)
#: How many workers have yet to end the region, whether one failed, and whether the caller sleeps until they end.
_REMAINING, _FAILED, _CALLER_SLEEPS = _LINE, _LINE + 8, _LINE + 16
#: Rounds that a thread spins, at present.
_SPINS = 2 * _LINE
#: How many workers have begun the region.
_BEGUN = 3 * _LINE
#: How many callers there are at present.
_CALLERS = 4 * _LINE
#: For each worker the number of regions that it was called for, and whether it sleeps.
_SLOTS, _SLEEPS = 5 * _LINE, 8
_BYTES = _SLOTS + MOST_WORKERS * _LINE


def is_supported() -> bool:
    """Whether this system has a team: Linux on x86-64 or 64-bit ARM."""
    return sys.platform == "linux" and FUTEX is not None


@intrinsic
def _block(typingctx):
    """The address of the team's block, which is a variable of the kernel that contains this call."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, operands: Any) -> ir.Value:
        kind = ir.ArrayType(ir.IntType(8), _BYTES)
        variable = cgutils.add_global_variable(builder.module, kind, "hetero_kv_thread_team")
        variable.linkage, variable.initializer, variable.align = "internal", ir.Constant(kind, None), _LINE
        return builder.ptrtoint(variable, _I64)

    return types.int64(), codegen


@intrinsic
def _has_failed(typingctx, region, thread, threads, arguments):
    """Run a thread's part of a region. Returns whether it raised an exception, which is dropped."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, operands: Any) -> ir.Value:
        convention = context.call_conv
        function = convention.get_function_type(types.int64, REGION.args)
        callee = builder.inttoptr(operands[0], function.as_pointer())
        status, _ = convention.call_function(builder, callee, types.int64, REGION.args, operands[1:])
        return builder.zext(status.is_error, _I64)

    return types.int64(*[types.int64] * 4), codegen


@njit
def _became(address, value, rounds):
    """Spin until the int64 at an address is `value`, for at most so many rounds. Returns whether it is."""
    for _ in range(rounds):
        if load_atomic(address) == value:
            return True
        pause()
    return load_atomic(address) == value


@cache
def _caller() -> Any:
    """The kernel that calls a region on all threads: a `REGION` of (its address, threads, arguments).

    For the region 0 it returns the address of the team's block.
    """
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True)
    def run(region, threads, arguments):
        block = _block()
        if region == 0:
            return block + 0 * code_version
        # A second caller, or a region that calls one, runs all parts by itself.
        is_first = add_atomic(block + _CALLERS, 1) == 1
        called = max(0, min(threads - 1, load_atomic(block + _WORKERS))) if is_first else 0
        if called:
            store_atomic(block + _REGION, region)
            store_atomic(block + _ARGUMENTS, arguments)
            store_atomic(block + _THREADS, threads)
            store_atomic(block + _REMAINING, called)
            store_atomic(block + _BEGUN, 0)
            for worker in range(called):
                slot = block + _SLOTS + worker * _LINE
                add_atomic(slot, 1)
                if load_atomic(slot + _SLEEPS):
                    futex(slot, WAKE, 1)
        failed = _has_failed(region, 0, threads, arguments)
        for thread in range(called + 1, threads):
            failed |= _has_failed(region, thread, threads, arguments)
        if called:
            remaining, spins = block + _REMAINING, load_atomic(block + _SPINS)
            if _became(remaining, 0, spins):
                most = load_atomic(block + _MOST)
                store_atomic(block + _SPINS, min(most, spins + most // 128 + 1))
            else:
                if load_atomic(block + _BEGUN) < called:
                    store_atomic(block + _SPINS, max(load_atomic(block + _LEAST), spins // 2))
                store_atomic(block + _CALLER_SLEEPS, 1)
                left = load_atomic(remaining)
                while left:
                    futex(remaining, WAIT, left)
                    left = load_atomic(remaining)
                store_atomic(block + _CALLER_SLEEPS, 0)
            failed |= load_atomic(block + _FAILED)
            store_atomic(block + _FAILED, 0)
        add_atomic(block + _CALLERS, -1)
        if failed:
            raise RuntimeError("a thread of a kernel failed, perhaps for lack of memory")
        return 0

    return run


@cache
def _worker() -> Any:
    """The kernel that a worker never leaves: (address of the team's block, its index, regions called for before)."""
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True)
    def serve(block, worker, calls):
        slot = block + _SLOTS + worker * _LINE
        while block != 0 * code_version:
            if not _became(slot, calls + 1, load_atomic(block + _SPINS)):
                store_atomic(slot + _SLEEPS, 1)
                while load_atomic(slot) == calls:
                    futex(slot, WAIT, calls & 0xFFFFFFFF)
                store_atomic(slot + _SLEEPS, 0)
            calls += 1
            add_atomic(block + _BEGUN, 1)
            threads, arguments = load_atomic(block + _THREADS), load_atomic(block + _ARGUMENTS)
            if _has_failed(load_atomic(block + _REGION), worker + 1, threads, arguments):
                store_atomic(block + _FAILED, 1)
            if add_atomic(block + _REMAINING, -1) == 0 and load_atomic(block + _CALLER_SLEEPS):
                futex(block + _REMAINING, WAKE, 1)
        return calls

    return serve


@cache
def _spinner() -> Any:
    """The kernel that spins in vain: (an address of the number 0, rounds, 0)."""
    code_version = CODE_VERSION

    @njit(REGION, cache=True, nogil=True)
    def spin(address, rounds, nothing):
        return nothing if _became(address, 1, rounds) else nothing + 0 * code_version

    return spin


class _Block:
    """The team's block, as this module reads and writes it."""

    def __init__(self) -> None:
        self.address: int = _caller()(0, 0, 0)

    def __getitem__(self, place: int) -> int:
        return ctypes.c_int64.from_address(self.address + place).value

    def __setitem__(self, place: int, value: int) -> None:
        ctypes.c_int64.from_address(self.address + place).value = value


def _rounds_per_microsecond(block: _Block) -> float:
    rounds, spin = 200, _spinner()
    spin(block.address + _FAILED, rounds, 0)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        spin(block.address + _FAILED, rounds, 0)
        best = min(best, time.perf_counter() - began)
    return rounds / (1e6 * best)


def _start(block: _Block) -> None:
    """Start the workers, asleep, as many as Numba has threads besides the caller's."""
    # A call after a failed one goes on where that stopped: two threads of one slot would do their part twice.
    for worker in range(block[_WORKERS], min(numba.config.NUMBA_NUM_THREADS - 1, MOST_WORKERS)):
        arguments = block.address, worker, block[_SLOTS + worker * _LINE]
        threading.Thread(target=_worker(), args=arguments, name=f"kernel-{worker + 1}", daemon=True).start()
        block[_WORKERS] = worker + 1


_starting = threading.Lock()


def team() -> int:
    """Returns the address of the kernel that calls a region on all threads; starts the team at the first call.

    The kernel is a `REGION` of (address of the region, threads, address of the arguments). It returns when all threads
    have ended. Callers take turns (`threads.one_kernel_at_a_time`); without, the second has one thread. Raises
    RuntimeError if a thread failed.
    """
    with _starting:
        return _started()


@cache
def _started() -> int:
    block = _Block()
    per_microsecond = _rounds_per_microsecond(block)
    block[_MOST], block[_LEAST] = int(MOST_SPINNING * per_microsecond), int(LEAST_SPINNING * per_microsecond)
    block[_SPINS] = block[_MOST]
    _start(block)

    def restart() -> None:
        # A forked process has only the thread that forked.
        block[_REMAINING] = block[_FAILED] = block[_CALLER_SLEEPS] = block[_WORKERS] = block[_CALLERS] = 0
        for worker in range(MOST_WORKERS):
            block[_SLOTS + worker * _LINE + _SLEEPS] = 0
        _start(block)

    os.register_at_fork(after_in_child=restart)
    return address_of(_caller())
