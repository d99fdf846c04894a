"""The cache layer of retrieval attention: all tokens stay in DRAM, in blocks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.cpu_ops.retrieval_step import RetrievalStep
from hetero_kv.cpu_ops.token_store import store_token, stores
from hetero_kv.engine.buffered_layer import PrefillBuffer
from hetero_kv.engine.checkpoint import LayerCheckpoint
from hetero_kv.engine.saved_part import RestoreTarget, SavedPart
from hetero_kv.engine.statistics import NO_NUMBERS, READ_BYTES, Tally
from hetero_kv.engine.step import Step, StepBlocks
from hetero_kv.families.gpu_prefill.writing import VectorsOf
from hetero_kv.families.retrieval import saving
from hetero_kv.families.retrieval.accumulated_attention import AccumulatingLayer
from hetero_kv.families.retrieval.block_choice import NONE_DERIVED, Derived
from hetero_kv.families.retrieval.device_window import DeviceWindow
from hetero_kv.families.retrieval.layout import RetrievalLayout
from hetero_kv.families.retrieval.paged_settings import PagedSettings
from hetero_kv.families.retrieval.pending_queries import NO_PENDING_QUERIES
from hetero_kv.families.retrieval.read_bytes import ReadSizes
from hetero_kv.families.retrieval.state import RetrievalState
from hetero_kv.families.retrieval.step_counts import StepCounts, StepTallies
from hetero_kv.families.retrieval.window_step import TorchWindowStep, TritonWindowStep, WindowStep
from hetero_kv.gpu_ops.attention_backend import takes_token
from hetero_kv.gpu_ops.staging import Staging
from hetero_kv.gpu_ops.window_step import SPLITS
from hetero_kv.store.pool import BlockPool
from hetero_kv.store.pool_arrays import AuxiliaryArray

# The counts of so many steps become statistics together.
_COUNTED_TOGETHER = 64


class RetrievalLayer(AccumulatingLayer):
    """Keys, values and representatives of one layer, in a pool; `state` has what else the operator remembers.

    Args:
        layout: how a sequence is divided.
        settings: the operator's settings; number formats and representatives.
        derived: which further arrays are derived from a block.
        vectors_of: computes the representatives of blocks on a GPU while a prompt is written; None if representatives
            need the whole prompt.

    Attributes:
        window: attention sink and recent window on the compute device; None if that is the CPU, which reads them from
            the pool.
    """

    def __init__(
        self, layout: RetrievalLayout, settings: PagedSettings, derived: Derived = NONE_DERIVED,
        vectors_of: VectorsOf | None = None,
    ) -> None:  # fmt: skip
        super().__init__(settings.key_storage, settings.value_storage, vectors_of)
        self.storage_settings = settings.storage_settings
        self.layout = layout
        self.representative_num, self.offset_keys = settings.stored_representatives, settings.offset_keys
        self.representative_kind, self.derived = settings.representative_kind, derived
        self.state = self._blank_state()
        self.window: DeviceWindow | None = None
        self.staging: Staging | None = None
        self.pending = NO_PENDING_QUERIES
        self.scale, self.softcap = 1.0, None
        self._is_prepared = self._stores_natively = False
        #: The native call that decodes a token, bound to the pool.
        self.token_step: RetrievalStep | None = None
        #: How many bytes `token_step` reads.
        self.reading: ReadSizes | None = None
        # Of the latest steps, not yet in the tallies. A list with entries that a snapshot knows only grows.
        self._uncounted: list[tuple[StepCounts, int]] = []
        #: Where it has a record, the tokens that the last step chose of the Context, [lists, tokens] bool.
        self.chosen: torch.Tensor | None = None

    def _blank_state(self) -> RetrievalState:
        return RetrievalState(open_start=self.layout.sink_blocks * self.layout.block_size)

    def reset(self) -> None:
        """Drop everything but the blocks."""
        self.state, self.pending, self.window, self.pool = self._blank_state(), NO_PENDING_QUERIES, None, None
        self.token_step = self.reading = None
        self.read, self._uncounted = NO_NUMBERS, []
        self.is_initialized = self._is_prepared = False

    # -- the parts of the sequence

    @property
    def context_blocks(self) -> int:
        """The number of blocks in the Context."""
        return self.layout.context_blocks(self.group.length)

    @property
    def context_end(self) -> int:
        """Index of the block at which the recent window begins."""
        return self.layout.context_end(self.group.length)

    @property
    def accumulates(self) -> bool:
        """Whether the pool stores the attention that a block's keys had received when the block was finalized."""
        return self.layout.finalizes_per_sequence

    def auxiliary_arrays(self, kv_heads: int, k_dim: int, v_dim: int) -> Mapping[str, AuxiliaryArray]:
        """The auxiliary arrays that a method keeps per block, for keys and values of this shape."""
        return {}

    # -- storing tokens

    def _prepare(self, keys: torch.Tensor, values: torch.Tensor) -> BlockPool:
        """Create the pool, and the window if needed, for keys [batch, kv_heads, tokens, k_dim] and values."""
        _, kv_heads, _, k_dim = keys.shape
        shape, layout = (kv_heads, k_dim, values.shape[-1]), self.layout
        pool = self.pool = self.group.store.pool(
            self.layer_idx, layout, *shape, self.key_storage, self.representative_num, self.accumulates,
            *self.derived, value_storage=self.value_storage, offset_keys=self.offset_keys,
            representative_storage=self.representative_kind(k_dim, values.shape[-1]),
            auxiliary=self.auxiliary_arrays(*shape),
        )  # fmt: skip
        if self.window is None and _needs_window(keys.device):
            sink = self.layout.sink_blocks * self.layout.block_size
            self.window = DeviceWindow(sink, self._window_len, self.layout.block_size, keys, values)
        self._is_prepared = True
        natively = stores(pool.key_array.dtype) and stores(pool.value_array.dtype)
        self._stores_natively = natively and not self.offset_keys
        return pool

    @property
    def _window_len(self) -> int:
        """Tokens of the recent window on a device, at least."""
        return self.layout.local_len

    @property
    def window_in_use(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of the window that a saved context has."""
        assert self.window is not None
        return self.window.keys, self.window.values

    def store(self, step: Step, keys: torch.Tensor, values: torch.Tensor, buffer: PrefillBuffer | None = None) -> None:
        table = self.blocks_for(step, keys, values).table
        pool = self.pool
        assert pool is not None
        if keys.is_cuda:
            self._store_from_gpu(step, keys, values, buffer)
        elif self._stores_natively and step.part.is_mixed:
            for ids, row_keys, row_values in zip(table, keys, values, strict=True):
                self.require_storable(pool.write_few(ids, step.past, row_keys, row_values))
        else:
            self._require_finite(keys, values)
            for ids, row_keys, row_values in zip(table, keys, values, strict=True):
                pool.write(ids, step.past, row_keys, row_values)
        if self.window is not None:
            self._window_loaded(table, step.length)

    def blocks_for(self, step: Step, keys: torch.Tensor, values: torch.Tensor) -> StepBlocks:
        """The step's blocks; the first call creates a pool for keys [batch, kv_heads, tokens, k_dim] and values."""
        if not self._is_prepared:
            self._prepare(keys, values)
        return step.made.get(id(self.layout)) or step.blocks(self.layout)

    def store_token(self, step: Step, keys: torch.Tensor, values: torch.Tensor) -> StepBlocks:
        """Store one token of every row, keys [batch, kv_heads, 1, k_dim] and values, in the pool.

        Returns the step's blocks. The window has its own copy, made on the device.
        """
        blocks = self.blocks_for(step, keys, values)
        pool = self.pool
        assert pool is not None
        if self._stores_natively:
            new_keys = keys.squeeze(2).to("cpu", torch.float32).contiguous().numpy()
            new_values = values.squeeze(2).to("cpu", torch.float32).contiguous().numpy()
            self.require_storable(
                store_token(new_keys, new_values, pool.key_array, pool.value_array, blocks.table, step.past)
            )
        else:
            self._require_finite(keys, values)
            for ids, row_keys, row_values in zip(blocks.table, keys, values, strict=True):
                pool.write(ids, step.past, row_keys, row_values)
        return blocks

    def window_step(self, call: AttentionCall, local_start: int, needs_window_lse: bool) -> WindowStep:
        """Append a decoded token to the window and start its transfer to the CPU; Local now begins at `local_start`.

        The device sends query, key, value and the window's log-sum-exp. The CPU returns attention over the blocks and
        its log-sum-exp, in `staging.back`. The log-sum-exp of the merged attention goes down with the next token.
        """
        assert self.window is not None
        q, k, v = call.q, call.k, call.v
        of_groups = (q.shape[0], k.shape[1], q.shape[1] // k.shape[1])
        is_joint = self.window.is_plain and takes_token(q, k, v)
        in_window = (*of_groups[:2], SPLITS, of_groups[2]) if is_joint else of_groups
        shapes = (q.shape, k.shape, v.shape, in_window), ((*q.shape[:3], v.shape[3]), of_groups), q.shape[:2]
        if self.staging is None or not self.staging.fits(q.device, *shapes):
            self._settle()
            self.staging = Staging(q.device, *shapes)
        window_step = TritonWindowStep if is_joint else TorchWindowStep
        return window_step(self.window, self.staging, call, local_start, needs_window_lse)

    def load(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        assert self.pool is not None
        for row in range(len(keys)):
            self.pool.gather(self.block_ids(row), self.group.length, keys[row], values[row])

    # -- rollback and fork

    def crop(self, length: int) -> None:
        """See FamilyLayer. A block that loses tokens is open again; the rest keep the attention they had received."""
        layout, pool = self.layout, self.pool
        state, block_size = self.state, layout.block_size
        finalized = min(self.group.finalized[layout], length // block_size)
        first, before = max(finalized, layout.sink_blocks) * block_size, state.open_start
        accumulated = state.accumulated
        if first < before and pool is not None and pool.accumulated is not None:
            kept = length - first
            block = first // block_size
            accumulated = None
            if kept > 0:
                ids = [int(self.block_ids(row)[block]) for row in range(len(self.group.sequences))]
                accumulated = pool.accumulated[ids][:, :, :kept].clone()
        elif accumulated is not None:
            accumulated = accumulated[:, :, : max(0, length - first)]
        # Pending queries belong to the newest tokens, so the newest queries go first.
        self.pending = self.pending.first(max(0, self.pending.count - (self.group.length - length)))
        if layout.context_blocks(length) < state.preselected_end:
            # The removed blocks will be replaced by new ones that preselection has not scored.
            state = replace(state, candidates=None, preselected_end=0)
        self.state = replace(state, accumulated=accumulated, open_start=first)
        self._reload_window(length)

    def return_to(self, checkpoint: LayerCheckpoint) -> None:
        """See FamilyLayer; for a checkpoint of a draft's step."""
        self.rollback(checkpoint.state)

    def snapshot(self) -> Any:
        window = self.window
        mark, uncounted = None if window is None else window.mark, self._uncounted
        return self.state, self.pending, self.read, window, mark, uncounted, len(uncounted)

    def rollback(self, snapshot: Any) -> None:
        self.state, self.pending, self.read, window, mark, uncounted, count = snapshot
        self._uncounted = uncounted[:count]
        if self.window is None or self.window is not window or not window.go_back(mark):
            self._reload_window(self.group.length)

    def fork(self, memo: dict[int, Any]) -> RetrievalLayer:
        forked = self._copied()
        forked.window = copy.deepcopy(self.window)
        return forked

    def _copied(self) -> Self:
        """A shallow copy, whose steps are counted separately."""
        copied = copy.copy(self)
        copied.state, copied.read = self._counted(self._uncounted)
        copied._uncounted = []
        return copied

    def reopen(self) -> None:
        if self.layout.finalizes_per_sequence:
            self.group.set_finalized(self.layout, 0)
            blank = self._blank_state()
            self.state = replace(self.state, open_start=blank.open_start, accumulated=None)
            self.pending = NO_PENDING_QUERIES

    def saved(self) -> SavedPart:
        self._settle()
        self._settle_counts()
        return saving.saved(self)

    def restore(self, part: SavedPart, target: RestoreTarget) -> None:
        rows, kv_heads, _, k_dim = target.keys.shape
        if self.group.sequences[0].tables[self.layout].length != self.group.length:
            raise part.wrong("some tokens are not in any block")
        state = saving.restored_state(self, part, rows, kv_heads)
        self.pending = saving.restored_pending_queries(part, rows, kv_heads, k_dim, self.group.length)
        saving.require_sound_selections(self, part)
        self.scale, self.read = part.real("scale"), part.tally("read")
        self.softcap = None if part.numbers.get("softcap") is None else part.real("softcap")
        self._prepare(target.keys, target.values)
        self.state = state

    def after_restore(self, part: SavedPart) -> None:
        if self.window is not None:
            self._reload_window(self.group.length)
            # Appended tokens are in the window as computed, not rounded to the storage type.
            for kept, name in zip(self.window_in_use, ("window_keys", "window_values"), strict=True):
                if part.has(name):
                    kept.copy_(part.tensor(name, kept.shape, kept.dtype, kept.device))

    def select(self, rows: Rows[int]) -> None:
        self.state, self.pending = self.state.selected(list(rows)), self.pending.selected(list(rows))
        self.window = None if self.window is None else self.window.selected(list(rows))

    def _reload_window(self, length: int) -> None:
        if self.window is not None:
            ids = [self.block_ids(row) for row in range(len(self.group.sequences))]
            self._window_loaded(ids, length)

    def _window_loaded(self, ids: Rows[np.ndarray] | np.ndarray, length: int) -> None:
        assert self.window is not None
        assert self.pool is not None
        self.window.load(self.pool, ids, length, self.layout.context_end(length) * self.layout.block_size)

    @property
    def device_bytes(self) -> int:
        """Bytes of the attention sink and the recent window on a device; 0 without a window."""
        return 0 if self.window is None else self.window.nbytes

    # -- statistics

    def _settle_counts(self, but: StepCounts | None = None) -> None:
        """Make statistics of the counts of the latest steps; not of `but`, which a queued kernel may still write."""
        kept = [each for each in self._uncounted if each[0] is but]
        self.state, self.read = self._counted(self._uncounted[: len(self._uncounted) - len(kept)])
        self._uncounted = kept

    def _counted(self, uncounted: Rows[tuple[StepCounts, int]]) -> tuple[RetrievalState, Tally]:
        """The state and the bytes read, with these counts."""
        state = self.state
        if not uncounted:
            return state, self.read
        assert self.reading is not None
        tallies = StepTallies(self.read, state.share, state.blocks).plus(uncounted, self.reading)
        return replace(state, share=tallies.share, blocks=tallies.blocks), tallies.read

    @property
    def statistics(self) -> dict[str, float | int | None]:
        state, read = self._counted(list(self._uncounted))
        return {**state.statistics, READ_BYTES.name: read.mean}


def count_step(layers: Rows[RetrievalLayer], counts: StepCounts) -> None:
    """Count a decoded token of the layers of a step's groups, in their order; its kernel may still be queued."""
    for number, layer in enumerate(layers):
        # Several tokens of a layer may have the same counts.
        if len(layer._uncounted) >= _COUNTED_TOGETHER:
            layer._settle_counts(but=counts)
        layer._uncounted.append((counts, number))


def _needs_window(device: torch.device) -> bool:
    """Whether attention over the attention sink and the recent window runs on a device other than the pool's."""
    return device.type != "cpu"
