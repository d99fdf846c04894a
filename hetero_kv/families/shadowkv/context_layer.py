"""How a ShadowKV layer stores prompts: low-rank keys on the compute device, values in DRAM.

Later prompts attend to the Context in pieces: keys are reconstructed from factors, values are read from DRAM.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from hetero_kv.engine.buffered_layer import PrefillBuffer
from hetero_kv.engine.deferred_readback import CheckedNumber
from hetero_kv.engine.step import Step
from hetero_kv.families.gpu_prefill.layer import GpuPrefillCache
from hetero_kv.families.gpu_prefill.pieces import Pieces
from hetero_kv.families.gpu_prefill.writing import PromptWriting
from hetero_kv.families.shadowkv import landmarks
from hetero_kv.families.shadowkv.key_factors import KeyFactors
from hetero_kv.families.shadowkv.layout import ContextLayout
from hetero_kv.families.shadowkv.outlier_chunks import OutlierChoice, Outliers
from hetero_kv.families.shadowkv.settings import ShadowKVSettings
from hetero_kv.families.shadowkv.statistics import LowRankStatistics
from hetero_kv.gpu_ops.host_copies import on_device
from hetero_kv.gpu_ops.mapped_memory import MappedMemory
from hetero_kv.store.growing_tensor import GrowingTensor

# Context tokens reconstructed at once.
_READ_AT_ONCE = 8192


@dataclass(frozen=True)
class Context:
    """The Context's state apart from factors, landmarks and values. It is replaced, so a checkpoint is a reference.

    Attributes:
        length: number of tokens, a multiple of the chunk size.
        outliers: None before the first chunk.
        statistics: the counts.
    """

    length: int = 0
    outliers: Outliers | None = None
    statistics: LowRankStatistics = field(default_factory=LowRankStatistics)


class ContextLayer(GpuPrefillCache):
    """Stores prompts in a ShadowKV layer and reads its Context.

    Attributes:
        context: the Context's state; see also `factors`, its keys, and `landmarks`, [batch, kv_heads, chunks, k_dim].
        recent_keys, recent_values: the tokens after the Context, [batch, kv_heads, tokens, dim].
    """

    layout: ContextLayout
    settings: ShadowKVSettings
    chunk_size: int
    context: Context
    factors: KeyFactors
    landmarks: GrowingTensor
    recent_keys: GrowingTensor
    recent_values: GrowingTensor

    @property
    @abstractmethod
    def counted(self) -> LowRankStatistics:
        """The counts."""

    @abstractmethod
    def count(self, statistics: LowRankStatistics) -> None:
        """Set the counts."""

    @property
    def chunks(self) -> int:
        """Number of chunks of the Context."""
        return self.context.length // self.chunk_size

    def have_pool(self, values: torch.Tensor) -> None:
        """Create the pool, unless it exists, for values like these, [batch, kv_heads, tokens, v_dim]."""
        if self.pool is None:
            kv_heads, v_dim = values.shape[1], values.shape[-1]
            # Key vectors have dimension 0, because keys are stored elsewhere.
            self.pool = self.group.store.pool(self.layer_idx, self.layout, kv_heads, 0, v_dim, self.value_storage)

    def values_are_mapped(self) -> bool:
        """Whether kernels of the compute device can read the stored values in DRAM; maps new ones if possible."""
        mapped: MappedMemory | None = self.group.store.mapped.get(self.layer_idx)
        return mapped is not None and mapped.reach(self.bytes_touched)

    # -- storing tokens

    def _store_prompt(self, step: Step, buffer: PrefillBuffer, end: int) -> None:
        """Extend the Context up to the local chunks; factor the keys if no factors represent them."""
        start, first = self.context.length, buffer.first
        if end > start:
            new_keys, new_values = (part[:, :, start - first : end - first] for part in (buffer.keys, buffer.values))
            if start == 0 or self._is_outside(step, buffer, new_keys):
                self._factor(buffer, start, end)
            if not new_values.is_cuda:
                self._put(step, new_values, start)
            self._take_in(step, new_keys, new_values)
            if new_values.is_cuda:
                self._write_from_gpu(step, buffer)
            # Map a prompt's values now, so that the first token does not wait for it.
            self.values_are_mapped()
        self.recent_keys.replace(buffer.keys[:, :, end - first : buffer.length - first])
        self.recent_values.replace(buffer.values[:, :, end - first : buffer.length - first])

    def _is_outside(self, step: Step, buffer: PrefillBuffer, keys: torch.Tensor) -> bool:
        """Whether a later turn's new keys [batch, kv_heads, tokens, k_dim] are factored together with the earlier ones.

        On a GPU this waits until the values are in the pool, because the energies are known then.
        """
        most = self.settings.refactor_above
        if most >= 1:
            return False
        if keys.is_cuda:
            self._write_from_gpu(step, buffer)
            assert self.writing is not None
            energies = self.writing.sums
            assert energies is not None
        else:
            energies = self.factors.energies(keys, self.context.length)
        return float((energies[0] / energies[1]).max()) > most

    def _factor(self, buffer: PrefillBuffer, start: int, end: int) -> None:
        """Compute a basis for the keys up to `end`, and coefficients of the keys before `start`, the Context's.

        In a continued sequence the input is the keys that the old factors reconstruct, and the new keys.
        """
        first = buffer.first
        new = first, buffer.keys[:, :, : end - first]
        factors = self.factors.factored(itertools.chain(self._keys_before(first), [new]), end, buffer.keys)
        for _, keys in self._keys_before(first):
            factors.append(keys)
        if start > first:
            factors.append(buffer.keys[:, :, : start - first])
        # Bytes of missed chunks depend on the rank that they were read with, so count them before the rank changes.
        statistics = self.counted if self.factors.finds_rank else self.context.statistics
        before, self.factors = self.factors, factors
        before.park()
        self.count(statistics.with_factors())
        if self.context.outliers is not None:
            self.context.outliers.residents.empty()

    def _put(self, step: Step, values: torch.Tensor, start: int) -> None:
        """Write values [batch, kv_heads, tokens, v_dim] on the CPU to the pool, the first at position `start`."""
        assert self.pool is not None
        for ids, row in zip(step.blocks(self.layout).table, values, strict=True):
            self.pool.write(ids, start, row[..., :0], row)

    def _begun_writing(self, step: Step, buffer: PrefillBuffer) -> PromptWriting:
        """Start writing the values of the chunks that enter the Context; see GpuPrefillCache."""
        self.have_pool(buffer.values)
        assert self.pool is not None
        blocks, write_out = step.blocks(self.layout), self.group.store.write_out(buffer.values.device)
        part = self.context.length, blocks.length
        is_measured = self.context.length and self.settings.refactor_above < 1
        sums_of = self.factors.energies if is_measured else None
        return PromptWriting(self.pool, buffer, blocks.table, write_out, part=part, with_keys=False, sums_of=sums_of)

    def _take_in(self, step: Step, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append whole chunks to the Context: exact keys [batch, kv_heads, tokens, k_dim] and values.

        The values are in the pool, or being written to it.
        """
        statistics = self.context.statistics.with_energy(*self.factors.append(keys))
        key_chunks, value_chunks = (part.unflatten(2, (-1, self.chunk_size)) for part in (keys, values))
        self.landmarks.append(landmarks.landmarks(key_chunks))
        outliers = self._new_outliers(step, key_chunks, value_chunks)
        length = self.context.length + keys.shape[2]
        self.context = replace(self.context, length=length, outliers=outliers, statistics=statistics)

    def _new_outliers(self, step: Step, key_chunks: torch.Tensor, value_chunks: torch.Tensor) -> Outliers:
        """The outliers among the Context's chunks and new chunks, [batch, kv_heads, new, chunk_size, dim].

        If no new chunk is an outlier, they are the previous ones, with the contents of their slots. A GPU reports this
        after all layers. Until then a prompt, whose exact chunks are freed, uses newly chosen outliers, and a token the
        previous ones.
        """
        before = self.context.outliers
        choice = OutlierChoice(before, key_chunks, value_chunks, self.chunks, self.settings.outlier_chunks)
        is_another = choice.is_another
        if is_another is None:
            return choice.outliers()
        assert before is not None
        if not key_chunks.is_cuda:
            return choice.outliers() if bool(is_another) else before
        if step.is_decode:
            step.checked_numbers.append(
                CheckedNumber(is_another.float(), lambda number: self._change_outliers(choice, number))
            )
            return before
        step.checked_numbers.append(
            CheckedNumber(is_another.float(), lambda number: self._keep_outliers(before, number))
        )
        return choice.outliers()

    def _change_outliers(self, choice: OutlierChoice, is_another: float) -> None:
        """Switch to the newly chosen outliers, if a new chunk is among them."""
        if is_another:
            self.context = replace(self.context, outliers=choice.outliers())

    def _keep_outliers(self, outliers: Outliers | None, is_another: float) -> None:
        """Return to the previous outliers, unless a new chunk is among the new ones."""
        if not is_another:
            self.context = replace(self.context, outliers=outliers)

    # -- reading tokens

    @property
    def tokens_in_pieces(self) -> int:
        """The Context's tokens; Recent is on the compute device. See GpuPrefillCache."""
        return self.context.length

    def _loaded_buffer(self, keys: torch.Tensor, values: torch.Tensor) -> PrefillBuffer:
        """See GpuPrefillCache; also copies Recent into the buffer."""
        buffer = super()._loaded_buffer(keys, values)
        if keys.is_cuda and buffer.past > self.context.length:
            recent = slice(self.context.length - buffer.first, buffer.past - buffer.first)
            buffer.keys[:, :, recent] = self.recent_keys.entries
            buffer.values[:, :, recent] = self.recent_values.entries
        return buffer

    def pieces(self, start: int, like: torch.Tensor) -> Pieces:
        """See GpuPrefillCache; keys other than outliers' are reconstructed from factors."""
        for first, _, values in super().pieces(start, like):
            yield first, self._keys_between(first, first + values.shape[2]), values

    def load(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See BufferedLayer; the Context's keys other than outliers' are reconstructed from factors."""
        end = self.context.length
        for part in self._parts(end):
            keys[:, :, part], values[:, :, part] = self._between(part.start, part.stop)
        if len(self.recent_keys):
            keys[:, :, end:], values[:, :, end:] = self.recent_keys.entries, self.recent_values.entries

    def _between(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the Context's positions [start, stop), whole chunks; the keys of outliers are exact."""
        assert self.pool is not None
        keys, rows = self._keys_between(start, stop), range(len(self.group.sequences))
        values = torch.stack([self.pool.read(self.block_ids(row), start, stop)[1] for row in rows])
        return keys, on_device(values.to(keys.dtype), keys.device)

    def _keys_between(self, start: int, stop: int) -> torch.Tensor:
        """The keys of `_between`."""
        assert self.context.outliers is not None
        first, count = start // self.chunk_size, (stop - start) // self.chunk_size
        keys = self.factors.keys_between(start, stop).unflatten(2, (count, self.chunk_size))
        # Outliers outside the range are scattered into one extra chunk, which is cut off.
        keys = torch.nn.functional.pad(keys, (0, 0, 0, 0, 0, 1))
        at = self.context.outliers.ids - first
        at = at.masked_fill((at < 0) | (at >= count), count)
        exact = self.context.outliers.residents.outlier_keys
        keys.scatter_(2, at[..., None, None].expand_as(exact), exact)
        return keys[:, :, :-1].flatten(2, 3)

    def _parts(self, stop: int) -> Iterator[slice]:
        """Slices of the positions before `stop`, which is a chunk's beginning."""
        step = max(1, _READ_AT_ONCE // self.chunk_size) * self.chunk_size
        return (slice(start, min(start + step, stop)) for start in range(0, stop, step))

    def _keys_before(self, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """First positions and keys of consecutive parts of the Context before `stop`."""
        return ((part.start, self._keys_between(part.start, part.stop)) for part in self._parts(stop))
