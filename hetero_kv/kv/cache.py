"""`HeteroCache`: the transformers cache of a model that rules have been injected into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from hetero_kv.errors import HeteroKVError
from hetero_kv.kv.paged_layer import PagedLayer

#: Called while a prompt prefills: (layers done, layers in all, tokens of the layer done, tokens of the prompt).
Progress = Callable[[int, int, int, int], None]


class CacheMaker(Protocol):
    """What `inject` leaves on a model: it knows which layer needs which cache."""

    def new_cache_layers(self, max_seq_len: int | None) -> list[CacheLayerMixin]:
        """One cache layer per layer of the model."""


class HeteroCache(Cache):
    """The KV cache of one batch of sequences of equal length: `model.generate(**inputs, past_key_values=cache)`.

    Operator layers keep their tokens in DRAM blocks (`PagedLayer`) or in a window (`WindowLayer`); layers that the
    rules leave as they are get transformers' own cache layer.

    Args:
        model: a model that `inject` was called on.
        max_seq_len: capacity in tokens; None takes the rules' `max_seq_len`.
        on_progress: called after every prefilled chunk.

    Raises HeteroKVError when the model is not injected, or `max_seq_len` does not fit into memory.
    """

    def __init__(self, model: nn.Module, max_seq_len: int | None = None, on_progress: Progress | None = None) -> None:
        maker: CacheMaker | None = getattr(model, "hetero_kv_injection", None)
        if maker is None:
            raise HeteroKVError(
                f"{type(model).__name__} has no rules injected; call hetero_kv.inject(model, rules) before HeteroCache"
            )
        super().__init__(layers=maker.new_cache_layers(max_seq_len))
        self.on_progress = on_progress

    @property
    def max_seq_len(self) -> int | None:
        """Capacity in tokens; None when no layer is bounded."""
        bounds = [layer.capacity for layer in self.layers if isinstance(layer, PagedLayer)]
        return min(bounds) if bounds else None

    @property
    def block_recall(self) -> list[float | None]:
        """Per layer, the mean share of the full attention mass that the attended blocks covered.

        None for layers where it was not measured (`measure_recall`).
        """
        return [getattr(getattr(layer, "state", None), "recall", None) for layer in self.layers]

    def require_room(self, batch: int, tokens: int) -> None:
        """Raise unless `tokens` more of `batch` sequences can be added to every layer.

        Raises:
            CacheFullError: they do not fit.
            HeteroKVError: the cache holds another number of sequences.
        """
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                layer.require_room(tokens)
                if layer.rows and len(layer.rows) != batch:
                    raise HeteroKVError(
                        f"the cache holds {len(layer.rows)} sequences and was given {batch}; use a HeteroCache for "
                        "each batch, or cache.reset() between them"
                    )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens (transformers passes a negative number).

        Raises HeteroKVError when a layer keeps only a window, whose older tokens are gone.
        """
        kinds = {type(layer).__name__ for layer in self.layers if not isinstance(layer, PagedLayer | DynamicLayer)}
        if kinds:
            raise HeteroKVError(
                f"this cache cannot go back (assisted decoding?): it has layers of kind {', '.join(kinds)}"
            )
        for layer in self.layers:
            layer.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: sequences of a HeteroCache are set by its first prompt. Raises HeteroKVError."""
        raise HeteroKVError("a HeteroCache cannot repeat its sequences; repeat the prompt before generating")

    def batch_select_indices(self, indices: Any) -> None:
        """Refused: sequences of a HeteroCache are set by its first prompt. Raises HeteroKVError."""
        raise HeteroKVError("a HeteroCache cannot drop some of its sequences; generate them in batches of their own")

    @property
    def dram_bytes(self) -> int:
        """Bytes that the stored tokens take in operator layers."""
        return sum(getattr(layer, "dram_bytes", 0) for layer in self.layers)

    def report_progress(self, layer_idx: int, done: int, total: int) -> None:
        """Tell `on_progress` that layer `layer_idx` has prefilled `done` of `total` tokens."""
        if self.on_progress is not None:
            self.on_progress(layer_idx + (done == total), len(self.layers), done, total)


@contextmanager
def undo_on_error(cache: Cache) -> Iterator[None]:
    """Within this context an exception, Ctrl-C included, takes every layer back to where it was before."""
    before = [_checkpoint(layer) for layer in cache.layers]
    try:
        yield
    except BaseException:
        for layer, state in zip(cache.layers, before, strict=True):
            _restore(layer, state)
        raise


def _checkpoint(layer: CacheLayerMixin) -> Any:
    if hasattr(layer, "checkpoint"):
        return layer.checkpoint()
    # transformers' own dynamic layers grow by concatenation, so that the old tensors stay valid.
    return {
        name: layer.__dict__[name]
        for name in ("keys", "values", "is_initialized", "cumulative_length")
        if name in layer.__dict__
    }


def _restore(layer: CacheLayerMixin, state: Any) -> None:
    if hasattr(layer, "restore"):
        layer.restore(state)
    else:
        layer.__dict__.update(state)
