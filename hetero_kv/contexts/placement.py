"""Finds the blocks of a context that existing files contain already."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from hetero_kv.contexts import addresses
from hetero_kv.contexts.block_runs import BLOCKS, BlockRun, contents_in, contents_of, rows_digest
from hetero_kv.contexts.context_file import OpenContext
from hetero_kv.contexts.index import Index
from hetero_kv.contexts.saved_blocks import SavedBlocks
from hetero_kv.contexts.tensor_file import bytes_of
from hetero_kv.engine.errors import ContextError


class BlockPlacement:
    """Looks blocks up in an index by content address: their tokens, all earlier tokens, and their stored content.

    Args:
        identity: the digest of the context's Identity.
        tokens: the tokens of its single sequence.
    """

    def __init__(self, index: Index, folder: Path, identity: str, tokens: Sequence[int]) -> None:
        self._index, self._folder, self._identity, self._tokens = index, folder, identity, tokens

    def __call__(self, number: int, blocks: SavedBlocks) -> list[BlockRun]:
        """See Placing."""
        contents = contents_of(_sums(number, blocks))
        (table,) = [table for rows in blocks.tables for table in rows]
        assert list(table) == list(range(len(table)))
        found = addresses.block_addresses(self._identity, number, self._tokens, blocks.layout.block_size, contents)
        places = [self._index.block(address) or ("", -1) for address in found]
        runs: list[BlockRun] = []
        for start, file, row, count in _grouped(places):
            digest = self._digest(number, file, row, contents[start : start + count])
            own = sum(run.count for run in runs if not run.file)
            last = runs[-1] if runs else None
            if digest:
                runs.append(BlockRun(file, row, count, digest))
            elif last is not None and not last.file:
                runs[-1] = BlockRun("", last.first, last.count + count, "")
            else:
                runs.append(BlockRun("", own, count, ""))
        return runs

    def _digest(self, number: int, file: str, row: int, contents: Sequence[str]) -> str:
        """`rows_digest` of a run in another file; "" if the file is missing, or its blocks differ from the index."""
        if not file:
            return ""
        try:
            with contextlib.closing(OpenContext.at(self._folder / file)) as other:
                if contents_in(other.file, number, row, len(contents)) != list(contents):
                    return ""
                return rows_digest(other.file, number, row, len(contents))
        except ContextError:
            return ""


def _grouped(places: Sequence[tuple[str, int]]) -> Iterator[tuple[int, str, int, int]]:
    """Groups places into runs of rows of one file: (first index, file, first row, count)."""
    start = 0
    for index in range(1, len(places) + 1):
        file, row = places[start]
        goes_on = index < len(places) and places[index] == (file, row + (index - start if file else 0))
        if not goes_on:
            yield start, file, row, index - start
            start = index


def _sums(number: int, blocks: SavedBlocks) -> dict[str, list[int]]:
    """Array name -> the checksums of all blocks as they will be written."""
    return {
        f"{BLOCKS}{number}/{layer_idx}/{name}": [
            zlib.crc32(bytes_of(block)) for part in blocks.rows(layer_idx, name) for block in part
        ]
        for layer_idx, name, _, _ in blocks.arrays()
    }
