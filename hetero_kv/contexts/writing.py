"""Writes a cache's KV to one file."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_kv.contexts.block_runs import BLOCKS, BlockRun
from hetero_kv.contexts.cache_pieces import CachePieces
from hetero_kv.contexts.context_file import KEY
from hetero_kv.contexts.identity import FORMAT, Identity, version
from hetero_kv.contexts.saved_blocks import SavedBlocks
from hetero_kv.contexts.tensor_file import LEAST_MAPPED, TensorPiece, write_tensors
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.errors import ContextError
from hetero_kv.errors import brief_error

#: Rows of token ids.
Tokens = Sequence[Sequence[int]] | torch.Tensor


#: (layout's number, its blocks) -> the runs in which they are written.
Placing = Callable[[int, SavedBlocks], list[BlockRun]]


def all_here(number: int, blocks: SavedBlocks) -> list[BlockRun]:
    """One run with all blocks in the file itself."""
    return [BlockRun("", 0, blocks.count, "")] if blocks.count else []


def write_context(
    path: Path,
    cache: HeteroCache,
    identity: Identity,
    tokens: Tokens | None,
    notes: dict[str, Any] | None = None,
    placing: Placing = all_here,
    *,
    survives: bool = True,
    salt: str = "",
) -> None:
    """Write a cache's KV to one file, atomically.

    Args:
        tokens: the token ids of every row; a row may have more than are stored, as after `generate`.
        notes: the caller's notes, as JSON values.
        placing: decides which blocks are references to other files in the folder.
        survives: whether the file survives a power cut once it is written.
        salt: of the context's addresses in a store.

    Raises ContextError if the cache is empty or cannot be saved, if the file cannot be written, or if a file that is
    mapped into the cache was changed.
    """
    if cache.batch is not None:
        raise ContextError("a prompt is being prefilled into this cache; save it before or after that")
    if not cache.columns.count:
        raise ContextError("the cache has no tokens; save it after a prompt")
    now = cache.injection.state()
    if not all(now.is_like(each) for each in cache.computed_under):
        raise ContextError(
            "the cache was computed with other weights, adapters or hooks than the model has now; save it before they "
            "change, or prefill again"
        )
    cache.require_unchanged_files()
    pieces = CachePieces.of(cache)
    tensors = {name: TensorPiece.of(tensor) for name, tensor in pieces.tensors.items()}
    tensors |= {f"tokens/{row}": TensorPiece.of(ids) for row, ids in enumerate(_token_rows(cache, tokens))}
    layouts = []
    for number, layout in enumerate(cache.groups[0].layouts):
        blocks = SavedBlocks.of(cache.groups, layout)
        runs = placing(number, blocks)
        kept = np.concatenate([np.full(run.count, not run.file) for run in runs]) if runs else np.zeros(0, bool)
        tensors |= _tables(blocks, f"layouts/{number}") | block_pieces(cache, blocks, f"{BLOCKS}{number}", kept)
        layouts.append(
            {"block_size": layout.block_size, "runs": [[run.file, run.first, run.count, run.digest] for run in runs]}
        )
    metadata = pieces.metadata | {
        "format": FORMAT, "version": version(), "identity": identity.recorded, "layouts": layouts, "notes": notes or {},
    }  # fmt: skip
    if salt:
        metadata["salt"] = salt
    try:
        described = {"format": "pt", KEY: json.dumps(metadata, separators=(",", ":"))}
        write_tensors(path, tensors, described, survives=survives)
    except ContextError:
        raise
    except (OSError, ValueError) as error:
        raise ContextError(
            f"{path} cannot be written ({brief_error(error)}); free disk space, or choose another folder. An earlier "
            "file is unchanged"
        ) from error


def _token_rows(cache: HeteroCache, tokens: Tokens | None) -> list[torch.Tensor]:
    if tokens is None:
        return []
    rows = [torch.as_tensor(row, dtype=torch.int32, device="cpu") for row in tokens]
    lengths = cache.lengths
    if len(rows) != len(lengths) or any(len(row) < length for row, length in zip(rows, lengths, strict=True)):
        raise ContextError(
            f"tokens are rows of {[len(row) for row in rows]}, and the cache has rows of {lengths}: give every row's "
            "tokens without padding, at least the stored ones"
        )
    return rows


def _tables(blocks: SavedBlocks, path: str) -> dict[str, TensorPiece]:
    tables = {
        f"{path}/tables/{group}/{row}": TensorPiece.of(torch.from_numpy(numbers))
        for group, rows in enumerate(blocks.tables)
        for row, numbers in enumerate(rows)
    }
    return tables | {f"{path}/lengths": TensorPiece.of(torch.from_numpy(blocks.lengths))}


def block_pieces(cache: HeteroCache, blocks: SavedBlocks, path: str, kept: np.ndarray) -> dict[str, TensorPiece]:
    """The blocks of a layout that are `kept` ([blocks] bool), an array each, under names that begin with `path`."""
    first = int(kept.argmax()) if kept.any() else 0
    pieces = {}

    def rows(layer_idx: int, name: str) -> Iterator[torch.Tensor]:
        yield from blocks.rows(layer_idx, name, kept)
        # Blocks that are mapped from a changed file must not get valid checksums.
        cache.require_unchanged_files()

    for layer_idx, name, shape, dtype in blocks.arrays():
        row_bytes = torch.Size(shape).numel() * dtype.itemsize
        count = int(kept.sum())
        # The same page offset as in a restored pool, where the first block follows those of other files.
        page_offset = first * row_bytes % mmap.PAGESIZE if count * row_bytes >= LEAST_MAPPED else None
        pieces[f"{path}/{layer_idx}/{name}"] = TensorPiece(
            (count, *shape),
            dtype,
            partial(rows, layer_idx, name),
            by_row=True,
            page_offset=page_offset,
        )
    return pieces
