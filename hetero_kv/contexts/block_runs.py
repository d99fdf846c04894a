"""Runs of blocks in files: their tensor names, and digests of their content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_kv.contexts.tensor_file import TensorFile
from hetero_kv.engine.errors import DamagedContextError

#: The prefix of the names of block tensors: `blocks/LAYOUT/LAYER/ARRAY`.
BLOCKS = "blocks/"


@dataclass(frozen=True)
class BlockRun:
    """Consecutive blocks in a file.

    Attributes:
        file: the file's name in the same folder; "" for the context's own.
        first, count: the range of rows in the file.
        digest: `rows_digest` of them; "" in the context's own file.
    """

    file: str
    first: int
    count: int
    digest: str


def rows_digest(file: TensorFile, number: int, first: int, count: int) -> str:
    """A digest of the checksums of blocks [first, first + count) of a layout, over all arrays."""
    return hashlib.sha256("\n".join(contents_in(file, number, first, count)).encode()).hexdigest()


def contents_in(file: TensorFile, number: int, first: int, count: int) -> list[str]:
    """`contents_of` blocks [first, first + count) of a layout in a file."""
    names = [name for name in file.entries if name.startswith(f"{BLOCKS}{number}/")]
    return contents_of({name: file.row_sums(name)[first : first + count] for name in names})


def contents_of(sums: Mapping[str, Sequence[int]]) -> list[str]:
    """A text per block that identifies its content; `sums`: array name -> the checksums of all blocks."""
    names = sorted(sums)
    return [" ".join(map(str, block)) for block in zip(*(sums[name] for name in names), strict=True)]


def damage_of(file: TensorFile, number: int, run: BlockRun) -> list[DamagedContextError]:
    """The first damaged block of each array, in a run of a layout's blocks in `file`."""
    rows = {
        name: file.damaged_rows(name, run.first, run.first + run.count)
        for name in file.entries
        if name.startswith(f"{BLOCKS}{number}/")
    }
    return [
        DamagedContextError(f"{file.where}: block {damaged[0]} of {name} is damaged")
        for name, damaged in rows.items()
        if damaged
    ]
