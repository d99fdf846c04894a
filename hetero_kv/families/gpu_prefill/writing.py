"""Writes a prompt from a GPU's buffer to the pool, block by block, while the next chunk computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from hetero_kv.engine.buffered_layer import PrefillBuffer
from hetero_kv.gpu_ops.host_copies import on_device
from hetero_kv.gpu_ops.write_out import WriteOut
from hetero_kv.store.pool import BlockPool

#: Keys of blocks [blocks, kv_heads, block_size, k_dim] float32, and the attention that each has received or None ->
#: the blocks' representatives.
VectorsOf = Callable[[torch.Tensor, "torch.Tensor | None"], torch.Tensor]

#: Keys [rows, kv_heads, tokens, k_dim] and the position of the first -> sums over them.
SumsOf = Callable[[torch.Tensor, int], torch.Tensor]

PIECE_TOKENS = 2048
"""Tokens of a piece: few enough that float32 copies of its keys are small compared with a chunk's activations."""


class PromptWriting:
    """Encodes blocks on the device as they become full, copies them to the CPU, and puts them into the pool.

    Args:
        table: [rows, blocks] int32, the sequences' block tables, including the new tokens' blocks.
        represented: blocks [first, end) whose representatives `vectors_of` computes; empty if that happens later or
            never.
        part: the positions [start, stop) to write; None for the new tokens.
        with_keys: whether the pool stores keys; otherwise its key vectors have no numbers.
        sums_of: computed from the keys of every piece, on the device, ahead of anything queued later.

    Attributes:
        largest: largest magnitudes of a stored key and of a stored value; complete once `finish` has returned.
        sums: the total of `sums_of` over all pieces, on the CPU, complete at the same time; None without `sums_of`.
        on_represented: called with the first block of a piece and what is stored of it, representatives among it,
            [rows, blocks, ...] on the device; None if only the pool has them.
    """

    def __init__(
        self, pool: BlockPool, buffer: PrefillBuffer, table: np.ndarray, write_out: WriteOut,
        represented: tuple[int, int] = (0, 0), vectors_of: VectorsOf | None = None,
        part: tuple[int, int] | None = None, with_keys: bool = True, sums_of: SumsOf | None = None,
    ) -> None:  # fmt: skip
        self._pool, self._buffer, self._table, self._write_out = pool, buffer, table, write_out
        self._represented, self._vectors_of = represented, vectors_of
        self._start = buffer.past if part is None else part[0]
        self._stop = None if part is None else part[1]
        self._with_keys, self._sums_of, self._written = with_keys, sums_of, self._start
        self.largest = [0.0, 0.0]
        self.sums: torch.Tensor | None = None
        self.on_represented: Callable[[int, Mapping[str, torch.Tensor]], None] | None = None

    @property
    def first_block(self) -> int:
        """The first block that is written as a whole."""
        return -(-self._start // self._pool.block_size)

    @property
    def _length(self) -> int:
        """The end of the positions that are in the buffer and belong to the part to write."""
        return self._buffer.length if self._stop is None else min(self._buffer.length, self._stop)

    def advance(self) -> None:
        """Send the blocks that have become full since the last call."""
        size, length = self._pool.block_size, self._length
        boundary = self.first_block * size
        if self._written < boundary <= length:
            self._send_tokens(boundary)
        while self._written >= boundary and (blocks := (length - self._written) // size):
            self._send_blocks(min(blocks, max(1, PIECE_TOKENS // size)))

    def finish(self) -> None:
        """Send the rest, and wait until everything is in the pool."""
        self.advance()
        if self._written < self._length:
            self._send_tokens(self._length)
        self._write_out.finish()

    def leave(self) -> None:
        """Wait for pending copies and discard them; there are none once `finish` has returned."""
        self._write_out.drop()

    def _new(self, stop: int) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Keys and values of the positions from `_written` to `stop`, with their inputs to `_record_piece`.

        Moves `_written` to `stop`.
        """
        start, self._written = self._written, stop
        part = slice(start - self._buffer.first, stop - self._buffer.first)
        keys, values = self._buffer.keys[:, :, part], self._buffer.values[:, :, part]
        sums = () if self._sums_of is None else (self._sums_of(keys, start),)
        keys = keys if self._with_keys else keys[..., :0]
        return keys, values, (_ends(keys, values), *sums)

    def _send_tokens(self, stop: int) -> None:
        """Send tokens of an incomplete block, which the CPU encodes."""
        start = self._written
        keys, values, notes = self._new(stop)

        def arrived(copies: Sequence[torch.Tensor]) -> None:
            new_keys, new_values, *recorded = copies
            self._record_piece(*recorded)
            for ids, row_keys, row_values in zip(self._table, new_keys, new_values, strict=True):
                self._pool.write(ids, start, row_keys, row_values)

        self._write_out.send((keys, values, *notes), arrived)

    def _send_blocks(self, count: int) -> None:
        """Send full blocks in their storage type, with the arrays derived from them."""
        pool, first = self._pool, self._written // self._pool.block_size
        stop = self._written + count * pool.block_size
        keys, values, notes = self._new(stop)
        keys, values = (t.unflatten(2, (count, pool.block_size)).transpose(1, 2) for t in (keys, values))
        stored = pool.encoded(keys, values)
        begin, end = (min(max(block - first, 0), count) for block in self._represented)
        derived = {}
        if begin < end and self._vectors_of is not None:
            part = {name: blocks[:, begin:end] for name, blocks in stored.items()}
            derived = self._derived(part, None, self._vectors_of)
            if self.on_represented is not None:
                self.on_represented(first + begin, {**part, **derived})

        def arrived(copies: Sequence[torch.Tensor]) -> None:
            self._record_piece(*copies[: len(notes)])
            by_name = dict(zip((*stored, *derived), copies[len(notes) :], strict=True))
            for row, table in enumerate(self._table.astype(np.int64)):
                ids = torch.from_numpy(table[first : first + count])
                pool.put(ids, {name: by_name[name][row] for name in stored})
                pool.put(ids[begin:end], {name: by_name[name][row] for name in derived})

        self._write_out.send((*notes, *stored.values(), *derived.values()), arrived)

    def send_represented(self, first: int, end: int, received: torch.Tensor, vectors_of: VectorsOf) -> None:
        """Compute the representatives of the blocks [first, end), which this buffer has; wait until the pool has them.

        received: [rows, end - first, kv_heads, block_size] float32 on the CPU, the attention that each key received.
        """
        received = on_device(received, self._buffer.keys.device)
        pool, size = self._pool, self._pool.block_size
        step = max(1, PIECE_TOKENS // size)
        for start in range(first, end, step):
            stop = min(start + step, end)
            part = slice(start * size - self._buffer.first, stop * size - self._buffer.first)
            keys, values = (
                t[:, :, part].unflatten(2, (stop - start, size)).transpose(1, 2)
                for t in (self._buffer.keys, self._buffer.values)
            )
            stored = pool.encoded(keys, values)
            derived = self._derived(stored, received[:, start - first : stop - first], vectors_of)
            self._write_out.send(tuple(derived.values()), self._putting(tuple(derived), start, stop))
        self._write_out.finish()

    def _derived(
        self, stored: Mapping[str, torch.Tensor], received: torch.Tensor | None, vectors_of: VectorsOf
    ) -> dict[str, torch.Tensor]:
        """The arrays derived from stored blocks [rows, blocks, ...], by name."""
        flat = {name: blocks.flatten(0, 1) for name, blocks in stored.items()}
        seen = None if received is None else received.flatten(0, 1)
        made = self._pool.derived_of(flat, vectors_of(self._pool.decoded(flat).float(), seen))
        return {name: blocks.unflatten(0, (len(self._table), -1)) for name, blocks in made.items()}

    def _putting(self, names: Sequence[str], start: int, stop: int) -> Callable[[Sequence[torch.Tensor]], None]:
        def arrived(copies: Sequence[torch.Tensor]) -> None:
            for row, table in enumerate(self._table.astype(np.int64)):
                arrays = {name: copy[row] for name, copy in zip(names, copies, strict=True)}
                self._pool.put(torch.from_numpy(table[start:stop]), arrays)

        return arrived

    def _record_piece(self, ends: torch.Tensor, sums: torch.Tensor | None = None) -> None:
        found = ends.abs().amax(dim=1).tolist()
        self.largest = [max(pair) for pair in zip(self.largest, found, strict=True)]
        if sums is not None:
            # A clone, because the next piece overwrites the copy.
            self.sums = sums.clone() if self.sums is None else self.sums + sums


def _ends(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The smallest and the largest number of each, [2, 2] float32; zeros for an empty tensor."""
    ends = (torch.stack(torch.aminmax(t)) if t.numel() else t.new_zeros(2) for t in (keys, values))
    return torch.stack(list(ends)).float()
