"""What an injected model has for its caches: who makes their layers, plans their memory, saves and loads them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from transformers.cache_utils import CacheLayerMixin

from hetero_kv.engine.held import NOTHING_HELD, Held
from hetero_kv.engine.store import Store
from hetero_kv.errors import HeteroKVError, OutOfMemoryError


class ModelState(Protocol):
    """What decides what a model computes, at some moment."""

    def is_like(self, other: Any) -> bool:
        """Whether it is the same as at another moment."""


class CacheMaker(Protocol):
    """What `inject` leaves on a model: it knows which layer needs which cache, and what fits into memory."""

    @property
    def one_at_a_time(self) -> AbstractContextManager[Any]:
        """A context that one thread at a time is in, and others wait for: operators, and blocks that forks share, are
        the same for all caches of a model."""

    def max_seq_len(self, wanted: int | None, batch: int, forks: int, held: Held = NOTHING_HELD) -> int:
        """The capacity in tokens of each of `batch` sequences, and of theirs in every fork; `held` is there already."""

    def planned_store(self, wanted: int | None, batch: int, forks: int, held: Held, own: Store | None) -> Store:
        """An empty store of such a capacity, in memory that no other cache of this process is to have.

        own: the store that it takes the place of, if it does.
        """

    def cache_layers(self) -> list[CacheLayerMixin]:
        """One empty cache layer per layer of the model."""

    def state(self) -> ModelState:
        """The model's weights, adapters and hooks as they are now."""

    def save(self, path: str | Path, cache: Any, tokens: Any) -> None:
        """Write what a HeteroCache holds into a file; see `HeteroCache.save`."""

    def load(self, path: str | Path, **settings: Any) -> Any:
        """A HeteroCache that goes on from such a file; see `HeteroCache.load`."""

    def ran_out_of_memory(
        self, error: Exception, batch: int, *, stored: int, tokens: int, capacity: int | None, held: int
    ) -> OutOfMemoryError:
        """What to raise when a forward of `tokens` behind `stored` of each of `batch` sequences found no memory.

        `held` bytes of DRAM are taken by what is stored, in blocks for `capacity` tokens.
        """

    def stray(self) -> HeteroKVError:
        """What to raise where a model that these rules are not in, or no longer, gives keys to a cache of theirs."""


def injected(model: nn.Module) -> CacheMaker:
    """The rules in a model. Raises HeteroKVError where there are none."""
    maker: CacheMaker | None = getattr(model, "hetero_kv_injection", None)
    if maker is None:
        raise HeteroKVError(
            f"{type(model).__name__} has no rules injected; call hetero_kv.inject(model, rules) before HeteroCache"
        )
    return maker
