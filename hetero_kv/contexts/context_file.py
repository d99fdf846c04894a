"""A cache in one file, and back: what is written, and what is checked before anything is taken."""

from __future__ import annotations

import hashlib
import json
import mmap
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_kv.contexts.cache_pieces import CachePieces
from hetero_kv.contexts.held_blocks import HeldBlocks
from hetero_kv.contexts.identity import FORMAT, Identity
from hetero_kv.contexts.tensor_file import LEAST_MAPPED, Piece, TensorFile, write_tensors
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.errors import ContextError, DamagedContextError
from hetero_kv.engine.saved_part import SavedPart
from hetero_kv.errors import said_briefly, shown

#: The metadata under which a file says what it is.
KEY = "hetero_kv_context"
#: Where blocks are in the file: `blocks/LAYOUT/LAYER/ARRAY`.
BLOCKS = "blocks/"

_IS_FILE = re.compile(r"|[0-9a-f]{32}\.safetensors")


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


#: Rows of token ids.
Tokens = Sequence[Sequence[int]] | torch.Tensor


def version() -> str:
    """Of this package."""
    return metadata.version("hetero-kv")


#: Of a layout's number and its blocks: the runs that they are to be written as.
Placing = Callable[[int, HeldBlocks], list[Run]]


def all_here(number: int, blocks: HeldBlocks) -> list[Run]:
    """All blocks in the file itself."""
    return [Run("", 0, blocks.count, "")] if blocks.count else []


def write_context(
    path: Path,
    cache: HeteroCache,
    identity: Identity,
    tokens: Tokens | None,
    notes: dict[str, Any] | None = None,
    placing: Placing = all_here,
) -> None:
    """Write what a cache holds into one file, which is there as a whole or not at all.

    Args:
        tokens: the token ids of every row; a row may have more than are stored, as behind `generate`.
        notes: what the caller wants to find again, as JSON has it.
        placing: which blocks are in other files, beside this one, already.

    Raises ContextError where the cache holds nothing or cannot be saved, or the file cannot be written.
    """
    if cache.steps:
        raise ContextError("a prompt is being prefilled into this cache; save it before or after, not in between")
    if not cache.columns.count:
        raise ContextError("the cache holds no tokens; save it behind a prompt")
    pieces = CachePieces.of(cache)
    tensors = {name: Piece.of(tensor) for name, tensor in pieces.tensors.items()}
    tensors |= {f"tokens/{row}": Piece.of(ids) for row, ids in enumerate(_token_rows(cache, tokens))}
    layouts = []
    for number, layout in enumerate(cache.cohorts[0].layouts):
        blocks = HeldBlocks.of(cache.cohorts, layout)
        runs = placing(number, blocks)
        tensors |= _tables(blocks, f"layouts/{number}") | _block_pieces(blocks, f"{BLOCKS}{number}", runs)
        layouts.append(
            {"block_size": layout.block_size, "runs": [[run.file, run.first, run.count, run.digest] for run in runs]}
        )
    said = pieces.said | {
        "format": FORMAT, "version": version(), "identity": identity.__dict__, "layouts": layouts, "notes": notes or {},
    }  # fmt: skip
    try:
        write_tensors(path, tensors, {"format": "pt", KEY: json.dumps(said, separators=(",", ":"))})
    except (OSError, ValueError) as error:
        raise ContextError(f"{path} cannot be written ({said_briefly(error)}); what was there is as it was") from error


def _token_rows(cache: HeteroCache, tokens: Tokens | None) -> list[torch.Tensor]:
    if tokens is None:
        return []
    rows = [torch.as_tensor(row, dtype=torch.int32, device="cpu") for row in tokens]
    lengths = cache.lengths
    if len(rows) != len(lengths) or any(len(row) < length for row, length in zip(rows, lengths, strict=True)):
        raise ContextError(
            f"tokens are rows of {[len(row) for row in rows]}, and the cache holds rows of {lengths}: give every row's "
            "tokens without padding, at least those that are stored"
        )
    return rows


def _tables(blocks: HeldBlocks, path: str) -> dict[str, Piece]:
    tables = {
        f"{path}/tables/{cohort}/{row}": Piece.of(torch.from_numpy(numbers))
        for cohort, rows in enumerate(blocks.tables)
        for row, numbers in enumerate(rows)
    }
    return tables | {f"{path}/lengths": Piece.of(torch.from_numpy(blocks.lengths))}


def _block_pieces(blocks: HeldBlocks, path: str, runs: Sequence[Run]) -> dict[str, Piece]:
    kept = np.concatenate([np.full(run.count, not run.file) for run in runs]) if runs else np.zeros(0, bool)
    first = int(kept.argmax()) if kept.any() else 0
    pieces = {}
    for layer_idx, name, shape, dtype in blocks.arrays():
        row_bytes = torch.Size(shape).numel() * dtype.itemsize
        count = int(kept.sum())
        # As in a pool, in which the first of them stands behind those that are elsewhere.
        page_offset = first * row_bytes % mmap.PAGESIZE if count * row_bytes >= LEAST_MAPPED else None
        pieces[f"{path}/{layer_idx}/{name}"] = Piece(
            (count, *shape),
            dtype,
            lambda layer_idx=layer_idx, name=name: blocks.rows(layer_idx, name, kept),  # type: ignore[misc]
            by_row=True,
            page_offset=page_offset,
        )
    return pieces


@dataclass(frozen=True)
class OpenContext:
    """A context's file, open, its header checked. Files that hold blocks of it beside are opened as they are asked for.

    Attributes:
        said: what `write_context` has said.
        identity: what it belongs to.
        tokens: ids of every row; none where they were not given.
    """

    file: TensorFile
    said: dict[str, Any]
    identity: Identity
    tokens: list[list[int]]
    _beside: dict[str, OpenContext] = field(default_factory=dict)

    @classmethod
    def at(cls, path: Path) -> OpenContext:
        """Open the context at `path`.

        Raises:
            ContextError: there is none that can be read, or it is of another version.
            DamagedContextError: it is not what was written.
        """
        try:
            file = TensorFile(path)
        except OSError as error:
            raise ContextError(f"{path} cannot be read ({said_briefly(error)}); give a saved context") from error
        try:
            said = _said(file)
            file.assign_checksums(lambda name: name.startswith(BLOCKS))
            tokens = [file.tensor(name).tolist() for name in file.entries if name.startswith("tokens/")]
            if not all(isinstance(row, list) for row in tokens):
                raise DamagedContextError(f"{path} has tokens that are no rows")
            return cls(file, said, Identity.read(said.get("identity"), str(path)), tokens)
        except BaseException:
            file.close()
            raise

    @property
    def stored_tokens(self) -> list[list[int]]:
        """The ids of those that are stored. Raises DamagedContextError where it is not known how many are."""
        cohorts = self.said.get("cohorts")
        sound = [each for each in cohorts if isinstance(each, dict)] if isinstance(cohorts, list) else []
        parts = [SavedPart(numbers=each, where=self.file.where) for each in sound]
        lengths = [
            part.integer("length", 1) for part in parts for _ in range(part.integer("rows", 1, len(self.tokens)))
        ]
        if len(lengths) != len(self.tokens) or any(map(operator.lt, map(len, self.tokens), lengths)):
            raise DamagedContextError(f"{self.file.where} has not the tokens of its rows")
        return [row[:length] for row, length in zip(self.tokens, lengths, strict=True)]

    def close(self) -> None:
        """Close the file, and those beside."""
        self.file.close()
        for other in self._beside.values():
            other.close()

    def runs(self, number: int) -> list[Run]:
        """Where the blocks of a layout are, in their order. Raises DamagedContextError where that cannot be."""
        said = self._layout(number).get("runs")
        runs = []
        for run in said if isinstance(said, list) else [None]:
            match run:
                case [str() as file, int() as first, int() as count, str() as digest] if (
                    first >= 0 < count and _IS_FILE.fullmatch(file)
                ):
                    runs.append(Run(file, first, count, digest))
                case _:
                    raise DamagedContextError(f"{self.file.where}: a run of blocks is {shown(run, 100)}")
        return runs

    def damage(self) -> list[DamagedContextError]:
        """What of the file, and of the blocks that it has in others, is not what was written; one for each tensor."""
        found = []
        for name in self.file.entries:
            if not name.startswith(BLOCKS):
                try:
                    self.file.tensor(name)
                except DamagedContextError as error:
                    found.append(error)
        layouts = self.said.get("layouts")
        for number in range(len(layouts) if isinstance(layouts, list) else 0):
            for run in self.runs(number):
                try:
                    found += _damaged(self.holder(number, run), number, run)
                except DamagedContextError as error:
                    found.append(error)
        return found

    def contents(self, number: int) -> list[str]:
        """One text for what is stored of each block of a layout (`contents_of`)."""
        found: list[str] = []
        for run in self.runs(number):
            found += contents_in(self.holder(number, run), number, run.first, run.count)
        return found

    def holder(self, number: int, run: Run) -> TensorFile:
        """The open file that holds a run of blocks.

        Raises DamagedContextError where it is gone, or holds others than were meant.
        """
        if not run.file:
            return self.file
        if run.file not in self._beside:
            path = self.file.path.with_name(run.file)
            try:
                self._beside[run.file] = OpenContext.at(path)
            except ContextError as error:
                raise DamagedContextError(f"{self.file.where} has blocks in another file: {error}") from error
        file = self._beside[run.file].file
        if rows_digest(file, number, run.first, run.count) != run.digest:
            raise DamagedContextError(f"{self.file.where}: {file.where} holds other blocks than were saved")
        return file

    def _layout(self, number: int) -> dict[str, Any]:
        layouts = self.said.get("layouts")
        said = layouts[number] if isinstance(layouts, list) and number < len(layouts) else None
        return said if isinstance(said, dict) else {}

    def layout(self, number: int) -> tuple[int, np.ndarray]:
        """Block size and lengths of the blocks of a layout: the tokens in each."""
        said, name = self._layout(number), f"layouts/{number}/lengths"
        if name not in self.file.entries or type(said.get("block_size")) is not int:
            raise DamagedContextError(f"{self.file.where} has no blocks of layout {number}")
        part = SavedPart({name: self.file.tensor(name)}, where=self.file.where)
        return said["block_size"], part.indices(name, (None,), torch.int32, said["block_size"] + 1).numpy()


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


def _damaged(file: TensorFile, number: int, run: Run) -> list[DamagedContextError]:
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


def _said(file: TensorFile) -> dict[str, Any]:
    try:
        said = json.loads(file.metadata[KEY])
    except (KeyError, ValueError, RecursionError) as error:
        raise DamagedContextError(f"{file.where} is no saved context: its metadata lack {KEY}") from error
    if not isinstance(said, dict):
        raise DamagedContextError(f"{file.where} says nothing that can be read under {KEY}")
    if said.get("format") != FORMAT:
        raise ContextError(
            f"{file.where} was written by hetero-kv {shown(said.get('version'), 40)} in format "
            f"{shown(said.get('format'), 40)}, and this is {version()}, which reads format {FORMAT}: load it with that "
            "version, or prefill anew"
        )
    return said


def inspected(path: Path) -> OpenContext:
    """As `OpenContext.at`, closed again: what is said of it, and its tokens."""
    with closing(OpenContext.at(path)) as context:
        return context
