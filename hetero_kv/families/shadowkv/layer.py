"""The cache of a ShadowKV layer: low-rank keys and landmarks where the model computes, values in DRAM."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from gpu_ops.gather import gathered_rows
from gpu_ops.kernel_choice import runs_triton
from gpu_ops.mapped_memory import MappedMemory
from hetero_kv.engine.sequence_layer import PrefillBuffer, SequenceLayer
from hetero_kv.families.shadowkv import landmarks
from hetero_kv.families.shadowkv.key_factors import KeyFactors
from hetero_kv.families.shadowkv.outlier_chunks import Outliers, with_new_outliers
from hetero_kv.families.shadowkv.partition import context_end, first_context_end
from hetero_kv.families.shadowkv.settings import ShadowKVSettings
from hetero_kv.families.shadowkv.statistics import LowRankStatistics
from hetero_kv.store import storage
from hetero_kv.store.block_table import BlockTable
from hetero_kv.store.growing_tensor import GrowingTensor
from hetero_kv.store.pool import BlockPool

# Tokens that the buffers of generated tokens grow by.
SLACK = 256
# Tokens of the Context that are rebuilt at once.
_READ_AT_ONCE = 8192


@dataclass(frozen=True)
class _Context:
    """What the Context has beside factors, landmarks and values; replaced, so that a checkpoint is a reference.

    Attributes:
        length: tokens, whole chunks.
        outliers: None before the first chunk.
        prompt_length: tokens stored when the last prompt ended.
        statistics: what was counted.
    """

    length: int = 0
    outliers: Outliers | None = None
    prompt_length: int = 0
    statistics: LowRankStatistics = field(default_factory=LowRankStatistics)


class LowRankLayer(SequenceLayer):
    """A sequence is Context | Recent.

    The Context is whole chunks: their keys as low-rank factors, a landmark per chunk and kv head, their values in
    blocks of one chunk in DRAM; the outlier chunks are kept whole besides. Recent is exact: at least `local_chunks`
    whole chunks, and everything generated since the last prompt, unless `project_generated`. There is no Context before
    it would hold `rank` tokens: factors of fewer are larger than the keys.

    Args:
        capacity: tokens that a row can hold (`max_seq_len`).
        settings: of the operator.
    """

    storage_setting = "value_type"

    def __init__(self, capacity: int, settings: ShadowKVSettings) -> None:
        super().__init__(capacity, storage.get(settings.value_type))
        self.settings = settings
        self.chunk_size = settings.landmark_chunk_size
        self._forget()

    def _forget(self) -> None:
        self.pool, self.rows = None, []
        self._mapped: MappedMemory | None = None
        self.context = _Context()
        slack = SLACK if self.settings.project_generated else 0
        self.factors = KeyFactors(self.settings.rank, slack)
        self.landmarks = GrowingTensor(2, slack // self.chunk_size)
        self.recent_keys, self.recent_values = GrowingTensor(2, SLACK), GrowingTensor(2, SLACK)
        self.is_initialized = False

    # -- what transformers asks of a cache layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the pool, once the shapes are known: keys [batch, kv_heads, tokens, k_dim], values likewise."""
        batch, kv_heads, _, _ = key_states.shape
        blocks = batch * -(-self.capacity // self.chunk_size) * (1 + self.forks)
        # Its vectors of keys have no numbers: keys are elsewhere.
        self.pool = BlockPool(blocks, kv_heads, self.chunk_size, 0, value_states.shape[-1], self.storage, 0)
        self.rows = [BlockTable(self.pool, self.capacity) for _ in range(batch)]
        # Here, so that forks, which have tokens, share it: memory is page-locked once.
        self._mapped = MappedMemory(self.pool.values) if runs_triton(value_states) else None
        self.is_initialized = True

    @property
    def stored_length(self) -> int:
        """See SequenceLayer."""
        return self.context.length + len(self.recent_keys)

    @property
    def state(self) -> LowRankStatistics:
        """What was counted."""
        return self.context.statistics

    @property
    def chunks(self) -> int:
        """Chunks of the Context."""
        return self.context.length // self.chunk_size

    def reset(self) -> None:
        """Forget every token and give the memory back; blocks that forks hold too stay with them."""
        for row in self.rows:
            row.free()
        self._forget()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let row i continue row `beam_idx[i]` (beam search): blocks are shared, factors are copied."""
        forks = [self.rows[int(source)].fork() for source in beam_idx]
        for row in self.rows:
            row.free()
        self.rows = forks
        for part in (self.factors, self.landmarks, self.recent_keys, self.recent_values):
            part.select(beam_idx)
        if self.context.outliers is not None:
            self.context = replace(self.context, outliers=self.context.outliers.selected(beam_idx))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens.

        Where that cuts into the Context, the tokens that are Recent then have the keys that the factors give back.
        """
        length = self.stored_length - abs(tokens_to_remove)
        end = self.context.length
        if length < end:
            end = min(end, context_end(length, self.settings))
            keys, values = self._between(end, self.context.length)
            self.recent_keys.replace(keys[:, :, : length - end])
            self.recent_values.replace(values[:, :, : length - end])
            self.factors.coefficients.truncate(end)
            self.landmarks.truncate(end // self.chunk_size)
            for row in self.rows:
                row.truncate(end)
            assert self.context.outliers is not None
            self.context = replace(
                self.context, length=end, outliers=self.context.outliers.before(end // self.chunk_size)
            )
        else:
            self.recent_keys.truncate(length - end)
            self.recent_values.truncate(length - end)
        self.context = replace(self.context, prompt_length=min(self.context.prompt_length, length))

    # -- storing tokens

    @property
    def room(self) -> int:
        """Tokens that can still be added to every row: up to `capacity`, and what forks have left of the pool."""
        room = super().room
        if self.pool is None or not self.pool.is_shared:
            return room
        blocks = self.rows[0].num_blocks + self.pool.free_blocks // len(self.rows)
        return min(room, blocks * self.chunk_size - self.get_seq_length())

    def append(self, keys: torch.Tensor, values: torch.Tensor, buffer: PrefillBuffer | None = None) -> None:
        """See SequenceLayer."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self._require_finite(values)
        if buffer is not None and self.part.is_last:
            self._append_prompt(buffer)
            return
        self.recent_keys.append(keys)
        self.recent_values.append(values)
        if buffer is None and self.settings.project_generated and self.context.length:
            self._take_in_oldest()

    def _append_prompt(self, buffer: PrefillBuffer) -> None:
        """Let the Context reach to the local chunks; factor the keys where no factors serve them."""
        start = self.context.length
        end = context_end(buffer.length, self.settings) if start else first_context_end(buffer.length, self.settings)
        # A step back may have left fewer local chunks.
        end = max(start, end)
        if end > start:
            new = buffer.keys[:, :, start:end]
            if start == 0 or self.factors.share_outside(new, start) > self.settings.refactor_above:
                # Of a sequence that goes on, what is factored is what the old factors give back, and the new keys.
                self._factor(buffer.keys[:, :, :end], start)
            self._take_in(new, buffer.values[:, :, start:end])
            # A prompt's values at once, not when the first token waits for them.
            self._values_are_mapped()
        self.recent_keys.replace(buffer.keys[:, :, end : buffer.length])
        self.recent_values.replace(buffer.values[:, :, end : buffer.length])
        self.context = replace(self.context, prompt_length=buffer.length)

    def _factor(self, keys: torch.Tensor, start: int) -> None:
        """Find a basis for all of `keys`, and the coefficients of those before `start`."""
        self.factors.factor(keys)
        if start:
            self.factors.append(keys[:, :, :start])
        self.context = replace(self.context, statistics=self.state.with_factors())
        if self.context.outliers is not None:
            self.context.outliers.residents.empty()

    def _take_in_oldest(self) -> None:
        """Move whole chunks of Recent into the Context, as far as they are no local chunks."""
        count = context_end(self.stored_length, self.settings) - self.context.length
        if count <= 0:
            return
        self._take_in(self.recent_keys.entries[:, :, :count], self.recent_values.entries[:, :, :count])
        self.recent_keys.drop_first(count)
        self.recent_values.drop_first(count)

    def _take_in(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add whole chunks behind the Context, exact keys [batch, kv_heads, tokens, k_dim] and values."""
        for row, row_keys, row_values in zip(self.rows, keys, values, strict=True):
            row.append(row_keys[..., :0], row_values)
        statistics = self.state.with_energy(*self.factors.append(keys))
        key_chunks, value_chunks = (part.unflatten(2, (-1, self.chunk_size)) for part in (keys, values))
        self.landmarks.append(landmarks.landmarks(key_chunks))
        outliers = with_new_outliers(
            self.context.outliers, key_chunks, value_chunks, self.chunks, self.settings.outlier_chunks
        )
        length = self.context.length + keys.shape[2]
        self.context = replace(self.context, length=length, outliers=outliers, statistics=statistics)

    # -- reading tokens

    def load(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See SequenceLayer; the Context's keys are as the factors give them back, but for outliers."""
        end, step = self.context.length, max(1, _READ_AT_ONCE // self.chunk_size) * self.chunk_size
        for start in range(0, end, step):
            part = slice(start, min(start + step, end))
            keys[:, :, part], values[:, :, part] = self._between(part.start, part.stop)
        if len(self.recent_keys):
            keys[:, :, end:], values[:, :, end:] = self.recent_keys.entries, self.recent_values.entries

    def _between(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the Context's positions [start, stop), whole chunks; the keys of outliers are exact."""
        assert self.context.outliers is not None
        first, count = start // self.chunk_size, (stop - start) // self.chunk_size
        keys = self.factors.keys_between(start, stop).unflatten(2, (count, self.chunk_size))
        # Outliers elsewhere go to one more chunk, which is cut off again.
        keys = torch.nn.functional.pad(keys, (0, 0, 0, 0, 0, 1))
        at = self.context.outliers.ids - first
        at = at.masked_fill((at < 0) | (at >= count), count)
        exact = self.context.outliers.residents.outlier_keys
        keys.scatter_(2, at[..., None, None].expand_as(exact), exact)
        values = torch.stack([row.read(start, stop)[1] for row in self.rows])
        return keys[:, :, :-1].flatten(2, 3), values.to(keys)

    def rebuilt(self, chunks: torch.Tensor) -> torch.Tensor:
        """Keys of chunks [batch, kv_heads, n] from the factors: [batch, kv_heads, n, chunk_size, k_dim]."""
        return self.factors.keys_of(chunks, self.chunk_size)

    def fetched(self, chunks: torch.Tensor) -> torch.Tensor:
        """Values of chunks [batch, kv_heads, n] on the CPU, from DRAM to where the keys are, in their dtype.

        Returns [batch, kv_heads, n, chunk_size, v_dim].
        """
        assert self.pool is not None
        table = torch.from_numpy(self.block_tables.astype(np.int64))
        blocks = table[torch.arange(len(table))[:, None, None], chunks]
        kv_heads = chunks.shape[1]
        where = (blocks * kv_heads + torch.arange(kv_heads)[:, None]).flatten()
        stored, target = self.pool.values, self.landmarks.entries
        # Decoded where it is needed: of a quantised type there is less to copy.
        values = self.storage.decode(gathered_rows(stored.flatten(0, 1), where, target, self._values_are_mapped()))
        return values.to(target.dtype).unflatten(0, chunks.shape)

    def _values_are_mapped(self) -> bool:
        """Whether kernels of the compute device can read the stored values where they lie; sees to it if they may."""
        return self._mapped is not None and self.pool is not None and self._mapped.reach(self.pool.bytes_touched)

    # -- going back, and going two ways

    def checkpoint(self) -> tuple[Any, ...]:
        """See SequenceLayer."""
        growing = self.landmarks, self.recent_keys, self.recent_values
        context = replace(self.context, statistics=copy.copy(self.state))
        return context, self.factors.checkpoint(), [part.checkpoint() for part in growing]

    def restore(self, checkpoint: tuple[Any, ...]) -> None:
        """See SequenceLayer."""
        context, factors, held = checkpoint
        self.context = replace(context, statistics=copy.copy(context.statistics))
        self.factors.restore(factors)
        for part, state in zip((self.landmarks, self.recent_keys, self.recent_values), held, strict=True):
            part.restore(state)
        for row in self.rows:
            row.truncate(self.context.length)
        if self.context.outliers is not None:
            # Later steps have put other chunks into the slots.
            self.context.outliers.residents.empty()

    def fork(self, memo: dict[int, Any]) -> LowRankLayer:
        """See SequenceLayer; factors and landmarks are shared too, until one of the two grows."""
        twin = copy.copy(self)
        twin.rows = [row.fork() for row in self.rows]
        twin.factors, twin.landmarks = self.factors.fork(memo), self.landmarks.fork()
        twin.recent_keys, twin.recent_values = self.recent_keys.fork(), self.recent_values.fork()
        outliers = copy.deepcopy(self.context.outliers, memo)
        twin.context = replace(self.context, outliers=outliers, statistics=copy.copy(self.state))
        return twin

    @property
    def device_bytes(self) -> int:
        """Memory where the model computes, bytes, without the rotary table that layers share."""
        residents = self.context.outliers.residents.nbytes if self.context.outliers is not None else 0
        growing = self.landmarks, self.recent_keys, self.recent_values
        return self.factors.nbytes + sum(part.nbytes for part in growing) + residents

    # -- what others ask

    @property
    def statistics(self) -> dict[str, float | int | None]:
        """See OperatorLayer."""
        return self.state.by_name()
