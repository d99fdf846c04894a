"""Encodes and decodes the header of a safetensors file: its tensors, their offsets, and metadata; checked when read.

The format: 8 bytes, little-endian, with the header's length; the header, JSON; the tensors, without gaps between them.
Context files conform to it: their alignment padding consists of extra tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hetero_kv.engine.errors import DamagedContextError
from hetero_kv.errors import shown

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: Bytes before the header.
PREFIX = 8
#: Limit on the header's length, bytes, as in safetensors.
LONGEST = 100_000_000
_MOST_DIMENSIONS = 8
_METADATA = "__metadata__"


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor of the file.

    Attributes:
        start, stop: its byte range, counted from the header's end.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def row_bytes(self) -> int:
        """Bytes per row of the first dimension."""
        return (self.stop - self.start) // self.shape[0] if self.shape[0] else 0


def encoded(entries: Mapping[str, HeaderEntry], metadata: Mapping[str, str], multiple: int) -> bytes:
    """The length prefix and the header, padded to a multiple of `multiple` bytes.

    Raises ValueError if it is longer than `LONGEST`.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    for name, entry in entries.items():
        offsets = [entry.start, entry.stop]
        header[name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(PREFIX + len(text)) % multiple)
    if len(text) > LONGEST:
        raise ValueError(f"the header has {len(text)} bytes, and the limit is {LONGEST}")
    return len(text).to_bytes(PREFIX, "little") + text


def decoded(text: bytes, size: int, where: str) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """The entries in the order of their bytes, and the metadata, of a file with `size` bytes after the header.

    Raises DamagedContextError for an invalid header, so that no entry reaches beyond the file.
    """
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedContextError(f"{where} has an unreadable header ({str(error)[:80]})") from error
    if not isinstance(header, dict):
        raise DamagedContextError(f"{where} has no header of tensors")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedContextError(f"{where} has metadata that are not text")
    entries = {name: _entry(name, value, where) for name, value in header.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    end = 0
    for name, entry in ordered.items():
        if entry.start != end:
            raise DamagedContextError(f"{where}: tensor {shown(name, 60)} does not begin at the end of the one before")
        end = entry.stop
    if end != size:
        raise DamagedContextError(
            f"{where} is cut off, or too long: its tensors have {end} bytes, and the file has {size}"
        )
    return ordered, metadata


def _entry(name: str, value: object, where: str) -> HeaderEntry:
    wrong = DamagedContextError(f"{where}: tensor {shown(name, 60)} is described as {shown(value, 120)}")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise wrong
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES or not _are_sizes(shape) or not _are_sizes(offsets):
        raise wrong
    if len(shape) > _MOST_DIMENSIONS or len(offsets) != 2 or any(extent >= 2**48 for extent in (*shape, *offsets)):
        raise wrong
    entry = HeaderEntry(DTYPES[dtype], tuple(shape), *offsets)
    if entry.stop - entry.start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise wrong
    return entry


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)
