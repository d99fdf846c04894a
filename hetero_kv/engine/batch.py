"""The rows of a batch: cohorts of rows of one length, and the columns that they have come in."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Self

import torch

from hetero_kv.engine.cache_maker import CacheMaker
from hetero_kv.engine.cohort import Cohort, CohortSnapshot
from hetero_kv.engine.columns import Columns
from hetero_kv.engine.held import NOTHING_HELD, Held
from hetero_kv.engine.interrupts import completed
from hetero_kv.engine.reservations import NOTHING_RESERVED, reserved_beside
from hetero_kv.engine.room import require_room, room
from hetero_kv.engine.sequence import Sequence
from hetero_kv.engine.store import Store
from hetero_kv.errors import HeteroKVError


@dataclass(frozen=True)
class BatchSnapshot:
    """What `Batch.rollback` comes back to."""

    cohorts: tuple[Cohort, ...]
    states: tuple[CohortSnapshot, ...]
    columns: Columns


@dataclass(frozen=True)
class Span:
    """New tokens of a cohort in a call of the model.

    Attributes:
        rows: of the batch.
        columns: of the call's tokens.
    """

    cohort: Cohort
    rows: slice
    columns: slice

    @property
    def tokens(self) -> int:
        """New tokens of each row."""
        return self.columns.stop - self.columns.start


class Batch:
    """Sequences that pass through a model together, as cohorts of those of one length.

    Args:
        maker: makes the layers of a cohort, and plans their memory.
        max_seq_len: capacity of each sequence, tokens; None takes the rules' `max_seq_len`.
        forks: that are to have room to grow to `max_seq_len` too.
        held: what is there of the sequences already, in a file from which they come.

    Attributes:
        cohorts: in the order of the rows.
        columns: so far, and which are padding.

    Raises OutOfMemoryError when `max_seq_len` does not fit into memory. It is planned for one sequence, and for a batch
    when its first tokens come.
    """

    def __init__(self, maker: CacheMaker, max_seq_len: int | None, forks: int, held: Held = NOTHING_HELD) -> None:
        self._maker, self._wanted, self._forks, self._held = maker, max_seq_len, forks, held
        # Sequences that the capacity is planned for; blocks are had when the first tokens come.
        self._planned_batch = 1
        self._begin_in(maker.planned_store(max_seq_len, 1, forks, held, None))

    def _begin_anew(self) -> None:
        store = self.cohorts[0].store
        # What forks share was planned for all of them.
        self._begin_in(store.anew() if self._planned_batch else Store(store.capacity, self._forks))

    def _begin_in(self, store: Store) -> None:
        self._have([Cohort(self._maker.cache_layers(), store)])
        self.columns = Columns()

    def _have(self, cohorts: Rows[Cohort]) -> None:
        self.cohorts = list(cohorts)
        self._present(self.cohorts[0])

    def _present(self, cohort: Cohort) -> None:
        """What follows when this cohort is the first, or passes through the model."""

    # -- rows

    @property
    def sequences(self) -> list[Sequence]:
        """One per row of the batch."""
        return [sequence for cohort in self.cohorts for sequence in cohort.sequences]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [sequence.length for sequence in self.sequences]

    @property
    def attention_mask(self) -> torch.Tensor:
        """Which of the columns so far hold a token of each row, [rows, columns] int64: the past of the next mask."""
        return self.columns.mask(len(self.sequences))

    @property
    def max_seq_len(self) -> int | None:
        """Capacity of each sequence, tokens; None when no layer keeps every token."""
        return min((cohort.store.capacity for cohort in self.cohorts if cohort.layouts), default=None)

    @property
    def room(self) -> int | None:
        """Tokens that can still be added to each sequence; None when no layer keeps every token."""
        return room(self.cohorts)

    def require_room(self, batch: int, tokens: int) -> None:
        """Raise unless `tokens` more of `batch` sequences can be added to every layer.

        Raises:
            CacheFullError: they do not fit.
            OutOfMemoryError: they are the first, and memory has no room for that many sequences of `max_seq_len`.
            HeteroKVError: the cache holds another number of sequences.
        """
        self._open(batch, tokens)
        require_room([(cohort, tokens) for cohort in self.cohorts])

    def _open(self, batch: int, most: int) -> None:
        """Have `batch` rows: the first ones, for at most `most` tokens, or those that are there."""
        held = len(self.sequences)
        if held != batch and held and self.columns.count:
            raise HeteroKVError(
                f"the cache holds {held} sequences and was given {batch}; use a HeteroCache for "
                "each batch, or cache.reset() between them"
            )
        if held == batch:
            return
        if held:
            self._begin_anew()
        first = self.cohorts[0]
        crowded = first.store.waits and reserved_beside(first.store) != NOTHING_RESERVED
        if first.layouts and (crowded or batch > self._planned_batch):
            planned = max(batch, self._planned_batch)
            first.store = self._maker.planned_store(self._wanted, planned, self._forks, self._held, first.store)
            self._planned_batch = planned
        # Before any block is had: a prompt that is too long leaves the cache empty.
        require_room([(first, most)])
        first.store.provide(first.layouts, batch)
        first.open(batch)

    def begin_restored(self, held: Rows[tuple[int, int]]) -> list[Cohort]:
        """Have cohorts of so many rows and room for so many tokens each, to be filled from a file.

        Raises as `require_room`.
        """
        self._open(sum(rows for rows, _ in held), max(tokens for _, tokens in held))
        store = self.cohorts[0].store
        cohorts = [Cohort(self._maker.cache_layers(), store) for _ in held]
        for cohort, (rows, _) in zip(cohorts, held, strict=True):
            cohort.open(rows)
        self._have(cohorts)
        return cohorts

    def spans(self, tokens: Rows[int], width: int) -> list[Span]:
        """The cohorts and their part of a call of `width` columns, of which the last `tokens` of each row are tokens.

        Rows that had equal lengths and get different ones become cohorts of their own. Rows without a token have no
        span.

        Raises as `require_room`.
        """
        self._open(len(tokens), max(tokens))
        before = self.cohorts
        if len(self.cohorts) > 1 or len(set(tokens)) > 1:
            self._split(tokens)
        spans, row = [], 0
        for cohort in self.cohorts:
            rows = slice(row, row + len(cohort.sequences))
            if tokens[row]:
                spans.append(Span(cohort, rows, slice(width - tokens[row], width)))
            row = rows.stop
        anew = set().union(*(span.cohort.expect(span.tokens) for span in spans))
        # Rows that part keep their blocks, and a rollback comes back to the cohort that they were.
        for cohort in {*before, *self.cohorts} if anew else ():
            cohort.close_anew(anew)
        require_room([(span.cohort, span.tokens) for span in spans])
        return spans

    def _split(self, tokens: Rows[int]) -> None:
        """Let neighbouring rows of one cohort with equal numbers of new tokens be cohorts."""
        cohorts, row = [], 0
        for cohort in self.cohorts:
            count = len(cohort.sequences)
            runs = [list(run) for _, run in groupby(range(count), key=lambda index: tokens[row + index])]
            if len(runs) == 1:
                cohorts.append(cohort)
            else:
                cohorts += [cohort.taken(range(run[0], run[-1] + 1)) for run in runs]
            row += count
        self._have(cohorts)

    # -- going back, and rows that come and go

    def snapshot(self) -> BatchSnapshot:
        """What `rollback` needs to come back to the present state."""
        states = tuple(cohort.snapshot() for cohort in self.cohorts)
        return BatchSnapshot(tuple(self.cohorts), states, self.columns)

    def rollback(self, snapshot: BatchSnapshot) -> None:
        """Forget what was stored since `snapshot`, and what its queries looked at. May be called again if it fails."""
        self.columns = snapshot.columns
        self._have(snapshot.cohorts)
        for cohort, state in zip(snapshot.cohorts, snapshot.states, strict=True):
            cohort.rollback(state)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` columns, a negative number as in transformers; of no rows, nothing.

        Raises HeteroKVError for a positive number, and when a layer keeps only a window, whose older tokens are gone.
        """
        if tokens_to_remove > 0:
            raise HeteroKVError(
                f"crop was given {tokens_to_remove}; it takes how many columns to forget as a negative number: "
                f"crop({-tokens_to_remove}) forgets {tokens_to_remove}"
            )
        if not self.sequences:
            return
        for cohort in self.cohorts:
            cohort.require_croppable()
        columns = max(0, self.columns.count + tokens_to_remove)
        removed = self.columns.tokens_after(columns, len(self.sequences))
        cut = self.columns.cut(columns)
        before = self.snapshot()
        lengths: list[int] = []

        def let_go() -> None:
            for cohort, length in zip(self.cohorts, lengths, strict=True):
                cohort.cut(length)
            self.columns = cut

        def go_back() -> None:
            self.rollback(before)

        remedy = go_back
        try:
            if len(set(removed)) > 1:
                self._split(removed)
            rows = accumulate((len(cohort.sequences) for cohort in self.cohorts), initial=0)
            lengths += [cohort.length - removed[row] for cohort, row in zip(self.cohorts, rows, strict=False)]
            for cohort, length in zip(self.cohorts, lengths, strict=True):
                cohort.crop_layers(length)
            # From here on there are blocks that nobody can come back to.
            remedy = let_go
            let_go()
        except BaseException:
            completed(remedy)
            raise

    @staticmethod
    def _all_or_nothing(change: Callable[[], None], *batches: Batch) -> None:
        """Let rows of these batches come and go; where that fails, they are those that there were."""
        before = [(batch, batch.cohorts, batch.columns) for batch in batches]

        def go_back() -> None:
            for batch, cohorts, columns in before:
                batch._have(cohorts)
                batch.columns = columns

        try:
            change()
        except BaseException:
            completed(go_back)
            raise

    def select(self, rows: Rows[int] | torch.Tensor) -> None:
        """Let row i be what row `rows[i]` was: rows leave, are reordered, or, named twice, go two ways.

        Raises HeteroKVError for a row that is not there, or for none.
        """
        # Of a tensor on a device in one copy, not a number at a time.
        chosen = rows.tolist() if isinstance(rows, torch.Tensor) else [int(row) for row in rows]
        held = len(self.sequences)
        if not chosen or not all(0 <= row < held for row in chosen):
            raise HeteroKVError(f"rows are {chosen}, and the cache holds {held}; give indices from 0 to {held - 1}")
        if chosen == list(range(held)):
            return
        homes = [(cohort, row) for cohort in self.cohorts for row in range(len(cohort.sequences))]
        runs = groupby((homes[row] for row in chosen), key=lambda home: id(home[0]))
        cohorts = []
        for _, run in runs:
            members = list(run)
            cohorts.append(members[0][0].selected([row for _, row in members]))

        def change() -> None:
            self._have(cohorts)
            self.columns = self.columns.select(chosen)

        self._all_or_nothing(change, self)

    def extend(self, other: Self) -> None:
        """Let the rows of `other` join behind; `other` is empty then.

        Where one has more columns, the other's rows are left-padded (`attention_mask`).

        Raises HeteroKVError when the other is of another model or rules, or is this one.
        """
        if other is self or other._maker is not self._maker:
            raise HeteroKVError(
                "only another HeteroCache of the same injected model can join; fork() this one to have its rows twice, "
                "and prefill other models' prompts anew"
            )
        if not other.sequences:
            return

        def change() -> None:
            if not self.sequences:
                self.columns = other.columns
                self._have(other.cohorts)
            else:
                self.columns = self.columns.joined(len(self.sequences), other.columns, len(other.sequences))
                self._have([*self.cohorts, *other.cohorts])
            other._begin_anew()

        self._all_or_nothing(change, self, other)
