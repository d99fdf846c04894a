"""Runs of blocks in files: what they are called there, and what is stored of them, as one text each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_kv.contexts.tensor_file import TensorFile
from hetero_kv.engine.errors import DamagedContextError

#: Where blocks are in a file: `blocks/LAYOUT/LAYER/ARRAY`.
BLOCKS = "blocks/"


@dataclass(frozen=True)
class Run:
    """Blocks that stand one behind the other in a file.

    Attributes:
        file: its name, in the same folder; "" for the context's own.
        first, count: which of the file's.
        digest: `rows_digest` of them, where they are in another file.
    """

    file: str
    first: int
    count: int
    digest: str


def rows_digest(file: TensorFile, number: int, first: int, count: int) -> str:
    """One text for the checksums of blocks [first, first + count) of a layout, in all arrays."""
    return hashlib.sha256("\n".join(contents_in(file, number, first, count)).encode()).hexdigest()


def contents_in(file: TensorFile, number: int, first: int, count: int) -> list[str]:
    """`contents_of` blocks [first, first + count) of a layout in a file."""
    names = [name for name in file.entries if name.startswith(f"{BLOCKS}{number}/")]
    return contents_of({name: file.row_sums(name)[first : first + count] for name in names})


def contents_of(sums: Mapping[str, Sequence[int]]) -> list[str]:
    """One text for what is stored of each block, from the checksums of all blocks by the name of their array."""
    names = sorted(sums)
    return [" ".join(map(str, block)) for block in zip(*(sums[name] for name in names), strict=True)]


def damage_of(file: TensorFile, number: int, run: Run) -> list[DamagedContextError]:
    """The first damaged block of each array, of a run of a layout's blocks in the file that holds them."""
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
