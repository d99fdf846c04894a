"""The prefill half of retrieval attention: exact attention, then preselection and representatives of new blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn

from hetero_kv.adapter import bridge
from hetero_kv.engine.buffered_layer import PrefillBuffer
from hetero_kv.engine.step import Step
from hetero_kv.families.retrieval import representatives
from hetero_kv.families.retrieval.block_choice import choice_of
from hetero_kv.families.retrieval.budgets import layer_budget
from hetero_kv.families.retrieval.entering_blocks import represented_with_others
from hetero_kv.families.retrieval.exact_prefill import ExactPrefill
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.observation import Observation
from hetero_kv.families.retrieval.preselection import block_votes, preselect
from hetero_kv.families.retrieval.representatives import Representing
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.families.retrieval.short_turn import received_attention
from hetero_kv.families.retrieval.state import SELECTED_AT, SELECTIONS
from hetero_kv.families.sparse_prefill.attention import PromptAttention
from hetero_kv.gpu_ops.host_copies import on_host
from hetero_kv.settings.engine_settings import EngineSettings
from hetero_kv.settings.setting import LARGEST
from hetero_kv.store.pool_arrays import represent_blocks

# Stored elements of keys per computation of representatives, whose copies in float32 then stay in a core's cache; and
# groups of blocks.
_KEYS_AT_ONCE, _GROUPS_AT_ONCE = 1 << 19, 64


class RetrievalPrefill(ExactPrefill):
    """How `RetrievalAttention` prefills prompts."""

    settings_class = RetrievalSettings

    settings: RetrievalSettings

    def __init__(self, path: str, wrapped: nn.Module, settings: RetrievalSettings, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        self.representative_type = representatives.get(settings.representative_type)
        by_mean = settings.representative_reduce == "mean"
        self.vectors_of = Representing(self.representative_type, settings.representative_num, by_mean)
        self.shared = settings.head_select_mode == "SHARED"
        layers = self._own_config.num_hidden_layers
        self.budget = layer_budget("top_k_blocks", settings.top_k_blocks, self.layer_idx, layers)
        self.targets = settings.target_mass != "none"
        if self.targets and self.budget is None:
            self.budget = LARGEST
        if self.layer_idx < settings.dense_layer_num:
            self.budget = None
        #: Up to this many blocks the whole Context is attended to.
        self.covering = self.budget
        if self.targets and self.budget is not None:
            self.covering = max(settings.min_blocks, settings.max_dense_blocks)
        self.choice = choice_of(settings, self.budget) if self.budget is not None else None
        preselected = layer_budget("preselect_block_count", settings.preselect_block_count, self.layer_idx, layers)
        self.preselected = preselected if settings.preselect_block and self.budget is not None else None
        self.accumulates = self.representative_type.needs_attention and self.budget is not None
        # A selection that later tokens reuse is not kept for each token of a draft.
        self.decodes_drafts = settings.layer_step == settings.token_step == 1
        self.prompt_attention = PromptAttention(self, settings)
        if settings.prefills_sparsely:
            self.prefills_exactly = self.continues_exactly = False

    def attend_chunk(
        self, step: Step, call: bridge.AttentionCall, past_k: torch.Tensor, past_v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.prompt_attention(step, call, past_k, past_v)

    def _new_observation(self, step: Step) -> Observation | None:
        watched = self.accumulates or self.preselected is not None
        return Observation(self.settings.observed(step.part.question)) if watched else None

    def _look_back(self, layer: RetrievalLayer, step: Step, buffer: PrefillBuffer | None) -> None:
        """Read the attention of the prompt's last queries: preselect blocks, and accumulate it for representatives."""
        for shared in (SELECTIONS, SELECTED_AT):
            step.group.shared.pop(shared, None)
        observation = layer.state.observation
        layer.state = replace(layer.state, candidates=None, observation=None)
        if observation is None:
            return
        layout = layer.layout
        first, blocks = layout.sink_blocks, layout.context_blocks(step.length)
        votes = self.preselected is not None and blocks > self.preselected
        # Votes cover the whole Context; representatives need only the blocks that have none yet.
        start = 0 if votes or (buffer is not None and not buffer.first) else layer.state.open_start
        if start >= step.length or not (votes or self.accumulates):
            return
        if buffer is None:
            received = received_attention(layer, observation, start, step.length)
        elif buffer.first:
            (received,) = on_host(self._received_in_pieces(layer, observation, start, buffer))
        else:
            (received,) = on_host(observation.accumulated_attention(buffer.keys[:, :, : buffer.length]))
        if votes:
            assert self.preselected is not None
            by_block = block_votes(received, first, first + blocks, layout.block_size, self.settings.kernel_size)
            candidates = preselect(by_block, self.preselected, self.shared)
            layer.state = replace(layer.state, candidates=candidates, preselected_end=blocks)
        if self.accumulates:
            layer.accumulate(received, start)

    def _received_in_pieces(
        self, layer: RetrievalLayer, observation: Observation, start: int, buffer: PrefillBuffer
    ) -> torch.Tensor:
        """Attention that the keys from `start` on received: [batch, kv_heads, keys] float32, on the buffer's device.

        Keys from before the prompt are loaded in pieces. A block must begin at `start`.
        """
        keys = buffer.keys[:, :, max(0, start - buffer.first) :]
        new = observation.attention_to(keys, max(start, buffer.first), buffer.length)
        if start >= buffer.first:
            return new
        pieces = layer.pieces(start, buffer.keys)
        before = [observation.attention_to(keys, first, buffer.length) for first, keys, _ in pieces]
        return torch.cat([*before, new], dim=2)

    def _finalize_blocks(self, layer: RetrievalLayer, step: Step) -> None:
        """Compute the representatives of blocks that enter the Context."""
        blocks, pool = step.blocks(layer.layout), layer.pool
        start, end = max(blocks.newly_finalized[0], layer.layout.sink_blocks), blocks.newly_finalized[1]
        if self.accumulates:
            # Earlier blocks have their representatives here, but another layer may need them finalized again.
            start = max(start, layer.state.open_start // layer.layout.block_size)
        if self.budget is None or start >= end:
            return
        assert pool is not None
        if not represented_with_others(layer, step, start, end):
            self._represent(layer, step, start, end)
        if self.settings.group_blocks > 1:
            self._finalize_groups(layer, blocks.table, start, end)

    def _represent(self, layer: RetrievalLayer, step: Step, start: int, end: int) -> None:
        """Compute the representatives of the blocks [start, end) of one layer."""
        pool, table = layer.pool, step.blocks(layer.layout).table
        assert pool is not None
        layer.accumulate_pending(step.past)
        accumulated = layer.take_accumulated(start, end) if self.accumulates else None
        written, stop = layer.writing, end
        if written is not None and (self.accumulates or layer.vectors_of is not None):
            # Later blocks get their representatives from the buffer, most of them when they were written.
            stop = max(start, min(end, written.first_block))
        at_once = max(1, _KEYS_AT_ONCE // pool.keys[0].numel())
        for first in range(start, stop, at_once):
            if step.pause is not None and first > start:
                step.pause()
            part = slice(first, min(first + at_once, stop))
            for row, blocks in enumerate(table):
                ids = torch.from_numpy(blocks[part].astype(np.int64))
                received = None if accumulated is None else accumulated[row, first - start : part.stop - start]
                represent_blocks([pool], ids, partial(self.vectors_of, received=received))
        if written is not None and accumulated is not None:
            written.send_represented(stop, end, accumulated[:, stop - start :], self.vectors_of)

    def _finalize_groups(self, layer: RetrievalLayer, tables: np.ndarray, start: int, end: int) -> None:
        """Compute the representatives of the groups whose last blocks, [start, end), enter the Context."""
        pool, combined = layer.pool, self.representative_type.combined
        assert pool is not None
        assert combined is not None
        size, sink = self.settings.group_blocks, layer.layout.sink_blocks
        stop = (end - sink) // size
        for first in range((start - sink) // size, stop, _GROUPS_AT_ONCE):
            groups = min(stop - first, _GROUPS_AT_ONCE)
            part = slice(sink + first * size, sink + (first + groups) * size)
            for table in tables:
                pool.represent_groups(torch.from_numpy(table[part].astype(np.int64)).view(groups, size), combined)

    @property
    def observed_queries(self) -> int:
        return self.settings.observed(None)
