"""The cache factory of an injected model: creates cache layers, plans their memory, saves and loads caches."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from transformers.cache_utils import CacheLayerMixin

from hetero_kv.engine.resident_prefix import NO_RESIDENT_PREFIX, ResidentPrefix
from hetero_kv.engine.store import Store
from hetero_kv.errors import HeteroKVError, OutOfMemoryError


class ModelState(Protocol):
    """Everything that determines the model's output, at one moment."""

    def is_like(self, other: Any) -> bool:
        """Whether this state equals that of another moment."""


class CacheFactory(Protocol):
    """Attached to a model by `inject`: it knows the cache of each layer, and how much fits into memory."""

    @property
    def one_at_a_time(self) -> AbstractContextManager[Any]:
        """A context that admits one thread at a time; other threads wait.

        All caches of a model share its operators, and forks share blocks.
        """

    def max_seq_len(
        self, requested: int | None, batch: int, forks: int, resident: ResidentPrefix = NO_RESIDENT_PREFIX
    ) -> int:
        """Capacity in tokens of each of `batch` sequences and of their forks; `resident` is the resident prefix."""

    def planned_store(
        self, requested: int | None, batch: int, forks: int, resident: ResidentPrefix, own: Store | None
    ) -> Store:
        """An empty store of that capacity, in memory that no other cache of this process has reserved.

        Args:
            own: the store that the new one replaces, if any.
        """

    def cache_layers(self) -> list[CacheLayerMixin]:
        """One empty cache layer per layer of the model."""

    def state(self) -> ModelState:
        """The model's weights, adapters and hooks at this moment."""

    def adapters(self) -> tuple[frozenset[str], ...]:
        """The effective adapters of each adapted module at this moment, as known since the last `state`; fast."""

    def save(self, path: str | Path, cache: Any, tokens: Any) -> None:
        """Write the contents of a HeteroCache into a file; see `HeteroCache.save`."""

    def load(self, path: str | Path, **settings: Any) -> Any:
        """Load a HeteroCache from such a file; see `HeteroCache.load`."""

    def ran_out_of_memory(
        self, error: Exception, batch: int, *, stored: int, tokens: int, capacity: int | None, stored_bytes: int
    ) -> OutOfMemoryError:
        """The error for a forward that ran out of memory.

        Args:
            batch: sequences.
            stored: tokens of each sequence before the forward.
            tokens: new tokens of each sequence.
            capacity: tokens that the blocks are planned for.
            stored_bytes: bytes of DRAM of the stored tokens.
        """

    def stray(self) -> HeteroKVError:
        """The error for a model without these rules, or after their removal, that writes to one of their caches."""


def injected(model: nn.Module) -> CacheFactory:
    """The rules in a model. Raises HeteroKVError when it has none."""
    maker: CacheFactory | None = getattr(model, "hetero_kv_injection", None)
    if maker is None:
        raise HeteroKVError(
            f"{type(model).__name__} has no rules injected; call hetero_kv.inject(model, rules) before HeteroCache"
        )
    return maker
