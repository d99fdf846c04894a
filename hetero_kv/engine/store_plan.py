"""The store of a cache, and for how many sequences its memory is planned."""

from __future__ import annotations

from copy import copy

from hetero_kv.engine.cache_factory import CacheFactory
from hetero_kv.engine.equal_length_group import EqualLengthGroup
from hetero_kv.engine.reservations import reserved_by_others
from hetero_kv.engine.resident_prefix import NO_RESIDENT_PREFIX, ResidentPrefix
from hetero_kv.engine.store import Store
from hetero_kv.errors import HeteroKVError


class StorePlan:
    """Plans the store of one cache. The first plan covers one sequence; a larger batch is planned when it comes.

    Args:
        maker: plans the memory of its model's layers.
        max_seq_len: capacity of each sequence, tokens; None takes the rules' `max_seq_len`.
        forks: number of forks whose growth to `max_seq_len` is planned too.
        resident: the resident prefix: KV that a file already supplies.
        store: a store that caches share (`Store.is_common`), which needs no plan; None plans one of its own.

    Raises HeteroKVError for a `store` with other rules, `max_seq_len` or `forks`.
    """

    def __init__(
        self, maker: CacheFactory, max_seq_len: int | None, forks: int, resident: ResidentPrefix, store: Store | None
    ) -> None:
        if store is not None and (store.maker is not maker or max_seq_len is not None or forks):
            raise HeteroKVError(
                "the store was made for other rules or another model, or max_seq_len or forks was given beside it; "
                "take one of model.hetero_kv_injection.common_store(max_seq_len), which fixes both"
            )
        self._maker, self._max_seq_len, self._forks = maker, max_seq_len, forks
        self._resident, self._common = resident, store
        # Number of sequences in the plan. Blocks are allocated when the first tokens come.
        self._sequences = 1

    def first_store(self) -> Store:
        """The store of a new cache. Raises OutOfMemoryError when `max_seq_len` does not fit into memory."""
        return self._planned(1, None) if self._common is None else self._common

    def empty_store(self, store: Store) -> Store:
        """The store of a cache that drops all of its tokens, which are in `store`."""
        # With forks, the plan covered all of them together.
        keeps_plan = self._sequences or store.is_common
        return store.empty_copy() if keeps_plan else Store(store.capacity, self._forks)

    def enlarge(self, group: EqualLengthGroup, batch: int) -> None:
        """Give an empty group a store for `batch` sequences, if the plan covers fewer or other caches need memory.

        Raises OutOfMemoryError when they do not fit into memory.
        """
        store, others = group.store, reserved_by_others(group.store)
        is_crowded = store.waits and (others.planned > 0 or not others.is_nothing)
        if group.layouts and not store.is_common and (is_crowded or batch > self._sequences):
            sequences = max(batch, self._sequences)
            group.store = self._planned(sequences, store)
            self._sequences = sequences

    def fork(self) -> StorePlan:
        """The plan of a fork. Both share the present plan, until one is emptied and plans again."""
        self._sequences = 0
        return copy(self)

    def forget_resident(self) -> None:
        """Plan again, without the resident prefix, when the next tokens come."""
        self._resident, self._sequences = NO_RESIDENT_PREFIX, 0

    def _planned(self, sequences: int, present: Store | None) -> Store:
        return self._maker.planned_store(self._max_seq_len, sequences, self._forks, self._resident, present)
