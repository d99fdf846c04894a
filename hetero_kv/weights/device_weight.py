"""A weight matrix that stays quantized in a GPU's memory."""

from __future__ import annotations

import weakref
from typing import ClassVar

import torch
from torch.nn import functional

from hetero_kv.cpu_ops.weight_formats import TILE
from hetero_kv.gpu_ops.packed_weights import has_kernels, multiply, rows_of, unpack_into
from hetero_kv.weights.packed_weight import FEW_ROWS, PackedWeight

_PIECE_BYTES = 64 << 20


class UnpackRoom:
    """A buffer on a GPU in which matrices are unpacked piece by piece; all matrices of that GPU share it.

    It contains the latest piece only, and is valid only for work on the computing stream.
    """

    _rooms: ClassVar[weakref.WeakValueDictionary[torch.device, UnpackRoom]] = weakref.WeakValueDictionary()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes: torch.Tensor | None = None

    @classmethod
    def on(cls, device: torch.device) -> UnpackRoom:
        """The GPU's buffer; it exists as long as a matrix references it."""
        room = cls._rooms.get(device)
        if room is None:
            room = cls._rooms[device] = cls(device)
        return room

    @property
    def nbytes(self) -> int:
        """The present size, bytes; it grows to that of the largest piece."""
        return 0 if self._bytes is None else self._bytes.numel()

    def of(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, columns], uninitialised, until the next call."""
        needed = rows * columns * dtype.itemsize
        if self._bytes is None or self._bytes.numel() < needed:
            self._bytes = None
            self._bytes = torch.empty(needed, dtype=torch.uint8, device=self._device)
        return self._bytes[:needed].view(dtype).view(rows, columns)


def rows_of_piece(rows: int, columns: int, element: int) -> int:
    """Rows of a matrix that are unpacked at a time; `element`: bytes per number."""
    return min(rows, max(_PIECE_BYTES // (columns * element) // TILE, 1) * TILE)


def room_bytes(rows: int, columns: int, element: int) -> int:
    """Bytes of the unpack buffer that a matrix needs."""
    return rows_of_piece(rows, columns, element) * columns * element


class DeviceWeight(PackedWeight):
    """A packed matrix in a GPU's memory, in the same tiles as on the CPU.

    For few rows of activations the kernel decodes the weights as it reads them, and multiplies in float32 without
    rounding. For longer prompts the weights are unpacked piece by piece, and multiplied in the model's dtype.
    """

    def __init__(self, data: torch.Tensor, name: str, rows: int, columns: int) -> None:
        super().__init__(data, name, rows, columns)
        self._room = UnpackRoom.on(data.device)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See PackedWeight. With Triton, few rows take one kernel launch."""
        rows, columns = self.shape
        if 0 < len(x) <= FEW_ROWS and has_kernels(x, self.name):
            return multiply(x, self.data, self.name, rows, bias)
        piece = rows_of_piece(rows, columns, x.element_size())
        if piece == rows:
            return functional.linear(x, self._piece(0, rows, x.dtype), bias)
        out = torch.empty(len(x), rows, dtype=x.dtype, device=x.device)
        for start in range(0, rows, piece):
            end = min(start + piece, rows)
            torch.matmul(x, self._piece(start, end, x.dtype).T, out=out[:, start:end])
        return out if bias is None else out.add_(bias)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See PackedWeight. The host does not read the ids on the GPU; the row of an invalid id is NaN."""
        rows, columns = self.shape
        return rows_of(self.data, self.name, rows, columns, ids, dtype)

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """See PackedWeight."""
        out = torch.empty(self.shape, dtype=dtype, device=self.data.device)
        unpack_into(out, self.data, self.name)
        return out

    def compile_kernels(self, dtype: torch.dtype) -> None:
        """See PackedWeight."""
        rows, columns = self.shape
        self.multiply(torch.zeros(1, columns, dtype=dtype, device=self.data.device))
        self._piece(0, min(rows, TILE), dtype)
        self.rows(torch.zeros(1, dtype=torch.int64, device=self.data.device), dtype)

    def _piece(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """Unpacked rows [start, end), in a buffer that the next piece overwrites; `start` begins a tile."""
        room = self._room.of(end - start, self.shape[1], dtype)
        unpack_into(room, self.data, self.name, start // TILE)
        return room
