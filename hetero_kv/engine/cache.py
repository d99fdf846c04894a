"""`HeteroCache`: the transformers cache of a model with injected rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers.cache_utils import Cache

from hetero_kv.engine.batch_slice import BatchSlice, BatchSnapshot
from hetero_kv.engine.cache_factory import ModelState, injected
from hetero_kv.engine.cache_statistics import CacheStatistics
from hetero_kv.engine.checkpoint import Checkpoint
from hetero_kv.engine.exclusive_use import ExclusiveUse
from hetero_kv.engine.forward_batch import ForwardBatch, Recording
from hetero_kv.engine.forward_request import ForwardRequest
from hetero_kv.engine.hf_interface import HFInterface
from hetero_kv.engine.mapped_file import MappedFile
from hetero_kv.engine.policy_texts import PolicyTexts
from hetero_kv.engine.prefill_progress import PrefillProgress, Progress
from hetero_kv.engine.resident_prefix import NO_RESIDENT_PREFIX, ResidentPrefix
from hetero_kv.engine.step import PromptPart
from hetero_kv.engine.store import Store
from hetero_kv.engine.token_rows import NewTokens
from hetero_kv.errors import HeteroKVError


class HeteroCache(PrefillProgress, HFInterface):
    """The KV cache of a batch of sequences: `model.generate(**inputs, past_key_values=cache)`.

    Rows of equal length form one group; a batch of left-padded prompts has several groups. The operator of a layer
    decides what the layer stores; layers without an operator have transformers' own cache layer.

    Args:
        model: a model after `inject`.
        max_seq_len: capacity of each sequence, tokens; None takes the rules' `max_seq_len`.
        on_progress: called after every prefilled chunk.
        forks: number of forks that can also grow to `max_seq_len`; DRAM is planned for them. With 0, a cache and its
            forks share the capacity of one sequence.
        tokenizer: for eviction policies that run a text of their own; None loads that of the model's directory.
        resident: the resident prefix, for a cache that `load` fills: memory is planned for the rest.
        store: a store that caches of this model share (`Injection.common_store`); None plans one of its own.

    Attributes:
        groups: in the order of the batch's rows.
        in_use: the context of the thread that uses this cache; any other thread that enters it is refused.

    One thread at a time may use a cache, for a whole `generate` or one forward; a second one gets a CacheInUseError.
    Several threads may use several caches of one model; their forwards run one after the other.

    Raises HeteroKVError when the model has no injected rules, or `max_seq_len` does not fit into memory. The plan
    covers one sequence. A larger batch is planned when its prompt comes; it is then refused, or `auto` shortened,
    before anything is allocated.
    """

    def __init__(
        self,
        model: nn.Module,
        max_seq_len: int | None = None,
        on_progress: Progress | None = None,
        *,
        forks: int = 0,
        tokenizer: Any = None,
        resident: ResidentPrefix = NO_RESIDENT_PREFIX,
        store: Store | None = None,
    ) -> None:
        maker = injected(model)
        self.in_use = ExclusiveUse()
        PrefillProgress.__init__(self, on_progress)
        self._texts = PolicyTexts(tokenizer, getattr(getattr(model, "config", None), "_name_or_path", ""))
        #: The strided forward in progress, if any (`adapter.strided_prefill.StridedForward`).
        self.strided: Any = None
        #: Number of model layers that the tokens passed through; None before the first tokens.
        self.depth: int | None = None
        #: The forward in progress; None between forwards.
        self.batch: ForwardBatch | None = None
        #: States of the model (`CacheFactory.state`) that computed the prompts.
        self.computed_under: tuple[ModelState, ...] = ()
        #: The adapters that computed the newest tokens; None before any.
        self._adapters: tuple[frozenset[str], ...] | None = None
        #: Of a joint cache (`joined`), undoes its one forward; otherwise None.
        self.go_back: Callable[[], None] | None = None
        #: Files that are mapped into the pools' memory.
        self.mapped_files: tuple[MappedFile, ...] = ()
        CacheStatistics.__init__(self, maker, max_seq_len, forks, resident, store)
        Cache.__init__(self, layers=self.layers)

    @property
    def layers(self) -> list[Any]:
        """The cache layers of the group in the forward, else those of the first group."""
        return (self.groups[0] if self.batch is None else self.batch.slices[0].group).layers

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        # The constructor of transformers' Cache assigns them.
        if layers is not self.layers:
            raise HeteroKVError("the layers of a HeteroCache belong to its groups and cannot be replaced")

    @property
    def number_of_layers(self) -> int:
        """Layers of the model; there are more cache layers if some of these have keys, values and a state."""
        return (self.groups[0] if self.batch is None else self.batch.slices[0].group).number_of_layers

    # -- in a file

    @property
    def injection(self) -> Any:
        """The rules in the model of this cache."""
        return self._maker

    @injection.setter
    def injection(self, injection: Any) -> None:
        self._maker = injection

    def save(self, path: str | Path, tokens: Rows[Rows[int]] | torch.Tensor | None = None) -> None:
        """Save this cache as a safetensors file, which `load` continues in another process.

        The file is written as a whole or not at all; it replaces an existing one.

        Args:
            tokens: token ids of every row, [rows, tokens] without padding, at least the stored ones: they allow damaged
                blocks to be recomputed. None when they are unknown.

        Raises ContextError when the cache has no tokens, a layer cannot be saved, or the file cannot be written.
        """
        with self.alone():
            self._maker.save(path, self, tokens)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module, **settings: Any) -> HeteroCache:
        """Load a cache that `save` wrote; the continuation is bit-identical to an uninterrupted one.

        Args:
            model: the model of the saved cache, with the same rules. Settings that only choose the attended blocks may
                differ.
            settings: as for a new cache, including `max_seq_len`; `repair=False` refuses damage that recomputing from
                tokens could repair, and `verify=False` skips the check of blocks before they are attended.

        Raises:
            ContextError: no saved context is at `path`, or it has another model, settings or version; the message names
                the difference and what would fit.
            DamagedContextError: the file's contents differ from what was written.
            CacheFullError, OutOfMemoryError: `max_seq_len`, or memory, is too small for it.
        """
        return injected(model).load(path, **settings)

    def require_unchanged_files(self) -> None:
        """Raise DamagedContextError when a file that backs blocks has changed.

        Every forward checks this at its beginning, and again before it stores its tokens.
        """
        for file in self.mapped_files:
            file.require_unchanged()

    # -- one thread at a time

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within this context no other thread uses this cache, or the blocks that it shares with its forks.

        Raises CacheInUseError when another thread uses it.
        """
        with self.in_use, self._maker.one_at_a_time:
            yield

    # -- a forward

    @contextmanager
    def forward(self, slices: Rows[BatchSlice], *, is_decode: bool | None = None) -> Iterator[ForwardBatch]:
        """Within this context the tokens of `slices` pass through the model, in one forward.

        Every layer reserves room first; the tokens are stored when the context ends without an error. After an error
        the caller rolls back (`rollback_on_error`).

        Args:
            is_decode: whether they are generated tokens; None: one token of each sequence is.

        Raises CacheFullError when the tokens do not fit, DamagedContextError as `require_unchanged_files`,
        CacheInUseError when another thread uses the cache, and the errors of deferred readbacks.
        """
        with self.in_use, self._passing(slices, is_decode) as batch:
            yield batch

    @contextmanager
    def _passing(self, slices: Rows[BatchSlice], is_decode: bool | None) -> Iterator[ForwardBatch]:
        request = self.request
        self.require_unchanged_files()
        if is_decode is None:
            is_decode = request.stride is None and slices[0].is_decoded
        if is_decode:
            self.record_adapters()
        else:
            self._record_state()
        try:
            batch = ForwardBatch.begin(request, slices, is_decode=is_decode)
            self.batch = batch
            yield batch
            self.require_unchanged_files()
            batch.end()
        finally:
            for each in slices:
                each.group.step = None
            self.batch = None

    @contextmanager
    def recorded_by(self, recording: Recording) -> Iterator[None]:
        """Within this context `recording` records the forward in progress (`ForwardBatch.recording`)."""
        batch = self.required_batch
        self.batch = replace(batch, recording=recording)
        try:
            yield
        finally:
            self.batch = batch

    def begin_mixed(self, tokens: int, part: PromptPart) -> NewTokens:
        """Begin a forward of `tokens` tokens of this cache's prompt, one row, together with other groups."""
        self._open(1, tokens)
        if part.is_first or part.is_last:
            # Sampling all weights takes as long as a small part; parts in between have the same weights.
            self._record_state()
        else:
            self.record_adapters()
        (group,) = self.groups
        return NewTokens(group, tokens, part)

    def _record_state(self) -> None:
        """Record the state of the model that computes the tokens of a prompt."""
        now, before = self._maker.state(), self.computed_under if self.columns.count else ()
        self.computed_under = before if any(now.is_like(each) for each in before) else (*before, now)
        self._adapters = self._maker.adapters()

    def record_adapters(self) -> None:
        """Record the model's state if other adapters compute these tokens than the ones before."""
        if self._maker.adapters() != self._adapters:
            self._record_state()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of policies that run a text; None before one is passed or loaded."""
        return self._texts.tokenizer

    def tokenized(self, text: str) -> list[int]:
        """As `PolicyTexts.tokens`."""
        return self._texts.tokens(text)

    # -- rollback and fork

    def rollback(self, snapshot: BatchSnapshot) -> None:
        """See Batch; ends the forward in progress."""
        if self.batch is not None:
            for step in self.batch.steps:
                step.group.step = None
        self.batch = self.strided = None
        if not snapshot.columns.count:
            self.depth = None
        self._end_passing()
        super().rollback(snapshot)

    def fork(self) -> HeteroCache:
        """A second cache with the same tokens, independent from now on. It shares the blocks in DRAM without a copy.

        A write to a shared block copies it first: the last block, when it is not full, and blocks that enter the
        Context when attention chooses their representatives (DYNAMIC). Windows are copied. The queries of one fork
        never change the answers of another. Blocks of a cache that is reset or deleted stay with the other forks.

        All forks together can hold `1 + forks` times `max_seq_len` tokens; more is refused with CacheFullError before
        any layer changes. After `reset` a cache has its own store again, if memory allows. Forks can be forked again.
        `copy.copy` and `copy.deepcopy` fork too.

        Raises HeteroKVError during a prefill.
        """
        with self.alone():
            return self._fork()

    def _fork(self) -> HeteroCache:
        if self.batch is not None:
            raise HeteroKVError("a prompt is being prefilled into this cache; fork it before or after the prompt")
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)
        clone.in_use = ExclusiveUse()
        clone.on_progress, clone.request, clone.go_back = None, ForwardRequest(), None
        memo: dict[int, Any] = {}
        clone._set_groups([group.fork(memo) for group in self.groups])
        clone._plan = self._plan.fork()
        if not self.sequences:
            clone.groups[0].store = clone._plan.empty_store(self.groups[0].store)
        return clone

    def __copy__(self) -> HeteroCache:
        # A shallow copy would share state that new tokens replace.
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> HeteroCache:
        # transformers deep-copies a cache to continue one prompt several times; the default would also copy the
        # operators.
        memo[id(self)] = clone = self.fork()
        return clone

    def reset(self) -> None:
        """Drop every token and free the memory; blocks shared with forks stay with the forks."""
        with self.alone():
            self._reset()

    def _reset(self) -> None:
        self.depth = None
        sequences = self.sequences
        self._all_or_nothing(self._begin_again, self)
        for sequence in sequences:
            sequence.free()
        if self.mapped_files:
            # After a reset, blocks are allocated in memory instead of mapped files.
            self.mapped_files = ()
            self._plan.forget_resident()

    def extend(self, other: Self) -> None:
        """See Batch."""
        with self.alone(), other.in_use:
            self._extend(other)

    def _extend(self, other: Self) -> None:
        if self.depth and other.depth and self.depth != other.depth:
            raise HeteroKVError(
                f"rows that passed through {other.depth} layers cannot join rows that passed through {self.depth}"
            )
        super().extend(other)
        self.depth, other.depth = self.depth or other.depth, None
        self.computed_under += other.computed_under
        self.mapped_files, other.mapped_files = (*self.mapped_files, *other.mapped_files), ()

    def checkpoint(self) -> Checkpoint | None:
        """See Batch."""
        with self.alone():
            return super().checkpoint()

    def crop(self, tokens_to_remove: int, checkpoint: Checkpoint | None = None) -> None:
        """See Batch."""
        with self.alone():
            super().crop(tokens_to_remove, checkpoint)

    def select(self, rows: Rows[int] | torch.Tensor) -> None:
        """See Batch."""
        with self.alone():
            super().select(rows)
