"""`HeteroCache`: the transformers cache of a model that rules have been injected into."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import nn
from transformers.cache_utils import Cache

from hetero_kv.engine.batch import BatchSnapshot, Span
from hetero_kv.engine.cache_maker import ModelState, injected
from hetero_kv.engine.cohort import Cohort
from hetero_kv.engine.counted_batch import CountedBatch
from hetero_kv.engine.held import NOTHING_HELD, Held
from hetero_kv.engine.mapped_file import MappedFile
from hetero_kv.engine.one_thread import OneThread
from hetero_kv.engine.passing_prompt import PassingPrompt, Progress
from hetero_kv.engine.policy_texts import PolicyTexts
from hetero_kv.engine.step import Step
from hetero_kv.engine.store import Store
from hetero_kv.engine.watched import tell_all
from hetero_kv.errors import HeteroKVError, OutOfMemoryError


class HeteroCache(PassingPrompt, CountedBatch, Cache):
    """The KV cache of a batch of sequences: `model.generate(**inputs, past_key_values=cache)`.

    Rows of equal length go on together, as a cohort; a batch whose rows have several lengths (left-padded prompts) is
    several cohorts. What a layer of the model holds of a cohort is its operator's; layers that the rules leave as they
    are have transformers' own cache layer.

    Args:
        model: a model that `inject` was called on.
        max_seq_len: capacity of each sequence, tokens; None takes the rules' `max_seq_len`.
        on_progress: called after every prefilled chunk.
        forks: forks that are to have room to grow to `max_seq_len` too, beside this cache; DRAM is planned for them.
            Without, a cache and its forks share the room that one sequence has.
        tokenizer: for eviction policies that run a text of their own; None takes the one of the model's directory.
        held: what is there of the sequences already, for a cache that `load` fills: memory is planned for the rest.

    Attributes:
        cohorts: in the order of the batch's rows.
        layers: the first cohort's, or those of the cohort that passes through the model.
        in_use: the context of the thread that uses this cache; another thread that enters it is refused.

    One thread at a time may use a cache, for a whole `generate` or one forward; a second one gets a CacheInUseError.
    Several caches of one model may be used by several threads, whose forwards then pass one after the other.

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
        held: Held = NOTHING_HELD,
    ) -> None:
        maker = injected(model)
        self.in_use = OneThread()
        PassingPrompt.__init__(self, on_progress)
        self._texts = PolicyTexts(tokenizer, getattr(getattr(model, "config", None), "_name_or_path", ""))
        #: The forward that is cut into parts, if one is (`adapter.strides.StridedForward`).
        self.strided: Any = None
        #: Layers of the model that the tokens have passed through; None before the first ones.
        self.depth: int | None = None
        #: The steps of the forward that is under way, one per cohort that takes part.
        self.steps: tuple[Step, ...] = ()
        #: States of the model (`CacheMaker.state`) under which its prompts were computed.
        self.computed_under: tuple[ModelState, ...] = ()
        #: Files that lie in the pools' memory.
        self.mapped_files: tuple[MappedFile, ...] = ()
        CountedBatch.__init__(self, maker, max_seq_len, forks, held)
        Cache.__init__(self, layers=self.layers)

    def _present(self, cohort: Cohort) -> None:
        self.layers = cohort.layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch so far, its padding included: the tokens of its rows where they have equal lengths.

        While a cohort passes through the model: what its layer holds.
        """
        return Cache.get_seq_length(self, layer_idx) if len(self.steps) == 1 else self.columns.count

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """`max_seq_len`, or -1 where no layer keeps every token."""
        return -1 if self.max_seq_len is None else self.max_seq_len

    @property
    def max_cache_len(self) -> int:
        """`get_max_length` by the name that PEFT asks for."""
        return self.get_max_length()

    # -- in a file

    @property
    def injection(self) -> Any:
        """The rules in the model that this is a cache of."""
        return self._maker

    @injection.setter
    def injection(self, injection: Any) -> None:
        self._maker = injection

    def save(self, path: str | Path, tokens: Rows[Rows[int]] | torch.Tensor | None = None) -> None:
        """Write all that this cache holds into a safetensors file, from which `load` goes on in another process.

        The file is there as a whole or not at all, whatever happens on the way; what was there gives way to it.

        Args:
            tokens: the token ids of every row, [rows, tokens] without padding, at least those that are stored: with
                them damaged blocks can be computed anew. None where nobody knows them.

        Raises ContextError where the cache holds no tokens or a layer cannot be saved, and where the file cannot be
        written.
        """
        with self.alone():
            self._maker.save(path, self, tokens)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module, **settings: Any) -> HeteroCache:
        """The cache that `save` wrote: what comes next is bit for bit what would have come without the break.

        Args:
            model: the one of the cache that was saved, with the same rules in it; settings that only choose which
                blocks are attended to may be others.
            settings: as for a new cache, `max_seq_len` among them; `repair=False` refuses what is damaged where it
                could be computed anew from its tokens, and `verify=False` does not look at blocks before they are
                attended to.

        Raises:
            ContextError: there is no saved context at `path`, or it is of another model, other settings or another
                version: the message names what differs and what would fit.
            DamagedContextError: the file is not what was written.
            CacheFullError, OutOfMemoryError: `max_seq_len`, or memory, has no room for it.
        """
        return injected(model).load(path, **settings)

    def require_unchanged_files(self) -> None:
        """Raise DamagedContextError where somebody has changed a file that blocks lie in.

        Every forward asks, before it begins and again before its tokens are stored.
        """
        for file in self.mapped_files:
            file.require_unchanged()

    # -- one thread at a time

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within this context no other thread uses this cache, and none the blocks that it shares with its forks.

        Raises CacheInUseError where another thread uses it.
        """
        with self.in_use, self._maker.one_at_a_time:
            yield

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise HeteroKVError(
            "a HeteroCache cannot be pickled (torch.save, multiprocessing): it belongs to a model in this process; "
            "cache.save(path) writes it into a file, and HeteroCache.load(path, model) goes on from there"
        )

    # -- what the layers of a model call

    def _require_step(self) -> None:
        if not self.steps or not self.in_use.is_within:
            raise self._maker.stray()

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """See transformers' Cache. Raises HeteroKVError outside of a forward of the injected model."""
        self._require_step()
        return super().update(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See `update`."""
        self._require_step()
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See `update`."""
        self._require_step()
        return super().update_recurrent_state(*args, **kwargs)

    # -- a forward

    @contextmanager
    def forward(self, spans: Rows[Span], *, is_decode: bool | None = None) -> Iterator[tuple[Step, ...]]:
        """Within this context the tokens of `spans` pass through the model, in one forward.

        Room is reserved in every layer first; when the context ends well the tokens are stored. When it does not, the
        caller rolls back (`undo_on_error`).

        Raises CacheFullError when they do not fit, DamagedContextError as `require_unchanged_files`, CacheInUseError
        where another thread uses the cache, and what layers have watched for.
        """
        with self.in_use, self._passing(spans, is_decode) as steps:
            yield steps

    @contextmanager
    def _passing(self, spans: Rows[Span], is_decode: bool | None) -> Iterator[tuple[Step, ...]]:
        part = self._part
        self.require_unchanged_files()
        if is_decode is None:
            is_decode = self._stride is None and spans[0].tokens == 1
        if not is_decode:
            self._note_state()
        whole, row = len(spans) > 1, 0
        steps = []
        try:
            for span in spans:
                rows = span.rows if whole else slice(row, row + len(span.cohort.sequences))
                step = span.cohort.begin(span.tokens, rows, is_decode=is_decode, part=part, keeps=not self._transient)
                steps.append(step)
            self.steps = tuple(steps)
            self._present(spans[0].cohort)
            yield self.steps
            self.require_unchanged_files()
            watched = [each for step in steps for each in step.watched]
            tell_all(watched, [each for step in steps for each in step.arriving])
            for step in steps:
                step.cohort.end(step)
        finally:
            for step in steps:
                step.cohort.step = None
            self.steps = ()
            self._present(self.cohorts[0])

    def _note_state(self) -> None:
        """Note under what the tokens of a prompt are computed."""
        now, before = self._maker.state(), self.computed_under if self.columns.count else ()
        self.computed_under = before if any(now.is_like(each) for each in before) else (*before, now)

    @property
    def tokenizer(self) -> Any:
        """Of policies that run a text; None where none was given or read yet."""
        return self._texts.tokenizer

    def tokenized(self, text: str) -> list[int]:
        """As `PolicyTexts.tokens`."""
        return self._texts.tokens(text)

    # -- going back, and going several ways

    def rollback(self, snapshot: BatchSnapshot) -> None:
        """See Batch; the forward that was under way is over."""
        for step in self.steps:
            step.cohort.step = None
        self.steps, self.strided = (), None
        if not snapshot.columns.count:
            self.depth = None
        self._end_passing()
        super().rollback(snapshot)

    def fork(self) -> HeteroCache:
        """A second cache with the same tokens, which goes on by itself: the blocks in DRAM are shared, not copied.

        A shared block is copied when one of the two writes to it: the last one, where it is not full, and, where
        representatives are chosen by attention (DYNAMIC), those that enter the Context. Windows are copied. What was
        asked in one fork never changes the answers of another. The blocks of a cache that is reset or dropped serve
        the others.

        All forks together have room for `max_seq_len` tokens and `forks` times as many; what does not fit is refused
        with CacheFullError before any layer takes it. After `reset` a cache has a store of its own again, if memory
        has room for it. Forks may be forked again. `copy.copy` and `copy.deepcopy` fork too.

        Raises HeteroKVError while a prompt is being prefilled.
        """
        with self.alone():
            return self._fork()

    def _fork(self) -> HeteroCache:
        if self.steps:
            raise HeteroKVError("a prompt is being prefilled into this cache; fork it before or after, not in between")
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.in_use = OneThread()
        twin.on_progress = twin._question = None
        memo: dict[int, Any] = {}
        twin._have([cohort.fork(memo) for cohort in self.cohorts])
        if not self.sequences:
            twin.cohorts[0].store = Store(self.cohorts[0].store.capacity, self._forks)
        # What was planned is theirs together: each plans anew when it leaves the others by `reset`.
        self._planned_batch = twin._planned_batch = 0
        return twin

    def __copy__(self) -> HeteroCache:
        # A copy that shared what is replaced when tokens come would go wrong.
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> HeteroCache:
        # transformers' own way to go on from one prompt several times; a deep copy of the operators would follow.
        memo[id(self)] = twin = self.fork()
        return twin

    def reset(self) -> None:
        """Forget every token and give the memory back; blocks that forks hold too stay with them."""
        with self.alone():
            self._reset()

    def _reset(self) -> None:
        self.depth = None
        held = self.sequences
        self._all_or_nothing(self._begin_anew, self)
        for sequence in held:
            sequence.free()
        if self.mapped_files:
            # What lay in files is to lie in memory of its own.
            self.mapped_files, self._held, self._planned_batch = (), NOTHING_HELD, 0

    def extend(self, other: Self) -> None:
        """See Batch."""
        with self.alone(), other.in_use:
            self._extend(other)

    def _extend(self, other: Self) -> None:
        if self.depth and other.depth and self.depth != other.depth:
            raise HeteroKVError(
                f"rows that passed through {other.depth} layers cannot join those that passed through {self.depth}"
            )
        super().extend(other)
        self.depth, other.depth = self.depth or other.depth, None
        self.computed_under += other.computed_under
        self.mapped_files, other.mapped_files = (*self.mapped_files, *other.mapped_files), ()

    def crop(self, tokens_to_remove: int) -> None:
        """See Batch."""
        with self.alone():
            super().crop(tokens_to_remove)

    def select(self, rows: Rows[int] | torch.Tensor) -> None:
        """See Batch."""
        with self.alone():
            super().select(rows)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let row i continue row `beam_idx[i]` (beam search): blocks are shared, not copied."""
        self.select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows at `indices` (`select`)."""
        self.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: blocks are planned for the rows of the first prompt. Raises HeteroKVError."""
        raise HeteroKVError("a HeteroCache cannot repeat its sequences; repeat the prompt before generating")

    def ran_out_of_memory(self, error: Exception, batch: int, tokens: int) -> OutOfMemoryError:
        """What to raise when a forward of so many new tokens of `batch` sequences found no memory."""
        return self._maker.ran_out_of_memory(
            error, batch, stored=self.columns.count, tokens=tokens, capacity=self.max_seq_len, held=self.dram_bytes
        )
