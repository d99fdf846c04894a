"""`HeteroCache`: the transformers cache of a model that rules have been injected into."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol, TypeVar

from torch import nn
from transformers import AutoTokenizer
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from hetero_kv.engine.operator_layer import OperatorLayer
from hetero_kv.engine.sequence_layer import PromptPart, SequenceLayer
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.bounded.layer import BoundedLayer
from hetero_kv.families.shadowkv.layer import LowRankLayer

#: Called while a prompt prefills: (layers done, layers in all, tokens of the layer done, tokens of the prompt).
Progress = Callable[[int, int, int, int], None]


class CacheMaker(Protocol):
    """What `inject` leaves on a model: it knows which layer needs which cache, and what fits into memory."""

    def max_seq_len(self, wanted: int | None, batch: int, forks: int) -> int:
        """The capacity in tokens of each of `batch` sequences and of theirs in every fork."""

    def cache_layers(self, capacity: int) -> list[CacheLayerMixin]:
        """One cache layer per layer of the model, for `capacity` tokens."""


class HeteroCache(Cache):
    """The KV cache of one batch of sequences of equal length: `model.generate(**inputs, past_key_values=cache)`.

    Operator layers keep every token (`PagedLayer`, `LowRankLayer`), a window (`WindowLayer`) or a number of entries
    (`BoundedLayer`); layers that the rules leave as they are get transformers' own cache layer.

    Args:
        model: a model that `inject` was called on.
        max_seq_len: capacity of each sequence, tokens; None takes the rules' `max_seq_len`.
        on_progress: called after every prefilled chunk.
        forks: forks that are to have room to grow to `max_seq_len` too, beside this cache; DRAM is planned for them.
            Without, a cache and its forks share the room that one sequence has.
        tokenizer: for eviction policies that run a text of their own; None takes the one of the model's directory.

    Raises HeteroKVError when the model is not injected, or `max_seq_len` does not fit into memory. It is planned for
    one sequence; a batch of several is planned when its prompt comes, and then refused, or `auto` made shorter, before
    anything is allocated.
    """

    def __init__(
        self,
        model: nn.Module,
        max_seq_len: int | None = None,
        on_progress: Progress | None = None,
        *,
        forks: int = 0,
        tokenizer: Any = None,
    ) -> None:
        maker: CacheMaker | None = getattr(model, "hetero_kv_injection", None)
        if maker is None:
            raise HeteroKVError(
                f"{type(model).__name__} has no rules injected; call hetero_kv.inject(model, rules) before HeteroCache"
            )
        super().__init__(layers=maker.cache_layers(maker.max_seq_len(max_seq_len, 1, forks)))
        self.on_progress = on_progress
        self.tokenizer = tokenizer
        self._model_name = getattr(getattr(model, "config", None), "_name_or_path", "")
        # Of a prompt that passes in strides: tokens before the present one, behind it, and of the prompt.
        self._span: tuple[int, int, int] | None = None
        self._maker, self._wanted, self._forks = maker, max_seq_len, forks
        # Sequences that the capacity is planned for; the pools are made when the first tokens come.
        self._planned_batch = 1
        for layer in self._sequence_layers:
            layer.forks = forks

    @property
    def max_seq_len(self) -> int | None:
        """Capacity of each sequence, tokens; None when no layer is bounded."""
        return min((layer.capacity for layer in self._sequence_layers), default=None)

    @property
    def room(self) -> int | None:
        """Tokens that can still be added to each sequence; None when no layer is bounded."""
        return min((layer.room for layer in self._sequence_layers), default=None)

    @property
    def _sequence_layers(self) -> list[SequenceLayer]:
        return [layer for layer in self.layers if isinstance(layer, SequenceLayer)]

    @property
    def bounded_layers(self) -> list[BoundedLayer]:
        """The layers that keep a fixed number of entries."""
        return [layer for layer in self.layers if isinstance(layer, BoundedLayer)]

    def tokenized(self, text: str) -> list[int]:
        """The token ids of `text`, without special tokens. Raises HeteroKVError when there is no tokenizer."""
        if self.tokenizer is None:
            try:
                self.tokenizer = AutoTokenizer.from_pretrained(self._model_name)
            except (OSError, ValueError) as error:
                raise HeteroKVError(
                    f"the eviction policy needs a tokenizer, and there is none in {self._model_name!r} ({error}); give "
                    "one: HeteroCache(model, tokenizer=tokenizer)"
                ) from error
        return self.tokenizer.encode(text, add_special_tokens=False)

    @cached_property
    def longest_catalyst(self) -> int:
        """Tokens of the longest text that a policy runs behind the entries; 0 without any. Raises as `tokenized`."""
        texts = {layer.policy.catalyst_text() for layer in self.bounded_layers}
        return max((len(self.tokenized(text)) for text in texts if text is not None), default=0)

    @property
    def statistics(self) -> dict[str, list[float | int | None]]:
        """What the layers have counted: name -> a value per layer, None for layers that say nothing under that name.

        The names are those that some layer knows; operators say what they mean (`AttentionOperator.statistics`).
        """
        counted = [layer.statistics if isinstance(layer, OperatorLayer) else {} for layer in self.layers]
        names = dict.fromkeys(name for of_layer in counted for name in of_layer)
        return {name: [of_layer.get(name) for of_layer in counted] for name in names}

    def require_room(self, batch: int, tokens: int) -> None:
        """Raise unless `tokens` more of `batch` sequences can be added to every layer.

        Raises:
            CacheFullError: they do not fit.
            OutOfMemoryError: they are the first, and memory has no room for that many sequences of `max_seq_len`.
            HeteroKVError: the cache holds another number of sequences.
        """
        layers = self._sequence_layers
        if batch > self._planned_batch and not any(layer.rows for layer in layers):
            capacity = self._maker.max_seq_len(self._wanted, batch, self._forks)
            self._planned_batch = batch
            for layer in layers:
                layer.capacity = capacity
        for layer in layers:
            if layer.rows and len(layer.rows) != batch:
                raise HeteroKVError(
                    f"the cache holds {len(layer.rows)} sequences and was given {batch}; use a HeteroCache for "
                    "each batch, or cache.reset() between them"
                )
            layer.require_room(tokens)

    def fork(self) -> HeteroCache:
        """A second cache with the same tokens, which goes on by itself: the blocks in DRAM are shared, not copied.

        A shared block is copied when one of the two writes to it: the last one, where it is not full, and, where
        representatives are chosen by attention (DYNAMIC), those of Local. Windows are copied. What was asked in one
        fork never changes the answers of another. The blocks of a cache that is reset or dropped serve the others.

        All forks together have room for `max_seq_len` tokens and `forks` times as many; what does not fit is refused
        with CacheFullError before any layer takes it. After `reset` a cache has a store of its own again, if memory
        has room for it. Forks may be forked again, but not used by several threads at once. `copy.deepcopy` forks too.

        Raises HeteroKVError while a prompt is being prefilled.
        """
        return forked(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> HeteroCache:
        # transformers' own way to go on from one prompt several times; a deep copy of the operators would follow.
        memo[id(self)] = twin = self.fork()
        return twin

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens (transformers passes a negative number).

        Raises HeteroKVError when a layer keeps only a window, whose older tokens are gone.
        """
        kinds = {type(layer).__name__ for layer in self.layers if not isinstance(layer, SequenceLayer | DynamicLayer)}
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
        """Bytes that the stored tokens take in operator layers, with the blocks of all forks."""
        return sum(getattr(layer, "dram_bytes", 0) for layer in self.layers)

    @property
    def device_bytes(self) -> int:
        """Bytes that the stored tokens take where the model computes, beside `dram_bytes`.

        ShadowKV's factors, landmarks and exact chunks; rotary tables; on a GPU also the entries of bounded layers, and
        the copies of Initial and Local.
        """
        rotary = [layer.factors.rotary for layer in self.layers if isinstance(layer, LowRankLayer)]
        rotary += [layer.rotary for layer in self.bounded_layers]
        tables = {id(table): table.nbytes for table in rotary if table is not None}
        return sum(getattr(layer, "device_bytes", 0) for layer in self.layers) + sum(tables.values())

    @property
    def shared_bytes(self) -> int:
        """Bytes of the blocks that this cache holds together with its forks."""
        return sum(layer.shared_bytes for layer in self._sequence_layers)

    def report_progress(self, layer_idx: int, done: int, total: int) -> None:
        """Tell `on_progress` that layer `layer_idx` has prefilled `done` of `total` tokens."""
        if self.on_progress is None:
            return
        if self._span is None:
            self.on_progress(layer_idx + (done == total), len(self.layers), done, total)
            return
        # Strides go through all layers: what is done is a share of the tokens, as if there were one layer.
        start, stop, whole = self._span
        passed = start + (stop - start) * (layer_idx * total + done) // (len(self.layers) * total)
        self.on_progress(int(passed == whole), 1, passed, whole)

    @property
    def is_passing(self) -> bool:
        """Whether the tokens that pass are a part of a prompt, be it a single one (`passing`)."""
        return self._span is not None

    @contextmanager
    def passing(self, start: int, stop: int, total: int) -> Iterator[None]:
        """Within this context tokens `start` to `stop` of a prompt of `total` pass through all layers."""
        try:
            self._span = (start, stop, total)
            for layer in self._sequence_layers:
                layer.part = PromptPart(is_first=start == 0, is_last=stop == total)
            yield
        finally:
            self._span = None
            for layer in self._sequence_layers:
                layer.part = PromptPart()


_AnyCache = TypeVar("_AnyCache", bound=Cache)


def forked(cache: _AnyCache) -> _AnyCache:
    """A second cache with the same tokens, HeteroCache or transformers' own; see HeteroCache.fork."""
    known = [layer for layer in cache.layers if isinstance(layer, OperatorLayer | DynamicLayer)]
    lengths = {layer.get_seq_length() for layer in known}
    if len(lengths) > 1 or any(getattr(layer, "is_prefilling", False) for layer in known):
        raise HeteroKVError("a prompt is being prefilled into this cache; fork it before or after, not in between")
    twin = copy.copy(cache)
    memo: dict[int, Any] = {}
    twin.layers = [_forked_layer(layer, memo) for layer in cache.layers]
    if isinstance(cache, HeteroCache) and isinstance(twin, HeteroCache):
        twin.on_progress = None
        # What was planned is theirs together: each plans anew when it leaves the others by `reset`.
        cache._planned_batch = twin._planned_batch = 0
    return twin


def _forked_layer(layer: CacheLayerMixin, memo: dict[int, Any]) -> CacheLayerMixin:
    if isinstance(layer, OperatorLayer):
        return layer.fork(memo)
    # These never write to a tensor that they hold: they grow by concatenation.
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return copy.copy(layer)
    return copy.deepcopy(layer, memo)
