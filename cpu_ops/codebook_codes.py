"""Emits LLVM vector code that reads numbers and scales of a group of columns whose codes are entries of a grid."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from hetero_kv.cpu_ops.codebooks import NEGATIVE, Bits, grid_words
from hetero_kv.cpu_ops.weight_codes import load, looked_up
from hetero_kv.cpu_ops.weight_formats import TILE, WeightFormat

_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))
_INTS, _CODES = ir.VectorType(_I32, TILE), ir.VectorType(_I8, 4 * TILE)
_EVERY_BYTE = 0x01010101


def _every(value: int) -> ir.Constant:
    return ir.Constant(_INTS, [value] * TILE)


class CodebookGroup:
    """The group of sixteen rows at `group` of a format with a codebook; each part is read when it is first needed."""

    def __init__(self, builder: ir.IRBuilder, layout: WeightFormat, group: ir.Value, how: str, offset: int = 0) -> None:
        assert layout.codebook is not None
        self._builder, self._layout, self._group = builder, layout, group
        self._how, self._offset = how, offset
        self._codebook = layout.codebook
        self._planes: dict[int, ir.Value] = {}
        self._entries: dict[int, ir.Value] = {}
        self._signs: ir.Value | None = None

    def vector(self, vector: int) -> ir.Value:
        """Returns the numbers of four columns: vector `vector` of eight."""
        builder, codebook = self._builder, self._codebook
        if codebook.width == 4:
            codes = self._entry(vector)
        else:
            entry = self._entry(vector // 2)
            codes = builder.and_(builder.lshr(entry, _every(4)) if vector % 2 else entry, _every(15 * _EVERY_BYTE))
        codes = builder.bitcast(codes, _CODES)
        if codebook.signs.count > 1:
            codes = builder.or_(codes, self._negative(vector))
        return looked_up(builder, codes, [value + self._offset & 255 for value in self._layout.table], self._how)

    def scales(self, first: ir.Value) -> list[ir.Value]:
        """Returns each part's scale, from the block's `first`: vectors of sixteen rows."""
        builder, scales = self._builder, []
        for part in range(self._layout.scales):
            odd = builder.or_(builder.shl(self._field(self._codebook.scale, part), _every(1)), _every(1))
            scales.append(builder.fmul(first, builder.sitofp(odd, first.type)))
        return scales

    def _plane(self, number: int) -> ir.Value:
        """Returns the words of the sixteen rows in a plane, as 32 bits."""
        if number not in self._planes:
            size = self._codebook.planes[number][0]
            words = load(self._builder, self._group, ir.VectorType(ir.IntType(8 * size), TILE), self._at(number))
            self._planes[number] = words if size == 4 else self._builder.zext(words, _INTS)
        return self._planes[number]

    def _at(self, plane: int) -> int:
        return TILE * sum(size for size, _, _ in self._codebook.planes[:plane])

    def _field(self, field: Bits, index: int) -> ir.Value:
        plane, bit = self._codebook.place(field, index)
        words = self._plane(plane)
        moved = self._builder.lshr(words, _every(bit)) if bit else words
        return self._builder.and_(moved, _every(2**field.count - 1))

    def _entry(self, number: int) -> ir.Value:
        """Returns the rows' entries of the grid, with their signs where a sign is for all columns."""
        if number not in self._entries:
            entry = self._from_grid(number)
            if self._codebook.signs.count == 1:
                is_negative = self._builder.neg(self._field(self._codebook.signs, number))
                entry = self._builder.or_(entry, self._builder.and_(is_negative, _every(17 * NEGATIVE * _EVERY_BYTE)))
            self._entries[number] = entry
        return self._entries[number]

    def _from_grid(self, number: int) -> ir.Value:
        builder = self._builder
        words = grid_words(self._codebook.grid)
        kind = ir.ArrayType(_I32, len(words))
        table = cgutils.global_constant(
            builder, f"grid of {self._codebook.grid}", ir.Constant(kind, [int(word) for word in words])
        )
        entries: ir.Value = ir.Constant(_INTS, ir.Undefined)
        for lane, index in enumerate(self._indices(number)):
            place = builder.gep(table, [ir.Constant(_I64, 0), builder.zext(index, _I64)])
            entries = builder.insert_element(entries, builder.load(place), ir.Constant(_I32, lane))
        return entries

    def _indices(self, number: int) -> list[ir.Value]:
        """Returns the sixteen rows' indices into the grid, as scalars."""
        builder, low = self._builder, self._codebook.low
        plane, bit = self._codebook.place(low, number)
        if self._codebook.high is None and (bit % 8, low.count) == (0, 8):
            size, start = self._codebook.planes[plane][0], self._at(plane) + bit // 8
            return [load(builder, self._group, _I8, start + size * lane) for lane in range(TILE)]
        index = self._field(low, number)
        if self._codebook.high is not None:
            index = builder.or_(index, builder.shl(self._field(self._codebook.high, number), _every(low.count)))
        # Through memory, and by atomic loads, which LLVM does not turn into extractions of lanes: these are slower.
        room = cgutils.alloca_once(builder, _INTS)
        builder.store(index, room)
        lanes = builder.bitcast(room, _I32.as_pointer())
        places = [builder.gep(lanes, [ir.Constant(_I32, lane)]) for lane in range(TILE)]
        return [builder.load_atomic(place, "monotonic", 4) for place in places]

    def _sign_bytes(self) -> ir.Value:
        """Returns four bytes of each row: the signs of eight columns each."""
        if self._signs is None:
            builder, field = self._builder, self._codebook.signs
            signs: Any = _every(0)
            for index in range(4):
                signs = builder.or_(signs, builder.shl(self._field(field, index), _every(8 * index)))
            if field.count == 7:
                # The eighth makes their number even.
                parity = signs
                for bits in (4, 2, 1):
                    parity = builder.xor(parity, builder.lshr(parity, _every(bits)))
                signs = builder.or_(signs, builder.shl(builder.and_(parity, _every(_EVERY_BYTE)), _every(7)))
            self._signs = signs
        return self._signs

    def _negative(self, vector: int) -> ir.Value:
        """Returns `NEGATIVE` for each negative column of vector `vector`, else 0."""
        builder = self._builder
        mask = ir.Constant(ir.VectorType(_I32, _CODES.count), [4 * (i // 4) + vector // 2 for i in range(_CODES.count)])
        signs = builder.bitcast(self._sign_bytes(), _CODES)
        own = builder.shuffle_vector(signs, ir.Constant(_CODES, ir.Undefined), mask)
        bits = ir.Constant(_CODES, [1 << 4 * (vector % 2) + i % 4 for i in range(_CODES.count)])
        is_negative = builder.icmp_unsigned("==", builder.and_(own, bits), bits)
        return builder.and_(builder.sext(is_negative, _CODES), ir.Constant(_CODES, [NEGATIVE] * _CODES.count))
