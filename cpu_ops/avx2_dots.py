"""Dot products of a group of codes with int8 activations, for CPUs whose widest int8 product is AVX2's.

AVX2 multiplies unsigned bytes by signed ones and adds neighbouring products in 16 bits. As many of these sums are added
in 16 bits as fit there, so that widening to 32 bits, a second multiplication, is rare. The result is exact.
"""

from collections.abc import Callable, Sequence

from llvmlite import ir

from hetero_kv.cpu_ops.weight_codes import call_intrinsic, joined, load, pieces_of, splat
from hetero_kv.cpu_ops.weight_formats import WeightFormat

_I32 = ir.IntType(32)
_BYTES, _SHORTS, _INTS = (ir.VectorType(ir.IntType(bits), 256 // bits) for bits in (8, 16, 32))
_LARGEST_ACTIVATION = 127


def offset_of(layout: WeightFormat) -> int:
    """Returns what is added to the numbers of a table so that none is negative; 0 if their signs must move instead.

    Moving the sign of a number takes an instruction for each row of activations. Two products of a number of more than
    seven bits would not fit into 16 bits.
    """
    lowest = min(layout.table, default=0)
    return -lowest if max(layout.table, default=0) - lowest < 128 else 0


def largest_code(layout: WeightFormat) -> int:
    """Returns the largest magnitude of a format's codes, or of the numbers of its table with `offset_of` added."""
    if layout.low_bits == 8:
        return 128
    numbers = [abs(number + offset_of(layout)) for number in layout.table]
    return max(numbers, default=2 ** (layout.low_bits + layout.high_bits) - 1)


def sums_in_short(largest: int) -> int:
    """Returns how many sums of two products of an activation and a code, at most `largest`, are added in 16 bits."""
    return (2**15 - 1) // (2 * largest * _LARGEST_ACTIVATION)


def group_dots(
    builder: ir.IRBuilder,
    largest: int,
    moves_signs: bool,
    codes_of: Callable[[int], ir.Value],
    vectors: Sequence[int],
    activations: Sequence[ir.Value],
) -> list[ir.Value]:
    """Emit the dot products of code vectors `vectors` of a group with each row of activations.

    largest: the largest magnitude of a code, at most 128. moves_signs: whether codes are signed, so that their signs
    move to the activations. codes_of: emits a vector of codes. activations: for each row, the address of the group's 32
    activations.

    Returns, for each row of activations, sixteen int32: one for each row of weights.
    """
    together = sums_in_short(largest)
    dots = [[ir.Constant(_INTS, None)] * 2 for _ in activations]
    sums: list[ir.Value] = []
    for index, vector in enumerate(vectors):
        halves = pieces_of(builder, codes_of(vector), 2)
        products = []
        for row in activations:
            x = builder.bitcast(splat(builder, load(builder, row, _I32, 4 * vector), 8), _BYTES)
            products += [_products(builder, codes, x, moves_signs) for codes in halves]
        is_first = index % together == 0
        sums = products if is_first else [builder.add(*each) for each in zip(sums, products, strict=True)]
        sums = _computed_here(builder, sums)
        if index % together == together - 1 or index == len(vectors) - 1:
            for number, each in enumerate(sums):
                row_dots = dots[number // 2]
                row_dots[number % 2] = builder.add(row_dots[number % 2], _widened(builder, each))
    return [joined(builder, each) for each in dots]


def _products(builder: ir.IRBuilder, codes: ir.Value, x: ir.Value, signed: bool) -> ir.Value:
    """Returns the sums of two products, in 16 bits; the sign of signed codes moves to the activations."""
    if signed:
        x = call_intrinsic(builder, "llvm.x86.avx2.psign.b", _BYTES, x, codes)
        zero = ir.Constant(_BYTES, None)
        codes = builder.select(builder.icmp_signed("<", codes, zero), builder.sub(zero, codes), codes)
    return call_intrinsic(builder, "llvm.x86.avx2.pmadd.ub.sw", _SHORTS, codes, x)


def _widened(builder: ir.IRBuilder, sums: ir.Value) -> ir.Value:
    """Returns the sums of neighbours, in 32 bits."""
    ones = ir.Constant(_SHORTS, [1] * _SHORTS.count)
    return call_intrinsic(builder, "llvm.x86.avx2.pmadd.wd", _INTS, sums, ones)


def _computed_here(builder: ir.IRBuilder, values: list[ir.Value]) -> list[ir.Value]:
    """Returns the values; empty inline assembly makes LLVM compute them before any that follow from them.

    Otherwise LLVM unpacks all codes of a group first, and spills them: half as many products per second.
    """
    kinds = [each.type for each in values]
    function = ir.FunctionType(ir.LiteralStructType(kinds), kinds)
    places = ",".join(["=x"] * len(values) + [str(number) for number in range(len(values))] + ["~{memory}"])
    results = builder.call(ir.InlineAsm(function, "", places, side_effect=True), values)
    return [builder.extract_value(results, number) for number in range(len(values))]
