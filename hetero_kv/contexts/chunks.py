"""Chunks: files with some consecutive blocks of a context, each named by the digest of its bytes."""

from __future__ import annotations

import hashlib
import json
from contextlib import closing

import numpy as np

from hetero_kv.contexts.block_runs import BLOCKS, BlockRun, rows_digest
from hetero_kv.contexts.context_file import KEY, OpenContext
from hetero_kv.contexts.disk_cache import DiskCache
from hetero_kv.contexts.identity import FORMAT, Identity
from hetero_kv.contexts.saved_blocks import SavedBlocks
from hetero_kv.contexts.tensor_file import encoded_tensors
from hetero_kv.contexts.writing import block_pieces
from hetero_kv.engine.cache import HeteroCache

#: The folder of chunks at an address.
BLOCKS_FOLDER = "blocks"
#: The suffix of all files of contexts.
SUFFIX = ".safetensors"
# The largest size of a chunk with several blocks, bytes: some milliseconds of transfer, longer than a network's
# latency.
_MOST_BYTES = 1 << 22


class ChunkWriter:
    """Writes the blocks of a cache's single sequence as chunks into a disk cache; a Placing.

    Chunks begin at fixed positions, so contexts with a common prefix share chunks.

    Args:
        salt: of the tenant, who shares no chunks with others.
    """

    def __init__(self, cache: HeteroCache, disk: DiskCache, identity: Identity, salt: str) -> None:
        self._cache, self._disk = cache, disk
        described = {"format": FORMAT, "identity": identity.recorded, "salt": salt}
        self._metadata = {"format": "pt", KEY: json.dumps(described, separators=(",", ":"))}

    def __call__(self, number: int, blocks: SavedBlocks) -> list[BlockRun]:
        """See Placing."""
        size = sum(int(np.prod(shape)) * dtype.itemsize for _, _, shape, dtype in blocks.arrays())
        # A power of two.
        together = 1 << max(0, (_MOST_BYTES // max(1, size)).bit_length() - 1)
        return [
            self._written(number, blocks, start, min(blocks.count, start + together))
            for start in range(0, blocks.count, together)
        ]

    def _written(self, number: int, blocks: SavedBlocks, start: int, stop: int) -> BlockRun:
        kept = np.zeros(blocks.count, bool)
        kept[start:stop] = True
        pieces = block_pieces(self._cache, blocks, f"{BLOCKS}{number}", kept)
        content = b"".join(encoded_tensors(pieces, self._metadata))
        name = chunk_name(content)
        if not self._disk.has(name):
            self._disk.add(name, content)
        with closing(OpenContext.at(self._disk.folder / name)) as chunk:
            return BlockRun(name, 0, stop - start, rows_digest(chunk.file, number, 0, stop - start))


def chunk_name(content: bytes) -> str:
    """The file name of a chunk, or of a new card, with these bytes."""
    return hashlib.sha256(content).hexdigest()[:32] + SUFFIX
