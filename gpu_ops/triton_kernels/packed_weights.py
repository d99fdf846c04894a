"""Quantized weights in CPU tiles (`cpu_ops.weight_formats`), multiplied or unpacked on a GPU.

A tile's 16 rows are interleaved: a vector of 64 bytes has one word per row, with four columns of that row, so
consecutive vectors' words are contiguous. A unit is such a vector: byte b of its words is column 4·unit + b of the
tile. `gpu_ops.packed_weights.unpacked_in_torch` defines the numbers; products are multiplied and accumulated in
float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from hetero_kv.cpu_ops.weight_formats import FORMATS, TILE

#: Units that a program of a product processes per step, and an unpacking program in total.
_UNITS = 64
#: Most rows of activations that share a program's unpacked weights; with that many, it processes half as many units.
_SHARED = 8
_COLUMNS = 4


@triton.jit
def _scales(
    block, group, lane, part, is_there,
    NAME: tl.constexpr, GROUPS: tl.constexpr, SCALES: tl.constexpr, SIGNED_SCALES: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
):  # fmt: skip
    """Scales and minimums (added) of units, from pointers to their block and their group: [.., units, lanes]."""
    minimum = 0.0
    if NAME == "MXFP4":
        exponent = tl.load(group + lane, mask=is_there, other=0).to(tl.int32)
        # 2^(exponent - 128); the two smallest are subnormal.
        subnormal = tl.where(exponent == 1, 1 << 22, 1 << 21)
        scale = tl.where(exponent < 2, subnormal, (exponent - 1) << 23).to(tl.float32, bitcast=True)
    elif NAME == "NVFP4":
        float8 = tl.load(group + 16 * part + lane, mask=is_there, other=0).to(tl.int16)
        # E4M3 as a float16, whose exponents are less by eight; the scale is half of it.
        bits = tl.where(float8 == 127, 0, (float8 & 127) << 7).to(tl.int16)
        scale = bits.to(tl.float16, bitcast=True).to(tl.float32) * 128.0
    else:
        first = (block if GROUPS > 1 else group).to(tl.pointer_type(tl.float16))
        scale = tl.load(first + lane, mask=is_there, other=0.0).to(tl.float32)
        if HAS_MINIMUM:
            minimum = tl.load(first + 16 + lane, mask=is_there, other=0.0).to(tl.float32)
        if GROUPS > 1 and SCALES > 0:
            own = tl.load(group + 16 * part + lane, mask=is_there, other=0)
            if SIGNED_SCALES:
                own = own.to(tl.int8, bitcast=True)
            scale *= own.to(tl.float32)
            if HAS_MINIMUM:
                minimum *= -tl.load(group + 16 * (SCALES + part) + lane, mask=is_there, other=0).to(tl.float32)
    return scale, minimum


@triton.jit
def _code(
    low, high, low_shift, high_shift,
    BYTE: tl.constexpr, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, HAS_TABLE: tl.constexpr,
    TABLE_BELOW: tl.constexpr, TABLE_ABOVE: tl.constexpr,
):  # fmt: skip
    """The codes of one byte of words, or their table values: int32."""
    code = (low >> (8 * BYTE + low_shift)) & ((1 << LOW_BITS) - 1)
    if LOW_BITS == 8:
        code = (low << (24 - 8 * BYTE)) >> 24  # signed
    if HIGH_BITS > 0:
        code |= ((high >> (8 * BYTE + high_shift)) & ((1 << HIGH_BITS) - 1)) << LOW_BITS
    if HAS_TABLE:
        # The table: sixteen signed bytes in two 64-bit numbers.
        eight = tl.where(code < 8, tl.full([], TABLE_BELOW, tl.int64), tl.full([], TABLE_ABOVE, tl.int64))
        code = ((eight << (56 - 8 * (code & 7)).to(tl.int64)) >> 56).to(tl.int32)
    return code


@triton.jit
def _number(group, vector, lane, is_there, BYTE: tl.constexpr, NAME: tl.constexpr):
    """A 16-bit weight, for one column of sixteen rows: float32."""
    at = (4 * vector + BYTE) * 16 + lane
    if NAME == "F16":
        number = tl.load(group.to(tl.pointer_type(tl.float16)) + at, mask=is_there, other=0.0).to(tl.float32)
    else:
        bits = tl.load(group.to(tl.pointer_type(tl.int16)) + at, mask=is_there, other=0).to(tl.int32)
        number = (bits << 16).to(tl.float32, bitcast=True)
    return number


@triton.jit
def _weights(
    tile, unit, lane, is_there,
    NAME: tl.constexpr, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, ZERO: tl.constexpr, GROUPS: tl.constexpr,
    SCALES: tl.constexpr, SIGNED_SCALES: tl.constexpr, HAS_MINIMUM: tl.constexpr, HAS_TABLE: tl.constexpr,
    TABLE_BELOW: tl.constexpr, TABLE_ABOVE: tl.constexpr, HEAD_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    GROUP_BYTES: tl.constexpr, RECORD_BYTES: tl.constexpr,
):  # fmt: skip
    """The four columns of units [.., units, 1] of a tile, for the rows `lane` [.., lanes]: each [.., units, lanes]."""
    vector, index = unit % 8, unit // 8
    block = tile + (index // GROUPS) * RECORD_BYTES
    group = block + HEAD_BYTES + (index % GROUPS) * GROUP_BYTES
    if NAME == "F16" or NAME == "BF16":
        a = _number(group, vector, lane, is_there, 0, NAME)
        b = _number(group, vector, lane, is_there, 1, NAME)
        c = _number(group, vector, lane, is_there, 2, NAME)
        d = _number(group, vector, lane, is_there, 3, NAME)
    else:
        scale, minimum = _scales(
            block, group, lane, vector * SCALES // 8, is_there, NAME, GROUPS, SCALES, SIGNED_SCALES, HAS_MINIMUM
        )
        words = (group + SCALE_BYTES).to(tl.pointer_type(tl.int32))
        # Vectors that share words use different bits of each byte.
        low = tl.load(words + 16 * (vector % LOW_BITS) + lane, mask=is_there, other=0)
        low_shift, high, high_shift = LOW_BITS * (vector // LOW_BITS), low, 0
        if HIGH_BITS > 0:
            high = tl.load(words + 16 * LOW_BITS + 16 * (vector % HIGH_BITS) + lane, mask=is_there, other=0)
            high_shift = HIGH_BITS * (vector // HIGH_BITS)
        a = _code(low, high, low_shift, high_shift, 0, LOW_BITS, HIGH_BITS, HAS_TABLE, TABLE_BELOW, TABLE_ABOVE)
        b = _code(low, high, low_shift, high_shift, 1, LOW_BITS, HIGH_BITS, HAS_TABLE, TABLE_BELOW, TABLE_ABOVE)
        c = _code(low, high, low_shift, high_shift, 2, LOW_BITS, HIGH_BITS, HAS_TABLE, TABLE_BELOW, TABLE_ABOVE)
        d = _code(low, high, low_shift, high_shift, 3, LOW_BITS, HIGH_BITS, HAS_TABLE, TABLE_BELOW, TABLE_ABOVE)
        a = (a - ZERO).to(tl.float32) * scale + minimum
        b = (b - ZERO).to(tl.float32) * scale + minimum
        c = (c - ZERO).to(tl.float32) * scale + minimum
        d = (d - ZERO).to(tl.float32) * scale + minimum
    return a, b, c, d


@triton.jit
def _multiply_packed(
    x, data, bias, chosen, out, count, x_row, out_row, rows, columns, tile_bytes, experts, expert_bytes,
    NAME: tl.constexpr, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, ZERO: tl.constexpr, GROUPS: tl.constexpr,
    SCALES: tl.constexpr, SIGNED_SCALES: tl.constexpr, HAS_MINIMUM: tl.constexpr, HAS_TABLE: tl.constexpr,
    TABLE_BELOW: tl.constexpr, TABLE_ABOVE: tl.constexpr, HEAD_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    GROUP_BYTES: tl.constexpr, RECORD_BYTES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_EXPERTS: tl.constexpr, SHARED: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    tile = data + tl.program_id(0).to(tl.int64) * tile_bytes
    input_row = tl.program_id(1) * SHARED + tl.arange(0, SHARED)
    is_input = input_row < count
    is_expert = True
    if HAS_EXPERTS:
        expert = tl.load(chosen + tl.program_id(1)).to(tl.int64)
        is_expert = (expert >= 0) & (expert < experts)
        tile += tl.where(is_expert, expert, 0) * expert_bytes
    lane = tl.arange(0, 16)
    x_rows = x + input_row.to(tl.int64)[:, None, None] * x_row
    total = tl.zeros([SHARED, UNITS, 16], tl.float32)
    for start in range(0, columns // 4, UNITS):
        unit = (start + tl.arange(0, UNITS))[None, :, None]
        is_unit = (unit < columns // 4) & is_expert
        a, b, c, d = _weights(
            tile, unit, lane[None, None, :], is_unit,
            NAME, LOW_BITS, HIGH_BITS, ZERO, GROUPS, SCALES, SIGNED_SCALES, HAS_MINIMUM,
            HAS_TABLE, TABLE_BELOW, TABLE_ABOVE, HEAD_BYTES, SCALE_BYTES, GROUP_BYTES, RECORD_BYTES,
        )  # fmt: skip
        numbers, is_number = x_rows + 4 * unit, is_input[:, None, None] & is_unit
        total += tl.load(numbers, mask=is_number, other=0.0).to(tl.float32) * a
        total += tl.load(numbers + 1, mask=is_number, other=0.0).to(tl.float32) * b
        total += tl.load(numbers + 2, mask=is_number, other=0.0).to(tl.float32) * c
        total += tl.load(numbers + 3, mask=is_number, other=0.0).to(tl.float32) * d
    row = tl.program_id(0) * 16 + lane
    product = tl.sum(total, axis=1)
    if HAS_BIAS:
        product += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
    results = out + input_row.to(tl.int64)[:, None] * out_row + row[None, :]
    is_result = is_input[:, None] & (row < rows)[None, :]
    tl.store(results, product.to(out.dtype.element_ty), mask=is_result)


@triton.jit
def _unpack_packed(
    data, out, first_tile, rows, columns, tile_bytes,
    NAME: tl.constexpr, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, ZERO: tl.constexpr, GROUPS: tl.constexpr,
    SCALES: tl.constexpr, SIGNED_SCALES: tl.constexpr, HAS_MINIMUM: tl.constexpr, HAS_TABLE: tl.constexpr,
    TABLE_BELOW: tl.constexpr, TABLE_ABOVE: tl.constexpr, HEAD_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    GROUP_BYTES: tl.constexpr, RECORD_BYTES: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    tile = data + (first_tile + tl.program_id(0)).to(tl.int64) * tile_bytes
    unit, lane = tl.program_id(1) * UNITS + tl.arange(0, UNITS), tl.arange(0, 16)
    is_unit = (unit < columns // 4)[:, None]
    a, b, c, d = _weights(
        tile, unit[:, None], lane[None, :], is_unit,
        NAME, LOW_BITS, HIGH_BITS, ZERO, GROUPS, SCALES, SIGNED_SCALES, HAS_MINIMUM,
        HAS_TABLE, TABLE_BELOW, TABLE_ABOVE, HEAD_BYTES, SCALE_BYTES, GROUP_BYTES, RECORD_BYTES,
    )  # fmt: skip
    weights = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [UNITS, 16, 4])
    row = tl.program_id(0) * 16 + lane[None, :, None]
    column = 4 * unit[:, None, None] + tl.arange(0, 4)[None, None, :]
    is_weight = (column < columns) & (row < rows)
    tl.store(out + row.to(tl.int64) * columns + column, weights.to(out.dtype.element_ty), mask=is_weight)


@triton.jit
def _rows_of_packed(
    data, ids, out, rows, columns, tile_bytes,
    NAME: tl.constexpr, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, ZERO: tl.constexpr, GROUPS: tl.constexpr,
    SCALES: tl.constexpr, SIGNED_SCALES: tl.constexpr, HAS_MINIMUM: tl.constexpr, HAS_TABLE: tl.constexpr,
    TABLE_BELOW: tl.constexpr, TABLE_ABOVE: tl.constexpr, HEAD_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    GROUP_BYTES: tl.constexpr, RECORD_BYTES: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + number)
    is_row = (row >= 0) & (row < rows)
    row = tl.where(is_row, row, 0)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    is_unit = (unit < columns // 4)[:, None]
    a, b, c, d = _weights(
        data + row // 16 * tile_bytes, unit[:, None], row % 16 + tl.arange(0, 1)[None, :], is_unit,
        NAME, LOW_BITS, HIGH_BITS, ZERO, GROUPS, SCALES, SIGNED_SCALES, HAS_MINIMUM,
        HAS_TABLE, TABLE_BELOW, TABLE_ABOVE, HEAD_BYTES, SCALE_BYTES, GROUP_BYTES, RECORD_BYTES,
    )  # fmt: skip
    weights = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [UNITS, 4])
    weights = tl.where(is_row, weights, float("nan"))
    column = 4 * unit[:, None] + tl.arange(0, 4)[None, :]
    tl.store(out + number * columns + column, weights.to(out.dtype.element_ty), mask=column < columns)


@cache
def _form(name: str) -> dict[str, Any]:
    """The compile-time constants of kernels for a format."""
    layout = FORMATS[name]
    table = bytes(value & 255 for value in layout.table or [0] * 16)
    below, above = (int.from_bytes(half, "little", signed=True) for half in (table[:8], table[8:]))
    return {
        "NAME": name, "LOW_BITS": layout.low_bits, "HIGH_BITS": layout.high_bits, "ZERO": layout.zero,
        "GROUPS": layout.groups, "SCALES": layout.scales, "SIGNED_SCALES": layout.signed_scales,
        "HAS_MINIMUM": layout.has_minimum, "HAS_TABLE": bool(layout.table), "TABLE_BELOW": below,
        "TABLE_ABOVE": above, "HEAD_BYTES": layout.head_bytes, "SCALE_BYTES": layout.scale_bytes,
        "GROUP_BYTES": layout.group_bytes, "RECORD_BYTES": layout.record_bytes,
    }  # fmt: skip


def _tile_bytes(name: str, columns: int) -> int:
    return FORMATS[name].packed_bytes(TILE, columns)


def multiply(x: torch.Tensor, data: torch.Tensor, name: str, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """As `gpu_ops.packed_weights.multiply`, into `out`; the last dimension of x and out is contiguous."""
    _multiply(x, data, name, bias, None, out, min(_SHARED, triton.next_power_of_2(len(x))))


def multiply_chosen(x: torch.Tensor, data: torch.Tensor, name: str, chosen: torch.Tensor, out: torch.Tensor) -> None:
    """As `gpu_ops.packed_weights.multiply_chosen`, into `out`."""
    _multiply(x, data, name, None, chosen, out, 1)


def _multiply(
    x: torch.Tensor, data: torch.Tensor, name: str, bias: torch.Tensor | None, chosen: torch.Tensor | None,
    out: torch.Tensor, shared: int,
) -> None:  # fmt: skip
    """shared: number of rows of x that a program multiplies with one tile."""
    (count, columns), rows = x.shape, out.shape[1]
    units = min(_UNITS // 2 if shared == _SHARED else _UNITS, triton.next_power_of_2(columns // _COLUMNS))
    experts, expert_bytes = (len(data), data.stride(0)) if chosen is not None else (1, 0)
    _multiply_packed[(triton.cdiv(rows, TILE), triton.cdiv(count, shared))](
        x, data, data if bias is None else bias, data if chosen is None else chosen, out, count, x.stride(0),
        out.stride(0), rows, columns, _tile_bytes(name, columns), experts, expert_bytes, **_form(name),
        HAS_BIAS=bias is not None, HAS_EXPERTS=chosen is not None, SHARED=shared, UNITS=units,
    )  # fmt: skip


def unpack(data: torch.Tensor, name: str, first_tile: int, out: torch.Tensor) -> None:
    """As `gpu_ops.packed_weights.unpack_into`."""
    rows, columns = out.shape
    units = min(_UNITS, triton.next_power_of_2(columns // _COLUMNS))
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns // _COLUMNS, units))
    # Fusing a product and a sum into one rounding would change the file's numbers.
    _unpack_packed[grid](
        data, out, first_tile, rows, columns, _tile_bytes(name, columns), **_form(name), UNITS=units,
        enable_fp_fusion=False,
    )  # fmt: skip


def rows_of(data: torch.Tensor, name: str, rows: int, ids: torch.Tensor, out: torch.Tensor) -> None:
    """As `gpu_ops.packed_weights.rows_of`, into `out`; `ids` and `out` are contiguous."""
    count, columns = out.shape
    units = min(4 * _UNITS, triton.next_power_of_2(columns // _COLUMNS))
    _rows_of_packed[(count, triton.cdiv(columns // _COLUMNS, units))](
        data, ids, out, rows, columns, _tile_bytes(name, columns), **_form(name), UNITS=units,
        enable_fp_fusion=False,
    )  # fmt: skip
