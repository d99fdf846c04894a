"""Makes a replica's reports from its engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from hetero_kv.serving.cluster.prefix_hashes import BLOCK, block_hashes
from hetero_kv.serving.cluster.replica_report import LIMIT, ReplicaReport, sketch
from hetero_kv.serving.engine import Engine
from hetero_kv.serving.status import SequenceStatus


class Reporter:
    """Reports on an engine; one thread at a time calls it, beside the engine's own.

    Args:
        block_size: tokens of a hashed block.
        limit: the most hashes of a list.
    """

    def __init__(self, engine: Engine, block_size: int = BLOCK, limit: int = LIMIT) -> None:
        self._engine, self._block_size, self._limit = engine, block_size, limit
        self._counter = itertools.count(1)
        # So that a sequence is hashed once, and not for every report.
        self._hashed: WeakKeyDictionary[object, list[int]] = WeakKeyDictionary()

    def report(self) -> ReplicaReport:
        """The engine at this moment."""
        status, sequences = self._engine.status(), self._engine.sequences()
        # A waiting prompt takes over what one before it computes, so it counts as far as it is new.
        known = {each for sequence in sequences if sequence.state != "waiting" for each in self._usable(sequence)}
        queued = 0
        for sequence in sequences:
            if sequence.state == "waiting" and sequence.missing:
                hashes = self._hashes(sequence)
                common = next((depth for depth in range(len(hashes), 0, -1) if hashes[depth - 1] in known), 0)
                queued += max(1, sequence.missing - common * self._block_size)
                known.update(self._usable(sequence))
            else:
                queued += sequence.missing
        waiting = sum(each.state == "waiting" for each in status.requests)
        return ReplicaReport(
            block_size=self._block_size,
            resident=sketch([self._usable(each) for each in sequences], self._limit),
            stored=sketch([self._usable(each) for each in sequences if each.is_stored], self._limit),
            rows=len(status.requests) - waiting,
            row_limit=status.max_batch,
            waiting=waiting,
            queued_tokens=queued,
            free_blocks=status.free // self._block_size,
            prefill_tokens_per_s=status.prefill_tokens_per_s,
            decode_step_s=status.decode_step_s,
            decode_row_s=status.decode_row_s,
            bytes_per_token=status.bytes_per_token,
            counter=next(self._counter),
            time=time.time(),
        )

    def _usable(self, sequence: SequenceStatus) -> Sequence[int]:
        """The hashes of the beginnings that a later prompt can take over."""
        hashes = self._hashes(sequence)
        if sequence.lengths is None:
            return hashes
        depths = sorted({length // self._block_size for length in sequence.lengths} - {0})
        return [hashes[depth - 1] for depth in depths if depth <= len(hashes)]

    def _hashes(self, sequence: SequenceStatus) -> list[int]:
        hashes = self._hashed.get(sequence.owner)
        if hashes is None:
            hashes = self._hashed[sequence.owner] = block_hashes(sequence.tokens, self._block_size, sequence.tenant)
        return hashes
