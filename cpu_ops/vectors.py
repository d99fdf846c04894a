"""Emitters of LLVM vector code for the kernels' inner loops."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.np.arrayobj import make_array

from hetero_kv.cpu_ops.cpu_features import is_amd, is_intel
from hetero_kv.cpu_ops.exponential import (
    COARSE_COEFFICIENTS,
    COARSE_FRACTION_COEFFICIENTS,
    COEFFICIENTS,
    FRACTION_COEFFICIENTS,
    LOG_COEFFICIENTS,
    ROOT_HALF,
)
from hetero_kv.cpu_ops.storage import FLOAT, STORAGE_TYPES

INT = ir.IntType(64)
_WORD = ir.IntType(32)
_AVX512_LANES = 16
#: LLVM's names for where a prefetched line goes: its temporal locality.
_READ_ONCE, _INTO_L2, _INTO_L1 = 0, 2, 3


def array_pointer(context: Any, builder: ir.IRBuilder, array_type: Any, array: ir.Value, at: ir.Value) -> ir.Value:
    """Returns the address of element `at` of the flat view of a C-contiguous array."""
    return builder.gep(make_array(array_type)(context, builder, array).data, [at])


def integer(value: int) -> ir.Constant:
    """Returns a 64-bit constant."""
    return ir.Constant(INT, value)


def offset(builder: ir.IRBuilder, pointer: ir.Value, elements: int | ir.Value) -> ir.Value:
    """Returns the address `elements` elements after `pointer`."""
    return builder.gep(pointer, [integer(elements) if isinstance(elements, int) else elements])


def resized(builder: ir.IRBuilder, vector: ir.Value, lanes: int) -> ir.Value:
    """Returns the first lanes of `vector`, padded with zeros."""
    have = vector.type.count
    if have == lanes:
        return vector
    return _shuffle(builder, vector, ir.Constant(vector.type, None), [min(i, have) for i in range(lanes)])


def _shuffle(builder: ir.IRBuilder, first: ir.Value, second: ir.Value, lanes: list[int]) -> ir.Value:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_WORD, len(lanes)), lanes))


def byte_pointer(builder: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
    """Returns the pointer cast to a byte pointer."""
    return builder.bitcast(pointer, ir.IntType(8).as_pointer())


def prefetch_line(builder: ir.IRBuilder, pointer: ir.Value, *, is_read_once: bool = False) -> None:
    """Prefetch the cache line of a byte into the L1 cache, on Intel's CPUs into the L2 cache.

    A core waits for more lines of the L2 cache at a time than of the L1 cache: on Sapphire Rapids and later a token of
    the default model takes 0.86 times as long. On AMD's CPUs a line that is read once takes no place in the last
    cache; on Intel's a token would take 1.4 times as long.
    """
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _WORD, _WORD, _WORD])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    locality = _INTO_L2 if is_intel() else _READ_ONCE if is_read_once and is_amd() else _INTO_L1
    read, level, data = (ir.Constant(_WORD, value) for value in (0, locality, 1))
    builder.call(function, [pointer, read, level, data])


def prefetch_lines(builder: ir.IRBuilder, pointer: ir.Value, count: ir.Value) -> None:
    """Prefetch all cache lines of `count` elements."""
    itemsize = pointer.type.pointee.width // 8 if isinstance(pointer.type.pointee, ir.IntType) else 4
    first = byte_pointer(builder, pointer)
    stop = builder.mul(count, integer(itemsize))
    with cgutils.for_range_slice(builder, integer(0), stop, integer(64)) as (line, _):
        prefetch_line(builder, builder.gep(first, [line]))


class Vectors:
    """Emits code for vectors of `lanes` float32. Methods return the emitted values."""

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self.builder, self.lanes = builder, lanes
        self.type = ir.VectorType(FLOAT, lanes)
        self.zero = ir.Constant(self.type, None)

    def constant(self, value: float) -> ir.Constant:
        """`value` in every lane."""
        return ir.Constant(self.type, [float(value)] * self.lanes)

    def load(self, pointer: ir.Value, lanes: int | None = None, storage: str = "float32", within: int = 0) -> ir.Value:
        """Load `lanes` numbers (None: all) from a group of `storage` at `pointer`; other lanes are zero."""
        decoded = STORAGE_TYPES[storage].decode(self.builder, pointer, within, lanes or self.lanes)
        return resized(self.builder, decoded, self.lanes)

    def store(self, vector: ir.Value, pointer: ir.Value, lanes: int | None = None) -> None:
        """Write the first `lanes` numbers (None: all) to a float32 pointer."""
        part = resized(self.builder, vector, lanes or self.lanes)
        self.builder.store(part, self.builder.bitcast(pointer, part.type.as_pointer()), align=4)

    def everywhere(self, number: ir.Value) -> ir.Value:
        """A number, or a word, in every lane."""
        blank = ir.Constant(ir.VectorType(number.type, self.lanes), ir.Undefined)
        first = self.builder.insert_element(blank, number, integer(0))
        return _shuffle(self.builder, first, blank, [0] * self.lanes)

    def broadcast(self, pointer: ir.Value) -> ir.Value:
        """The float32 at `pointer` in every lane."""
        return self.everywhere(self.builder.load(pointer))

    def call(self, name: str, *operands: ir.Value) -> ir.Value:
        """Call the LLVM intrinsic `name` (fmuladd, maxnum, ...) on vectors."""
        signature = ir.FunctionType(self.type, [self.type] * len(operands))
        function = cgutils.get_or_insert_function(self.builder.module, signature, f"llvm.{name}.v{self.lanes}f32")
        return self.builder.call(function, operands)

    def slots(self, vectors: list[ir.Value]) -> list[ir.Value]:
        """Stack slots initialised with `vectors`; LLVM keeps them in registers, as their addresses do not escape."""
        return [cgutils.alloca_once_value(self.builder, vector) for vector in vectors]

    def maximum(self, first: ir.Value, second: ir.Value) -> ir.Value:
        """The elementwise maximum; the second number unless the first is greater, also if one is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", first, second), first, second)

    def minimum(self, first: ir.Value, second: ir.Value) -> ir.Value:
        """The elementwise minimum; the second number unless the first is less, also if one is NaN."""
        return self.builder.select(self.builder.fcmp_ordered("<", first, second), first, second)

    def lane_sums(self, vectors: list[ir.Value]) -> ir.Value:
        """The horizontal sums of up to `lanes` vectors as one vector, in their order.

        Each level of a tree adds pairs of vectors and leaves half as many, filled twice as densely. The first two
        levels stay within 128-bit parts, where shuffles are cheapest; later levels move whole parts.
        """
        return self._across_lanes(vectors, self.builder.fadd)

    def lane_maxima(self, vectors: list[ir.Value]) -> ir.Value:
        """The horizontal maxima of up to `lanes` vectors as one vector, as `lane_sums`."""
        return self._across_lanes(vectors, self.maximum)

    def _across_lanes(self, vectors: list[ir.Value], join: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        level = vectors + [self.zero] * (self.lanes - len(vectors))
        width = 1
        while len(level) > 1:
            even, odd = _halves(self.lanes, width)
            level = [
                join(_shuffle(self.builder, a, b, even), _shuffle(self.builder, a, b, odd))
                for a, b in zip(level[::2], level[1::2], strict=True)
            ]
            width *= 2
        return level[0]

    def lane_everywhere(self, vector: ir.Value, lane: int) -> ir.Value:
        """The number of one lane in every lane."""
        return _shuffle(self.builder, vector, vector, [lane] * self.lanes)

    def shifted(self, vector: ir.Value, behind: ir.Value) -> ir.Value:
        """Each lane gets the number of the next lane; the last lane gets the first of `behind`."""
        return _shuffle(self.builder, vector, behind, list(range(1, self.lanes + 1)))

    def across(self, vector: ir.Value, distance: int) -> ir.Value:
        """The numbers permuted: lane i gets lane i ^ distance."""
        return _shuffle(self.builder, vector, vector, [lane ^ distance for lane in range(self.lanes)])

    def exp2(self, x: ir.Value, coarse: bool = False) -> ir.Value:
        """2 ** x for x <= 127, to a relative error below 3e-7, or 5e-6 if `coarse`.

        With 16 lanes it uses AVX-512 instructions and underflows gradually; otherwise the result is 0 below the normal
        range, as in `exponential.exp2`.
        """
        if self.lanes == _AVX512_LANES:
            # "reduce" returns x's fraction, rounded down (1). "scalef" multiplies by 2 ** floor(x).
            power = self._polynomial(
                self._avx512("reduce", x, ir.Constant(_WORD, 1)),
                COARSE_FRACTION_COEFFICIENTS if coarse else FRACTION_COEFFICIENTS,
            )
            return self._avx512("scalef", power, x)
        builder, words = self.builder, ir.VectorType(_WORD, self.lanes)
        x = self.maximum(self.constant(-127), x)
        # Adding 1.5 * 2 ** 23 rounds to an integer, which is then in the low bits of the sum.
        magic = self.constant(1.5 * 2**23)
        shifted = builder.fadd(x, magic)
        f = builder.fsub(x, builder.fsub(shifted, magic))
        power = self._polynomial(f, COARSE_COEFFICIENTS if coarse else COEFFICIENTS)
        biased = builder.add(builder.bitcast(shifted, words), ir.Constant(words, [127] * self.lanes))
        scale = builder.bitcast(builder.shl(biased, ir.Constant(words, [23] * self.lanes)), self.type)
        return builder.fmul(power, scale)

    def log2(self, x: ir.Value) -> ir.Value:
        """log2 x, as `exponential.log2`."""
        builder, words = self.builder, ir.VectorType(_WORD, self.lanes)
        bits = builder.bitcast(x, words)
        mantissa_bits = ir.Constant(words, [23] * self.lanes)
        above = builder.sub(bits, ir.Constant(words, [int(ROOT_HALF)] * self.lanes))
        whole = builder.ashr(above, mantissa_bits)
        f = builder.bitcast(builder.sub(bits, builder.shl(whole, mantissa_bits)), self.type)
        f = builder.fsub(f, self.constant(1))
        return self.call("fmuladd", f, self._polynomial(f, LOG_COEFFICIENTS), builder.sitofp(whole, self.type))

    def _polynomial(self, x: ir.Value, coefficients: np.ndarray) -> ir.Value:
        """The polynomial in x with these coefficients, beginning with that of x ** 0."""
        result = self.constant(coefficients[-1])
        for coefficient in coefficients[-2::-1]:
            result = self.call("fmuladd", result, x, self.constant(coefficient))
        return result

    def _avx512(self, name: str, *operands: ir.Value) -> ir.Value:
        """An AVX-512 instruction on all lanes, with the current rounding mode."""
        operands = *operands, operands[0], ir.Constant(ir.IntType(16), -1), ir.Constant(_WORD, 4)
        kind = ir.FunctionType(self.type, [each.type for each in operands])
        name = f"llvm.x86.avx512.mask.{name}.ps.512"
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), operands)


def _halves(lanes: int, width: int) -> tuple[list[int], list[int]]:
    """Returns masks that gather the even and odd lanes, or 128-bit parts, of two vectors for a level of `lane_sums`."""
    run, span = (1, 4) if width <= 2 else (4, lanes)
    even: list[int] = []
    odd: list[int] = []
    for start in range(0, lanes, span):
        for source in (start, lanes + start):
            for at in range(source, source + span, 2 * run):
                even += range(at, at + run)
                odd += range(at + run, at + 2 * run)
    return even, odd
