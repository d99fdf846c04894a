"""What a replica reports to routers: the beginnings of prompts that it has, its load and its speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from hetero_kv.errors import HeteroKVError, shown

#: The most hashes of a list in a report, which takes 10 bytes for each of them as Ray pickles it.
LIMIT = 1024


@dataclass(frozen=True)
class ReplicaReport:
    """A replica at one moment.

    Attributes:
        block_size: tokens of a hashed block.
        resident: hashes of beginnings (`block_hashes`) that are in memory, or will be once the requests are computed
            that the replica has; of the most recently used sequences first. See `sketch`.
        stored: those in the store that all replicas share, of sequences that are in this replica's memory too.
        rows: requests whose prompts pass or that are being answered.
        row_limit: the most of them.
        waiting: requests that wait for a row or for memory.
        queued_tokens: tokens of prompts that are still to be computed.
        free_blocks: blocks for which no kept sequence must leave memory.
        prefill_tokens_per_s: tokens of prompts that pass in a second; None if none has passed yet.
        decode_step_s: seconds of a decode step of one row; None if there was none yet.
        decode_row_s: seconds that each further row adds to it.
        bytes_per_token: of keys and values that a fetch of a stored beginning reads, bytes.
        counter: which report of this replica it is.
        time: when it was made, seconds of the replica's own clock. Routers compare no clocks; with the counter it tells
            one report from another after a restart.
    """

    block_size: int
    resident: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()
    rows: int = 0
    row_limit: int = 1
    waiting: int = 0
    queued_tokens: int = 0
    free_blocks: int = 0
    prefill_tokens_per_s: float | None = None
    decode_step_s: float | None = None
    decode_row_s: float = 0.0
    bytes_per_token: float = 0.0
    counter: int = 0
    time: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The report in plain types, as it travels in Ray's routing statistics."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**plain, "resident": list(self.resident), "stored": list(self.stored)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The report that `to_dict` wrote. Raises HeteroKVError if a field is missing or unknown."""
        names = {field.name for field in dataclasses.fields(cls)}
        if plain.keys() != names:
            differing = ", ".join(sorted(shown(name, 40) for name in plain.keys() ^ names))
            raise HeteroKVError(
                f"a replica's report has other fields than the router knows ({differing}); run the same version of "
                "hetero-kv on all machines"
            )
        return cls(**{**plain, "resident": tuple(plain["resident"]), "stored": tuple(plain["stored"])})


def sketch(sequences: Sequence[Sequence[int]], limit: int = LIMIT) -> tuple[int, ...]:
    """At most `limit` of the hashes of sequences, which are given most recently used first.

    While all fit, the sketch is exact. Otherwise each sequence gives about equally many: its last hash and every k-th,
    where k is a power of two, so that sequences with a common beginning give the same ones of it. A match that is
    looked up in the sketch is never too long, and too short by less than 2 / n of the sequence, where n is how many it
    may give. Where there are more sequences than `limit`, the least recently used ones are left out.

    A Bloom filter of as many bytes holds eight times as many hashes, and one in a hundred is wrongly in it. A request
    looks up all of its hashes in every replica's, so that it would often go to one that has nothing of it.
    """
    most = limit
    while True:
        chosen = dict.fromkeys(each for hashes in sequences for each in _spread(hashes, most))
        if len(chosen) <= limit or most == 1:
            return tuple(chosen)[:limit]
        most //= 2


def _spread(hashes: Sequence[int], most: int) -> Sequence[int]:
    """The last of the hashes and every k-th, `most` in all or one more."""
    stride = 1
    while len(hashes) > most * stride:
        stride *= 2
    every = hashes[stride - 1 :: stride]
    return every if len(hashes) % stride == 0 else [*every, hashes[-1]]
