"""safetensors files with a checksum per block, written atomically and checked as they are read."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hetero_kv.contexts import tensor_header
from hetero_kv.contexts.tensor_header import PREFIX, HeaderEntry
from hetero_kv.durable_file import write_pieces_atomically
from hetero_kv.engine.errors import DamagedContextError
from hetero_kv.engine.mapped_file import MappedFile
from hetero_kv.store.memory import map_file, whole_pages

#: Tensors begin at a multiple of this.
ALIGNMENT = 64
#: The last tensors of a file: CRC-32 of the others, row by row; and SHA-256 of the header and of these checksums.
CHECKSUMS, SEAL = "checksums", "seal"
#: The name prefix of tensors that are padding.
PADDING = "padding."
# Smaller tensors are read instead of mapped: mapping them gains nothing.
LEAST_MAPPED = 1 << 16
_SEAL_BYTES = 32
_AT_ONCE = 1 << 23


@dataclass(frozen=True)
class TensorPiece:
    """A tensor to be written.

    Attributes:
        rows: yields its parts along the first dimension in order, contiguous and on the CPU; together they have `shape`
            and `dtype`.
        by_row: whether there is a checksum per row, or one for all.
        page_offset: the offset within a memory page at which it begins; None for any.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Callable[[], Iterable[torch.Tensor]]
    by_row: bool = False
    page_offset: int | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorPiece:
        """A piece for a tensor on any device, with one checksum."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: [tensor.detach().to("cpu").contiguous()])

    @property
    def nbytes(self) -> int:
        """Its size, bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def checksums(self) -> int:
        """The number of its checksums."""
        return self.shape[0] if self.by_row else 1


def write_tensors(
    path: Path, pieces: Mapping[str, TensorPiece], metadata: Mapping[str, str], *, survives: bool = True
) -> None:
    """Write a file atomically.

    survives: whether it survives a power cut once it is written.

    Raises:
        OSError: it cannot be written; an earlier file is unchanged.
        ValueError: the header exceeds the limit of safetensors.
    """
    write_pieces_atomically(path, encoded_tensors(pieces, metadata), survives=survives)


def encoded_tensors(pieces: Mapping[str, TensorPiece], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """The bytes of a file, in pieces. Raises ValueError as `write_tensors`."""
    entries = _entries(pieces)
    head = tensor_header.encoded(entries, metadata, mmap.PAGESIZE)
    yield head
    sums: list[int] = []
    for name, entry in entries.items():
        if name.startswith(PADDING):
            yield bytes(entry.stop - entry.start)
        elif name in pieces:
            yield from _summed(pieces[name], sums)
    checksums = torch.tensor(sums, dtype=torch.int64).numpy().tobytes()
    yield checksums
    yield hashlib.sha256(head + checksums).digest()


def _summed(piece: TensorPiece, sums: list[int]) -> Iterator[memoryview]:
    """Yields the bytes of a piece, and appends their checksums to `sums`."""
    whole, written = 0, 0
    for part in piece.rows():
        content = bytes_of(part)
        written += len(content)
        if piece.by_row:
            size = piece.nbytes // piece.shape[0]
            sums += [zlib.crc32(content[start : start + size]) for start in range(0, len(content), size)]
        else:
            whole = zlib.crc32(content, whole)
        yield content
    assert written == piece.nbytes
    if not piece.by_row:
        sums.append(whole)


def _entries(pieces: Mapping[str, TensorPiece]) -> dict[str, HeaderEntry]:
    """The layout of the file, padding included."""
    entries: dict[str, HeaderEntry] = {}
    end = 0
    for name, piece in pieces.items():
        offset, multiple = (0, ALIGNMENT) if piece.page_offset is None else (piece.page_offset, mmap.PAGESIZE)
        gap = (offset - end) % multiple
        if gap:
            entries[f"{PADDING}{len(entries)}"] = HeaderEntry(torch.uint8, (gap,), end, end + gap)
        entries[name] = HeaderEntry(piece.dtype, piece.shape, end + gap, end + gap + piece.nbytes)
        end += gap + piece.nbytes
    gap = -end % ALIGNMENT
    if gap:
        entries[f"{PADDING}{len(entries)}"] = HeaderEntry(torch.uint8, (gap,), end, end + gap)
    end += gap
    count = sum(piece.checksums for piece in pieces.values())
    entries[CHECKSUMS] = HeaderEntry(torch.int64, (count,), end, end + 8 * count)
    entries[SEAL] = HeaderEntry(torch.uint8, (_SEAL_BYTES,), end + 8 * count, end + 8 * count + _SEAL_BYTES)
    return entries


class TensorFile:
    """An open file of `write_tensors`. Its header and checksum table are verified; its tensors are checked when read.

    Attributes:
        entries: name -> entry, in the order of the file, without padding.
        metadata: key -> text.
        descriptor: the descriptor of the open file.
    """

    def __init__(self, path: Path) -> None:
        """Open a file. Raises DamagedContextError if it is invalid, and OSError if it cannot be opened."""
        self.path = path
        self.where = str(path)
        # O_NONBLOCK, because opening a pipe would wait for a writer.
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> None:
        self._status = status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedContextError(f"{self.where} is not a regular file")
        prefix = os.pread(self.descriptor, PREFIX, 0)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < PREFIX or length > min(tensor_header.LONGEST, status.st_size - PREFIX):
            raise DamagedContextError(f"{self.where} is not a safetensors file, or cut off")
        head = prefix + self._bytes(PREFIX, length)
        self.data_start = PREFIX + length
        size = status.st_size - self.data_start
        entries, self.metadata = tensor_header.decoded(head[PREFIX:], size, self.where)
        self.entries = {name: entry for name, entry in entries.items() if not name.startswith(PADDING)}
        checksums, seal = self.entries.pop(CHECKSUMS, None), self.entries.pop(SEAL, None)
        if checksums is None or seal is None or checksums.dtype != torch.int64 or len(checksums.shape) != 1:
            raise DamagedContextError(f"{self.where} has no checksums; it is not a saved context")
        written = self._bytes(self.data_start + checksums.start, checksums.stop - checksums.start)
        if hashlib.sha256(head + written).digest() != self._bytes(self.data_start + seal.start, _SEAL_BYTES):
            raise DamagedContextError(f"{self.where}: its header or its checksums are damaged")
        self._checksums = torch.frombuffer(bytearray(written), dtype=torch.int64).tolist() if written else []

    def assign_checksums(self, by_row: Callable[[str], bool]) -> None:
        """Assign the checksums to tensors: one per row where `by_row(name)` is true, else one per tensor.

        Raises DamagedContextError if their number does not match.
        """
        self._sums: dict[str, Sequence[int]] = {}
        start = 0
        for name, entry in self.entries.items():
            count = entry.shape[0] if by_row(name) and entry.shape else 1
            self._sums[name] = self._checksums[start : start + count]
            start += count
        if start != len(self._checksums):
            raise DamagedContextError(f"{self.where} has {len(self._checksums)} checksums instead of {start}")

    def close(self) -> None:
        """Close the file; its mappings stay."""
        with contextlib.suppress(OSError):
            os.close(self.descriptor)

    def offset(self, name: str, row: int = 0) -> int:
        """The offset in the file of a tensor, or of a row of it, bytes."""
        entry = self.entries[name]
        return self.data_start + entry.start + row * entry.row_bytes

    def tensor(self, name: str) -> torch.Tensor:
        """A copy of a tensor. Raises DamagedContextError if its checksum differs."""
        entry = self.entries[name]
        content = bytearray(self._bytes(self.data_start + entry.start, entry.stop - entry.start))
        if [zlib.crc32(content)] != self._sums[name]:
            raise DamagedContextError(f"{self.where}: {name} is damaged")
        flat = torch.frombuffer(content, dtype=entry.dtype) if content else torch.empty(0, dtype=entry.dtype)
        return flat.reshape(entry.shape)

    def damaged_rows(self, name: str, first: int, stop: int) -> list[int]:
        """The rows in [first, stop) whose checksum differs; the tensor has a checksum per row."""
        entry, damaged = self.entries[name], []
        size = entry.row_bytes
        at_once = max(1, _AT_ONCE // max(1, size))
        for start in range(first, stop, at_once):
            count = min(at_once, stop - start)
            content = memoryview(self._bytes(self.offset(name, start), count * size))
            damaged += [
                start + row
                for row in range(count)
                if zlib.crc32(content[row * size : (row + 1) * size]) != self._sums[name][start + row]
            ]
        return damaged

    def mapped_bytes(self, name: str, row: int, count: int, place: int) -> int:
        """The bytes that `fill` maps of `count` rows from `row` on, if the target is a pool's rows from `place` on."""
        size = self.entries[name].row_bytes
        if count * size < LEAST_MAPPED:
            return 0
        return whole_pages(place * size, count * size, self.offset(name, row))[1]

    def watched(self) -> MappedFile:
        """The file as a MappedFile, which detects changes since it was opened."""
        return MappedFile(self.where, self.descriptor, self._status)

    def row_sums(self, name: str) -> Sequence[int]:
        """The checksums of a tensor's rows."""
        return self._sums[name]

    def fill(self, name: str, row: int, target: torch.Tensor, *, maps: bool = True) -> bool:
        """Load rows of `name`, from `row` on, into `target`, a contiguous tensor.

        Args:
            maps: whether large row ranges are mapped where their page offsets agree, and read on first access; `target`
                then lies in `reserve` memory. Otherwise all rows are copied.

        Returns whether any bytes are mapped.
        """
        if not target.numel():
            return False
        content, position = target.flatten().view(torch.uint8).numpy(), self.offset(name, row)
        before, behind = len(content), 0
        if maps and len(content) >= LEAST_MAPPED:
            before, behind = map_file(content, self.descriptor, position)
        view = memoryview(content.data)
        self._read(view[:before], position)
        self._read(view[len(view) - behind :], position + len(view) - behind)
        return before + behind < len(view)

    def _read(self, target: memoryview, start: int) -> None:
        at = 0
        while at < len(target):
            read = os.preadv(self.descriptor, [target[at : at + _AT_ONCE]], start + at)
            if not read:
                raise DamagedContextError(f"{self.where} was cut off while it was read")
            at += read

    def _bytes(self, start: int, count: int) -> bytes:
        content = bytearray(count)
        self._read(memoryview(content), start)
        return bytes(content)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.flatten().view(torch.uint8).numpy().data
