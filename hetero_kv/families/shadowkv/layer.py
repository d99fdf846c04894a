"""The cache layer of ShadowKV: low-rank keys and landmarks on the compute device, values in DRAM."""

from __future__ import annotations

import copy
from collections.abc import Sequence as Rows
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hetero_kv.engine.buffered_layer import PrefillBuffer
from hetero_kv.engine.deferred_readback import CheckedNumber, HostCopy
from hetero_kv.engine.saved_part import RestoreTarget, SavedPart
from hetero_kv.engine.statistics import NO_NUMBERS, READ_BYTES
from hetero_kv.engine.step import Step
from hetero_kv.families.shadowkv import saving
from hetero_kv.families.shadowkv.context_layer import Context, ContextLayer
from hetero_kv.families.shadowkv.key_factors import KeyFactors
from hetero_kv.families.shadowkv.layout import ContextLayout
from hetero_kv.families.shadowkv.missed_chunks import MAX_UNREAD, MissedChunks
from hetero_kv.families.shadowkv.read_bytes import bytes_of_missed
from hetero_kv.families.shadowkv.settings import ShadowKVSettings
from hetero_kv.families.shadowkv.statistics import KEY_RANK, LowRankStatistics
from hetero_kv.gpu_ops.gather import gathered_rows
from hetero_kv.gpu_ops.host_copies import on_device
from hetero_kv.gpu_ops.kernel_choice import runs_triton
from hetero_kv.gpu_ops.mapped_memory import MappedMemory
from hetero_kv.store.growing_tensor import GrowingTensor

# Spare tokens of the buffers of generated tokens.
SLACK = 256


class LowRankLayer(ContextLayer):
    """A sequence is Context | Recent.

    The Context consists of whole chunks: keys as low-rank factors, one landmark per chunk and kv head, values in DRAM
    blocks of one chunk. Outlier chunks are also kept exactly. Recent is exact: at least `local_chunks` whole chunks,
    and everything generated since the last prompt, unless `project_generated`. There is no Context of fewer than `rank`
    tokens, whose factors would be larger than the keys. If `energy` determines the rank, its largest value counts.

    Args:
        settings: the operator's, sized.
        energy: share of the keys' energy that the factors must contain, which determines the rank; None for the
            settings' rank.
    """

    def __init__(self, settings: ShadowKVSettings, energy: float | None = None) -> None:
        super().__init__(settings.value_storage)
        self.storage_settings = (settings.storage_setting,) * 2
        self.settings, self._energy = settings, energy
        self.chunk_size = settings.landmark_chunk_size
        self.layout = ContextLayout(self.chunk_size, settings)
        self._forget()

    def _forget(self) -> None:
        self.pool = None
        self.context = Context()
        self.read = NO_NUMBERS
        slack = SLACK if self.settings.project_generated else 0
        self.factors = KeyFactors(self.settings.most_rank, slack, self._energy)
        self.landmarks = GrowingTensor(2, slack // self.chunk_size)
        self.recent_keys, self.recent_values = GrowingTensor(2, SLACK), GrowingTensor(2, SLACK)
        self.missed = MissedChunks()
        self.is_initialized = False

    def reset(self) -> None:
        """Forget all state outside the blocks."""
        self._forget()

    @property
    def counted(self) -> LowRankStatistics:
        """The counts, including those on a GPU, for which this waits."""
        by_step = self.missed.pop_misses(len(self.group.sequences))
        if by_step:
            beyond = sum(bytes_of_missed(self, missed, rows) for missed, rows in by_step)
            self.read = self.read._replace(total=self.read.total + beyond)
            self.count(self.context.statistics.without_hits(sum(missed for missed, _ in by_step)))
        return self.context.statistics

    def count_choices(self, choices: int, hits: int) -> None:
        """Count a step's choices; misses that `missed` has not reported yet count as hits until then."""
        self.count(self.context.statistics.with_choices(hits, choices))

    def count(self, statistics: LowRankStatistics) -> None:
        """Set the counts."""
        self.context = Context(self.context.length, self.context.outliers, statistics)

    @property
    def stored_length(self) -> int:
        """Number of tokens of each sequence in this layer."""
        return self.context.length + len(self.recent_keys)

    def select(self, rows: Rows[int]) -> None:
        """See FamilyLayer; blocks are shared, factors are copied."""
        index, buffer = torch.tensor(rows), self.recent_keys.extent[0]
        if buffer is not None:
            # One copy for all parts, for which the host does not wait.
            index = on_device(index, buffer.device)
        if len(self.recent_keys):
            self.missed.select(len(self.recent_keys.entries), len(rows))
        for part in (self.factors, self.landmarks, self.recent_keys, self.recent_values):
            part.select(index)
        statistics = self.context.statistics.selected(index)
        outliers = None if self.context.outliers is None else self.context.outliers.selected(index)
        self.context = replace(self.context, outliers=outliers, statistics=statistics)

    def crop(self, length: int) -> None:
        """See FamilyLayer.

        If this cuts into the Context, tokens that become Recent get the keys that the factors reconstruct.
        """
        end = self.context.length
        if length < end:
            end = self.layout.cropped(end, length)
            keys, values = self._between(end, self.context.length)
            self.recent_keys.replace(keys[:, :, : length - end])
            self.recent_values.replace(values[:, :, : length - end])
            self.factors.coefficients.truncate(end)
            self.landmarks.truncate(end // self.chunk_size)
            assert self.context.outliers is not None
            self.context = replace(
                self.context, length=end, outliers=self.context.outliers.before(end // self.chunk_size)
            )
        elif self.stored_length:
            self.recent_keys.truncate(length - end)
            self.recent_values.truncate(length - end)

    # -- storing tokens

    def store(self, step: Step, keys: torch.Tensor, values: torch.Tensor, buffer: PrefillBuffer | None = None) -> None:
        self.have_pool(values)
        assert self.pool is not None
        # In the store, which forks share, because memory can be page-locked only once.
        if self.layer_idx not in self.group.store.mapped and runs_triton(values):
            self.group.store.mapped[self.layer_idx] = MappedMemory(self.pool.values, values.device)
        self._check_storable(step, values)
        end = (step.made.get(id(self.layout)) or step.blocks(self.layout)).length
        if buffer is not None and step.part.is_last:
            if len(self.missed) > MAX_UNREAD:
                self.count(self.counted)
            self._store_prompt(step, buffer, end)
            return
        self.recent_keys.append(keys)
        self.recent_values.append(values)

    def project(self, step: Step) -> None:
        """Move chunks beyond the local ones, after a decoded token, from Recent to the Context.

        Runs after the token's attention, which uses them exactly. Their values leave a GPU while other layers compute,
        and are in the pool before a later token reads them.
        """
        start = self.context.length
        count = step.blocks(self.layout).length - start
        if count <= 0:
            return
        new_keys, new_values = (part.entries[:, :, :count] for part in (self.recent_keys, self.recent_values))
        if new_values.is_cuda:
            step.host_copies.append(HostCopy(new_values, lambda values: self._put(step, values, start)))
        else:
            self._put(step, new_values, start)
        self._take_in(step, new_keys, new_values)
        self.recent_keys.drop_first(count)
        self.recent_values.drop_first(count)

    def _check_storable(self, step: Step, values: torch.Tensor) -> None:
        """Ensure that no value is stored that its storage type would turn into infinity."""
        if values.device.type == "cpu" and not step.is_decode:
            self._require_finite(None, values)
        elif self.value_storage.largest is not None:
            largest = torch.linalg.vector_norm(values, float("inf"), dtype=torch.float32)
            if values.device.type == "cpu":
                self.require_storable(float(largest))
            else:
                # Checked after all layers; the tokens count as stored only then.
                step.checked_numbers.append(CheckedNumber(largest, self.require_storable))

    # -- reading tokens

    def rebuilt(self, chunks: torch.Tensor) -> torch.Tensor:
        """Keys of chunks [batch, kv_heads, n], reconstructed from factors: [batch, kv_heads, n, chunk_size, k_dim]."""
        return self.factors.keys_of(chunks, self.chunk_size)

    def fetched(self, chunks: torch.Tensor) -> torch.Tensor:
        """Values of chunks [batch, kv_heads, n] on the CPU, copied from DRAM to the keys' device, in the keys' dtype.

        Returns [batch, kv_heads, n, chunk_size, v_dim].
        """
        assert self.pool is not None
        rows = range(len(self.group.sequences))
        table = torch.from_numpy(np.stack([self.block_ids(row) for row in rows]).astype(np.int64))
        blocks = table[torch.arange(len(table))[:, None, None], chunks]
        kv_heads = chunks.shape[1]
        where = (blocks * kv_heads + torch.arange(kv_heads)[:, None]).flatten()
        stored, target = self.pool.values, self.landmarks.entries
        # Decoded on the target device, because a quantized type has fewer bytes to copy.
        values = self.value_storage.decode(gathered_rows(stored.flatten(0, 1), where, target, self.values_are_mapped()))
        return values.to(target.dtype).unflatten(0, chunks.shape)

    # -- checkpoints and forks

    def snapshot(self) -> tuple[Any, ...]:
        growing = self.landmarks, self.recent_keys, self.recent_values
        checkpoints = [part.checkpoint() for part in growing]
        return self.context, self.read, self.missed.checkpoint(), self.factors.checkpoint(), checkpoints

    def rollback(self, snapshot: tuple[Any, ...]) -> None:
        self.context, self.read, missed, factors, checkpoints = snapshot
        self.missed.restore(missed)
        self.factors.restore(factors)
        for part, state in zip((self.landmarks, self.recent_keys, self.recent_values), checkpoints, strict=True):
            part.restore(state)
        if self.context.outliers is not None:
            # Later steps have filled the slots with other chunks.
            self.context.outliers.residents.empty()

    def fork(self, memo: dict[int, Any]) -> LowRankLayer:
        """See FamilyLayer; factors and landmarks are shared until one of the two grows."""
        forked = copy.copy(self)
        forked.factors, forked.landmarks = self.factors.fork(memo), self.landmarks.fork()
        forked.recent_keys, forked.recent_values = self.recent_keys.fork(), self.recent_values.fork()
        forked.missed = self.missed.fork()
        forked.context = replace(self.context, outliers=copy.deepcopy(self.context.outliers, memo))
        return forked

    def saved(self) -> SavedPart:
        return saving.saved(self)

    def restore(self, part: SavedPart, target: RestoreTarget) -> None:
        self.context = Context(*saving.restore(self, part, target))

    @property
    def device_bytes(self) -> int:
        """Memory on the compute device, bytes, without the rotary table that layers share."""
        residents = self.context.outliers.residents.nbytes if self.context.outliers is not None else 0
        growing = self.landmarks, self.recent_keys, self.recent_values
        return self.factors.nbytes + sum(part.nbytes for part in growing) + residents + self.missed.nbytes

    @property
    def tables_shared_with_others(self) -> tuple[Any, ...]:
        """The rotation of every position; see FamilyLayer."""
        return () if self.factors.rotary is None else (self.factors.rotary,)

    @property
    def statistics(self) -> dict[str, float | int | None]:
        counted = self.counted
        return {**counted.by_name(), KEY_RANK.name: self.factors.rank, READ_BYTES.name: self.read.mean}
