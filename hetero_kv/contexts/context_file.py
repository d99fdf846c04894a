"""A cache in one file, and back: what is written, and what is checked before anything is taken."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_kv.contexts.cache_pieces import CachePieces
from hetero_kv.contexts.held_blocks import HeldBlocks
from hetero_kv.contexts.identity import FORMAT, Identity
from hetero_kv.contexts.tensor_file import Piece, TensorFile, write_tensors
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.errors import ContextError, DamagedContextError
from hetero_kv.engine.saved_part import SavedPart
from hetero_kv.errors import said_briefly, shown

#: The metadata under which a file says what it is.
KEY = "hetero_kv_context"
#: Where blocks are in the file: `blocks/LAYOUT/LAYER/ARRAY`.
BLOCKS = "blocks/"
# A tensor of fewer bytes is read when it is loaded: nothing is gained by mapping it.
LEAST_MAPPED = 1 << 16

#: Rows of token ids.
Tokens = Sequence[Sequence[int]] | torch.Tensor


def version() -> str:
    """Of this package."""
    return metadata.version("hetero-kv")


def write_context(
    path: Path, cache: HeteroCache, identity: Identity, tokens: Tokens | None, notes: dict[str, Any] | None = None
) -> None:
    """Write what a cache holds into one file, which is there as a whole or not at all.

    Args:
        tokens: the token ids of every row; a row may have more than are stored, as behind `generate`.
        notes: what the caller wants to find again, as JSON has it.

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
        tensors |= _tables(blocks, f"layouts/{number}") | _block_pieces(blocks, f"{BLOCKS}{number}")
        layouts.append({"block_size": layout.block_size, "blocks": blocks.count})
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


def _block_pieces(blocks: HeldBlocks, path: str) -> dict[str, Piece]:
    pieces = {}
    for layer_idx, name, shape, dtype in blocks.arrays():
        whole = (blocks.count, *shape)
        is_mapped = torch.Size(whole).numel() * dtype.itemsize >= LEAST_MAPPED
        pieces[f"{path}/{layer_idx}/{name}"] = Piece(
            whole,
            dtype,
            lambda layer_idx=layer_idx, name=name: blocks.rows(layer_idx, name),  # type: ignore[misc]
            by_row=True,
            page_offset=0 if is_mapped else None,
        )
    return pieces


@dataclass(frozen=True)
class OpenContext:
    """A context's file, open, its header checked.

    Attributes:
        said: what `write_context` has said.
        identity: what it belongs to.
        tokens: ids of every row; none where they were not given.
    """

    file: TensorFile
    said: dict[str, Any]
    identity: Identity
    tokens: list[list[int]]

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
        """Close the file."""
        self.file.close()

    def layout(self, number: int) -> tuple[int, np.ndarray]:
        """Block size and lengths of the blocks of a layout: the tokens in each."""
        layouts = self.said.get("layouts")
        said = layouts[number] if isinstance(layouts, list) and number < len(layouts) else None
        name = f"layouts/{number}/lengths"
        if not isinstance(said, dict) or name not in self.file.entries or type(said.get("block_size")) is not int:
            raise DamagedContextError(f"{self.file.where} has no blocks of layout {number}")
        part = SavedPart({name: self.file.tensor(name)}, where=self.file.where)
        return said["block_size"], part.indices(name, (None,), torch.int32, said["block_size"] + 1).numpy()


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
