"""The rows of a batch, as groups of equal length, and the padding mask of their columns."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from itertools import accumulate, groupby
from typing import Self

import torch

from hetero_kv.engine.batch_slice import BatchSlice, BatchSnapshot
from hetero_kv.engine.cache_factory import CacheFactory
from hetero_kv.engine.capacity import require_room, room
from hetero_kv.engine.checkpoint import Checkpoint
from hetero_kv.engine.equal_length_group import NO_COPIES, EqualLengthGroup
from hetero_kv.engine.interrupts import run_to_completion
from hetero_kv.engine.padding_mask import PaddingMask
from hetero_kv.engine.resident_prefix import NO_RESIDENT_PREFIX, ResidentPrefix
from hetero_kv.engine.sequence import Sequence
from hetero_kv.engine.store import Store
from hetero_kv.engine.store_plan import StorePlan
from hetero_kv.errors import HeteroKVError


class Batch:
    """Sequences that pass through a model together, as groups: rows of equal length form one group.

    Args:
        maker: creates the layers of a group and plans their memory.
        max_seq_len, forks, resident, store: as for `StorePlan`.

    Attributes:
        groups: in the order of the rows.
        columns: the padding mask of the columns so far.

    Raises OutOfMemoryError when `max_seq_len` does not fit into memory. The plan covers one sequence; a larger batch is
    planned when its first tokens come.
    """

    def __init__(
        self, maker: CacheFactory, max_seq_len: int | None, forks: int, resident: ResidentPrefix = NO_RESIDENT_PREFIX,
        store: Store | None = None,
    ) -> None:  # fmt: skip
        self._maker, self._plan = maker, StorePlan(maker, max_seq_len, forks, resident, store)
        self._begin_in(self._plan.first_store())

    def _begin_again(self) -> None:
        self._begin_in(self._plan.empty_store(self.groups[0].store))

    def _begin_in(self, store: Store) -> None:
        self._set_groups([EqualLengthGroup(self._maker.cache_layers(), store)])
        self.columns = PaddingMask()

    def _set_groups(self, groups: Rows[EqualLengthGroup]) -> None:
        self.groups = list(groups)

    # -- rows

    @property
    def sequences(self) -> list[Sequence]:
        """One sequence per row of the batch."""
        return [sequence for group in self.groups for sequence in group.sequences]

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each row."""
        return [sequence.length for sequence in self.sequences]

    @property
    def attention_mask(self) -> torch.Tensor:
        """The padding mask of the past, [rows, columns] int64: 1 where a column holds a token of the row."""
        return self.columns.mask(len(self.sequences))

    @property
    def max_seq_len(self) -> int | None:
        """Capacity of each sequence, tokens; None when no layer keeps every token."""
        return min((group.store.capacity for group in self.groups if group.layouts), default=None)

    @property
    def room(self) -> int | None:
        """Tokens that each sequence can still take; None when no layer keeps every token."""
        return room(self.groups)

    def require_room(self, batch: int, tokens: int) -> None:
        """Raise unless every layer can take `tokens` more tokens of `batch` sequences.

        Raises:
            CacheFullError: the tokens do not fit.
            OutOfMemoryError: the tokens are the first, and memory cannot hold that many sequences of `max_seq_len`.
            HeteroKVError: the cache has another number of sequences.
        """
        self._open(batch, tokens)
        require_room([(group, tokens) for group in self.groups])

    def _open(self, batch: int, most: int) -> None:
        """Make room for `batch` rows of at most `most` tokens, or check that `batch` is the present number."""
        count = len(self.sequences)
        if count != batch and count and self.columns.count:
            raise HeteroKVError(
                f"the cache holds {count} sequences, but the call has {batch}; use a HeteroCache for each batch, or "
                "call cache.reset() between them"
            )
        if count == batch:
            return
        if count:
            self._begin_again()
        first = self.groups[0]
        self._plan.enlarge(first, batch)
        # Checked before any block is allocated: a prompt that is too long leaves the cache empty.
        require_room([(first, most)])
        first.store.provide(first.layouts, batch)
        first.open(batch)

    def begin_restored(self, shapes: Rows[tuple[int, int]]) -> list[EqualLengthGroup]:
        """Create groups that a file will fill.

        Args:
            shapes: (rows, tokens) of each group.

        Raises as `require_room`.
        """
        self._open(sum(rows for rows, _ in shapes), max(tokens for _, tokens in shapes))
        store = self.groups[0].store
        groups = [EqualLengthGroup(self._maker.cache_layers(), store) for _ in shapes]
        for group, (rows, _) in zip(groups, shapes, strict=True):
            group.open(rows)
        self._set_groups(groups)
        return groups

    def plan_batch(self, tokens: Rows[int], width: int) -> list[BatchSlice]:
        """Plan a call: split its rows into groups and return the part of the call of each.

        A group whose rows get different numbers of tokens is split. Rows without a new token have no slice.

        Args:
            tokens: number of new tokens of each row, the last ones of the row.
            width: columns of the call.

        Raises as `require_room`.
        """
        self._open(len(tokens), max(tokens))
        before = self.groups
        if len(self.groups) > 1 or len(set(tokens)) > 1:
            self._split(tokens)
        slices, row = [], 0
        for group in self.groups:
            rows = slice(row, row + len(group.sequences))
            if tokens[row]:
                slices.append(BatchSlice(group, rows, slice(width - tokens[row], width)))
            row = rows.stop
        self.reserve(slices, before)
        return slices

    def reserve(self, slices: Rows[BatchSlice], before: Rows[EqualLengthGroup] = ()) -> None:
        """Announce new tokens to all layers, and check that they fit.

        Args:
            before: the groups from which those of `slices` were split.

        Raises as `require_room`.
        """
        # Drafted tokens are decoded one by one.
        reopened = set().union(*(each.group.expect(1 if each.is_draft else each.tokens) for each in slices))
        # Split rows keep their blocks, and a rollback returns to the group before the split.
        for group in {*before, *self.groups} if reopened else ():
            group.unfinalize(reopened)
        require_room([(each.group, each.tokens) for each in slices], [each.rows for each in slices])

    def _split(self, tokens: Rows[int]) -> None:
        """Split each group into runs of neighbouring rows with equal `tokens`."""
        groups, row = [], 0
        for group in self.groups:
            count = len(group.sequences)
            runs = [list(run) for _, run in groupby(range(count), key=lambda index: tokens[row + index])]
            if len(runs) == 1:
                groups.append(group)
            else:
                groups += [group.split_off(range(run[0], run[-1] + 1)) for run in runs]
            row += count
        self._set_groups(groups)

    # -- rollback, and changes of rows

    def snapshot(self) -> BatchSnapshot:
        """The present state, for `rollback`."""
        states = tuple(group.snapshot() for group in self.groups)
        return BatchSnapshot(tuple(self.groups), states, self.columns)

    def rollback(self, snapshot: BatchSnapshot) -> None:
        """Return to `snapshot`: drop newer tokens and the queries' observations. Repeatable after a failure."""
        self.columns = snapshot.columns
        self._set_groups(snapshot.groups)
        for group, state in zip(snapshot.groups, snapshot.states, strict=True):
            group.rollback(state)

    def checkpoint(self) -> Checkpoint | None:
        """A copy of the state of layers that do not keep every token, to which `crop` can return a single sequence.

        None if every layer keeps every token, so that no copy is needed, and if a layer cannot return to a copy.
        """
        return self.groups[0].checkpoint() if len(self.sequences) == 1 else None

    def crop(self, tokens_to_remove: int, checkpoint: Checkpoint | None = None) -> None:
        """Drop the last `-tokens_to_remove` columns, a negative number as in transformers. An empty batch stays empty.

        Args:
            checkpoint: of this sequence, or of one that it was forked from, with as many tokens as remain.

        Raises HeteroKVError for a positive number, for a checkpoint of another length, and when a layer keeps only a
        window or a state, so that older tokens are lost, and the checkpoint has no copy of it.
        """
        if tokens_to_remove > 0:
            raise HeteroKVError(
                f"crop received {tokens_to_remove}; pass the number of columns to drop as a negative number: "
                f"crop({-tokens_to_remove}) drops {tokens_to_remove}"
            )
        if not self.sequences:
            return
        columns = max(0, self.columns.count + tokens_to_remove)
        copies = NO_COPIES if checkpoint is None else checkpoint.layers
        if checkpoint is not None and (len(self.sequences) > 1 or checkpoint.length != columns):
            raise HeteroKVError(
                f"a checkpoint of {checkpoint.length} tokens cannot cut {len(self.sequences)} sequences to {columns}; "
                "pass one of that length, and one sequence"
            )
        removed = self.columns.tokens_after(columns, len(self.sequences))
        cut = self.columns.cut(columns)
        before = self.snapshot()
        lengths: list[int] = []

        def let_go() -> None:
            for group, length in zip(self.groups, lengths, strict=True):
                group.cut(length)
            self.columns = cut

        def go_back() -> None:
            self.rollback(before)

        remedy = go_back
        try:
            if len(set(removed)) > 1:
                self._split(removed)
            rows = accumulate((len(group.sequences) for group in self.groups), initial=0)
            lengths += [group.length - removed[row] for group, row in zip(self.groups, rows, strict=False)]
            for group, length in zip(self.groups, lengths, strict=True):
                group.require_croppable(length, copies)
            for group, length in zip(self.groups, lengths, strict=True):
                group.crop_layers(length, copies)
            # From here on blocks are freed, so that a rollback is no longer possible.
            remedy = let_go
            let_go()
        except BaseException:
            run_to_completion(remedy)
            raise

    @staticmethod
    def _all_or_nothing(change: Callable[[], None], *batches: Batch) -> None:
        """Change the rows of these batches; restore them all when the change fails."""
        before = [(batch, batch.groups, batch.columns) for batch in batches]

        def go_back() -> None:
            for batch, groups, columns in before:
                batch._set_groups(groups)
                batch.columns = columns

        try:
            change()
        except BaseException:
            run_to_completion(go_back)
            raise

    def select(self, rows: Rows[int] | torch.Tensor) -> None:
        """Make row i the present row `rows[i]`: drops, reorders or duplicates rows.

        Raises HeteroKVError for a row that does not exist, or an empty selection.
        """
        # A tensor on a device is copied once, not number by number.
        chosen = rows.tolist() if isinstance(rows, torch.Tensor) else [int(row) for row in rows]
        count = len(self.sequences)
        if not chosen or not all(0 <= row < count for row in chosen):
            raise HeteroKVError(
                f"rows are {chosen}, but the cache holds {count} sequences; pass indices from 0 to {count - 1}"
            )
        if chosen == list(range(count)):
            return
        homes = [(group, row) for group in self.groups for row in range(len(group.sequences))]
        runs = groupby((homes[row] for row in chosen), key=lambda home: id(home[0]))
        groups = []
        for _, run in runs:
            members = list(run)
            groups.append(members[0][0].selected([row for _, row in members]))

        def change() -> None:
            self._set_groups(groups)
            self.columns = self.columns.select(chosen)

        self._all_or_nothing(change, self)

    def extend(self, other: Self) -> None:
        """Append the rows of `other`, which is empty afterwards.

        The side with fewer columns is left-padded (`attention_mask`).

        Raises HeteroKVError when `other` has another model or other rules, or is this batch.
        """
        if other is self or other._maker is not self._maker:
            raise HeteroKVError(
                "only another HeteroCache of the same injected model can join; call fork() to duplicate the rows of "
                "this one, and prefill other models' prompts again"
            )
        if not other.sequences:
            return

        def change() -> None:
            if not self.sequences:
                self.columns = other.columns
                self._set_groups(other.groups)
            else:
                self.columns = self.columns.joined(len(self.sequences), other.columns, len(other.sequences))
                self._set_groups([*self.groups, *other.groups])
            other._begin_again()

        self._all_or_nothing(change, self, other)
