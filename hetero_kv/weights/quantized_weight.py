"""A weight matrix that stays quantized in DRAM, multiplied and unpacked by the CPU's kernels."""

from __future__ import annotations

import sys
import threading
import warnings
from functools import cache, cached_property

import numpy as np
import torch

from hetero_kv.cpu_ops.amx_tiles import multiplies_by_tiles
from hetero_kv.cpu_ops.avx2_dots import largest_code, sums_in_short
from hetero_kv.cpu_ops.cpu_features import isa
from hetero_kv.cpu_ops.prompt_products import multiply_prompt
from hetero_kv.cpu_ops.prompt_products_tiles import multiply_prompt_by_tiles
from hetero_kv.cpu_ops.quantized_linear import PackedMatrix, multiply
from hetero_kv.cpu_ops.threads import at_most
from hetero_kv.cpu_ops.weight_dots import dot_instruction
from hetero_kv.cpu_ops.weight_formats import FORMATS, TILE
from hetero_kv.cpu_ops.weight_unpack import read_rows, unpack_tiles
from hetero_kv.errors import HeteroKVError
from hetero_kv.malloc_tuning import give_back_freed_memory
from hetero_kv.weights.kernel_arrays import ARRAY_DTYPES, bits
from hetero_kv.weights.packed_weight import FEW_ROWS, PackedWeight

_PIECE_BYTES = 8 << 20
"""Bytes of weights that are unpacked at a time: few enough to stay in a shared CPU cache until they are multiplied."""
_STEP_ROWS = 4096
_SHORT_NUMBERS = frozenset({"F16", "BF16"})
_WIDE_NUMBERS = frozenset({"F32", "F64", "I8", "I16", "I32", "I64"})
# Rows up to which codes are multiplied. Without dot products of bytes, unpacking weights once costs less for more
# (`benchmarks.few_rows`). AMX tiles cost less from some 16 rows on, but decoded tokens are to be the same for any rows.
_ROWS_BY_CODES, _ROWS_BESIDE_TILES = 96, 48
# Rows up to which logits stay float32.
_FLOAT32_LOGITS = 96
_VIEWS = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: np.uint16}


def kernel_threads_of_torch() -> int:
    """The number of kernel threads: as many as torch uses."""
    return at_most(torch.get_num_threads())


def most_rows_of_codes(name: str, dtype: torch.dtype) -> int:
    """The most rows of activations of `dtype` that a CPU multiplies with codes of format `name` instead of numbers.

    With int8 dot products of AVX-512 or AVX-VNNI that is any number, unless AMX multiplies bfloat16: codes take a
    quarter of float32's instructions, half of bfloat16's, and nothing is unpacked. With AVX2's it is any number of
    bfloat16, whose own products take eighty times as long there, and where sums of codes are seldom widened (1,024
    rows: 0.65 of the time for Q4_K, 0.9 for Q6_K, but 1.16 for Q8_0, Zen 3). It is `FEW_ROWS` for 16-bit numbers, and
    for instruction sets without a measurement.
    """
    layout = FORMATS[name]
    if layout.number or isa() not in ("avx2", "avx512"):
        return FEW_ROWS
    if dtype is torch.bfloat16 and multiplies_by_tiles():
        return _ROWS_BESIDE_TILES
    how = dot_instruction()
    if how == "avx2":
        is_fast = dtype is torch.bfloat16 or (not layout.codebook and sums_in_short(largest_code(layout)) > 1)
    else:
        is_fast = how in ("vnni512", "vnni256")
    return sys.maxsize if is_fast else _ROWS_BY_CODES


class _Scratch(threading.local):
    """A buffer for unpacked pieces, one per thread, reused by all matrices."""

    room: torch.Tensor | None = None

    def of(self, columns: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
        needed = columns * rows * dtype.itemsize
        if self.room is None or self.room.numel() < needed:
            self.room = torch.empty(needed, dtype=torch.uint8)
        return self.room[:needed].view(dtype).view(columns, rows)


_SCRATCH = _Scratch()


def packable(name: str, columns: int) -> bool:
    """Whether there are kernels for GGML's format `name`, and rows of `columns` weights consist of whole blocks."""
    return name in FORMATS and columns % FORMATS[name].columns == 0


def stored_name(name: str, columns: int) -> str | None:
    """The packed type of weights of GGML's type `name` in rows of `columns`; None if they are loaded as plain tensors.

    16-bit numbers stay packed if there are kernels for such rows; wider numbers and integers never do.
    """
    if name in _WIDE_NUMBERS or (name in _SHORT_NUMBERS and not packable(name, columns)):
        return None
    return name


def bytes_tensor(data: np.ndarray) -> torch.Tensor:
    """A tensor of the same memory, [bytes] uint8; nothing may be written to it if the array is read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(data)


class QuantizedWeight(PackedWeight):
    """A packed matrix in DRAM. Few rows of activations are quantized to int8, unless the weights are 16-bit numbers."""

    def __init__(self, matrix: PackedMatrix) -> None:
        super().__init__(torch.from_numpy(matrix.data), matrix.name, matrix.rows, matrix.columns)
        self.matrix = matrix

    @classmethod
    def of_bytes(cls, data: torch.Tensor, name: str, rows: int, columns: int) -> QuantizedWeight:
        """A matrix with the packed bytes `data`, uint8."""
        weight = cls(PackedMatrix(data.numpy(), name, rows, columns))
        weight.data = data
        return weight

    @classmethod
    def of_blocks(cls, blocks: np.ndarray, name: str, columns: int) -> QuantizedWeight:
        """Pack GGML's blocks [rows, bytes of a row] uint8 of format `name`."""
        return cls(PackedMatrix.of_blocks(blocks, name, columns, kernel_threads_of_torch()))

    @classmethod
    def of_numbers(cls, weight: torch.Tensor, name: str) -> QuantizedWeight:
        """Quantize weight [rows, columns] to GGML's format `name`, some rows at a time.

        Raises HeteroKVError for numbers that are not finite.
        """
        # Imported here, since only this function needs the package.
        import gguf

        rows, columns = weight.shape
        blocks = []
        for start in range(0, rows, _STEP_ROWS):
            numbers = weight[start : start + _STEP_ROWS].detach().to("cpu", torch.float32).numpy()
            if not np.isfinite(numbers).all():
                raise HeteroKVError(f"a weight of {list(weight.shape)} has values that are not finite; check its file")
            blocks.append(gguf.quantize(numbers, gguf.GGMLQuantizationType[name]))
        packed = cls.of_blocks(np.concatenate(blocks), name, columns)
        blocks.clear()
        give_back_freed_memory()
        return packed

    @cached_property
    def kernels(self) -> tuple[int, int, int, int, int]:
        """The arguments for a fused kernel; see `PackedMatrix.call`."""
        return self.matrix.call

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See PackedWeight."""
        if not self._is_prompt_of_codes(x):
            return self._products(x, bias).to(x.dtype)
        y = torch.empty((len(x), self.shape[0]), dtype=x.dtype)
        added = None if bias is None else bias.detach().float().numpy()
        multiply_prompt(bits(x.detach().contiguous()), self.matrix, bits(y), added, kernel_threads_of_torch())
        return y

    def logits(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """As `multiply`, but few rows' products with codes stay float32.

        Rounding them to bfloat16 makes ties of other logits. For all tokens of a prompt they would take twice the room.
        """
        return self.multiply(x, bias) if len(x) > _FLOAT32_LOGITS else self._products(x, bias)

    def _products(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x @ weight.T + bias, float32 where codes are multiplied."""
        if len(x) > FEW_ROWS and len(x) > most_rows_of_codes(self.name, x.dtype):
            y = self._multiply_unpacked(x)
        else:
            out = multiply(x.detach().float().contiguous().numpy(), (self.matrix,), kernel_threads_of_torch())[0]
            y = torch.from_numpy(out)
        return y if bias is None else y + bias

    def _is_prompt_of_codes(self, x: torch.Tensor) -> bool:
        most = most_rows_of_codes(self.name, x.dtype)
        return self.has_codes and FEW_ROWS < len(x) <= most and x.dtype in ARRAY_DTYPES

    def _multiply_unpacked(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = self.shape
        out = torch.empty((len(x), rows), dtype=x.dtype)
        if x.dtype is torch.bfloat16 and multiplies_by_tiles():
            numbers = bits(x.detach().contiguous())
            multiply_prompt_by_tiles(numbers, self.matrix, bits(out), threads=kernel_threads_of_torch())
            return out
        piece = max(_PIECE_BYTES // (columns * x.dtype.itemsize) // TILE, 1)
        for tile in range(0, self.matrix.tiles, piece):
            part = self._unpacked(tile, min(piece, self.matrix.tiles - tile), x.dtype)
            start = tile * TILE
            end = min(start + part.shape[1], rows)
            torch.matmul(x, part[:, : end - start], out=out[:, start:end])
        return out

    def _unpacked(self, first_tile: int, tiles: int, dtype: torch.dtype) -> torch.Tensor:
        """Unpacked rows of `tiles` tiles, transposed: [columns, rows], in a buffer that the next call overwrites."""
        room = _SCRATCH.of(self.matrix.columns, tiles * TILE, dtype)
        bits = room.view(torch.uint16) if dtype is torch.bfloat16 else room
        unpack_tiles(self.matrix, bits.numpy().view(_VIEWS[dtype]), first_tile, kernel_threads_of_torch())
        return room

    def compile_kernels(self, dtype: torch.dtype) -> None:
        """See PackedWeight. Nothing of this matrix is read, which may be mapped."""
        _compile_kernels(self.name, dtype, isa())

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See PackedWeight."""
        found = read_rows(self.matrix, ids.to("cpu", torch.int64).numpy(), kernel_threads_of_torch())
        return torch.from_numpy(found).to(dtype)

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """See PackedWeight."""
        out = torch.empty(self.shape, dtype=dtype)
        piece = max(_PIECE_BYTES // (self.matrix.columns * dtype.itemsize) // TILE, 1)
        for tile in range(0, self.matrix.tiles, piece):
            part = self._unpacked(tile, min(piece, self.matrix.tiles - tile), dtype).T
            rows = out[tile * TILE : tile * TILE + len(part)]
            rows.copy_(part[: len(rows)])
        return out


@cache
def _compile_kernels(name: str, dtype: torch.dtype, instruction_set: str) -> None:
    """Compile a format's kernels for the instruction set in use, by a matrix of one tile: they fit every shape."""
    columns = FORMATS[name].columns
    data = np.zeros(FORMATS[name].packed_bytes(TILE, columns), np.uint8)
    tile = QuantizedWeight(PackedMatrix(data, name, TILE, columns))
    for rows in (1, FEW_ROWS + 1):
        tile.multiply(torch.zeros(rows, columns, dtype=dtype))
    tile._multiply_unpacked(torch.zeros(1, columns, dtype=dtype))
    tile.unpacked(dtype)
    tile.rows(torch.zeros(1, dtype=torch.int64), dtype)
