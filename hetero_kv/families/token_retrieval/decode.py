"""The decode half of token retrieval: attention to a decoded token's window and to the Context tokens of a chooser."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.engine.step import Step, StepBlocks
from hetero_kv.families.token_retrieval.choosers.chooser import ChosenTokens, ContextAttention, TokenQuery
from hetero_kv.families.token_retrieval.layer import TokenRetrievalLayer
from hetero_kv.gpu_ops.merge import merge_attention
from hetero_kv.weights.kernel_arrays import kernel_array

if TYPE_CHECKING:
    from hetero_kv.families.token_retrieval.attention import TokenRetrievalAttention

#: The log-sum-exp where none is known yet.
NO_LSE = torch.empty(0)


class TokenDecode:
    """Attends for one token per row.

    Args:
        operator: has the chooser and the look-ahead.
    """

    def __init__(self, operator: TokenRetrievalAttention) -> None:
        self._operator = operator

    def __call__(
        self, layer: TokenRetrievalLayer, step: Step, blocks: StepBlocks, call: AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Attention of a decoded token, which is stored first.

        Returns out [batch, heads, 1, v_dim], lse [batch, heads, 1] and mass, shaped like lse: the log-sum-exp of the
        attended tokens, each counted once. With a window on a device `mass` is on the CPU, and NaN where neither recall
        nor the chooser needs it.
        """
        attended = self._attended if layer.window is None else self._attended_with_window
        return attended(layer, step, blocks, call)

    def _attended(
        self, layer: TokenRetrievalLayer, step: Step, blocks: StepBlocks, call: AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layer.store_token(step, call.k, call.v)
        ahead, query = self._taken_ahead(layer, step, blocks), self._token_query(layer, blocks, call)
        chooses = self._chooses(query)
        out, lse = _of_heads(call, *query.attend_blocks(query.other_blocks if chooses else query.table))
        if not chooses:
            layer.count(step.length, query.end - query.first, query.tokens, 0.0)
            return out, lse, lse
        answer = self._answer(layer, step, query._replace(outside_lse=lse.view(query.q.shape[:3]), ahead=ahead))
        chosen_out, chosen_lse, chosen_mass = _of_heads(call, answer.out, answer.lse, answer.mass)
        return *merge_attention(out, lse, chosen_out, chosen_lse), torch.logaddexp(lse, chosen_mass)

    def _attended_with_window(
        self, layer: TokenRetrievalLayer, step: Step, blocks: StepBlocks, call: AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `_attended`, with attention sink and recent window on a device.

        The host waits for one copy from the device and makes one copy back, as in `WindowedDecode`.
        """
        operator = self._operator
        needs_window = (
            layer.record is not None
            or operator.engine.measure_recall
            or (operator.chooser is not None and operator.chooser.reads_outside_lse)
        )
        window_step = layer.window_step(call, blocks.finalized * layer.layout.block_size, needs_window)
        staging = layer.staging
        assert staging is not None
        *sent, in_window = window_step.arrived()
        q, k, v = map(torch.from_numpy, sent)
        outside_lse = torch.full(staging.back[1].shape, torch.nan) if in_window is None else torch.from_numpy(in_window)
        layer.store_token(step, k, v)
        if operator.following is not None:
            # The next layer's guessed queries were sent earlier on the same stream, so they have arrived too.
            operator.following.arrived(step)
        ahead, query = self._taken_ahead(layer, step, blocks), self._token_query(layer, blocks, call, q.numpy())
        if self._chooses(query):
            answer = self._answer(layer, step, query._replace(outside_lse=outside_lse, ahead=ahead))
            chosen_out, chosen_lse, chosen_mass = answer.out, answer.lse, answer.mass
        else:
            layer.count(step.length, query.end - query.first, query.tokens, 0.0)
            if not query.tokens:
                return *window_step.alone(), outside_lse
            chosen_out, chosen_lse = query.attend_blocks(query.context)
            chosen_mass = chosen_lse
        for target, part in zip(staging.back, (chosen_out, chosen_lse), strict=True):
            target[...] = part.numpy().reshape(target.shape)
        return *window_step.merged(), torch.logaddexp(outside_lse, chosen_mass)

    def _chooses(self, query: TokenQuery) -> bool:
        chooser = self._operator.chooser
        return chooser is not None and query.tokens > 0 and not chooser.covers(query.tokens)

    def _taken_ahead(self, layer: TokenRetrievalLayer, step: Step, blocks: StepBlocks) -> ChosenTokens | None:
        """The choice made before the layer was called, or None; finalizes the blocks that the step completes if so."""
        ahead = None if self._operator.ahead is None else self._operator.ahead.pop_choice(step)
        if ahead is None and blocks.newly_finalized[0] != blocks.newly_finalized[1]:
            layer.finalize(step)
        return ahead

    def _answer(self, layer: TokenRetrievalLayer, step: Step, query: TokenQuery) -> ContextAttention:
        """The chooser's answer; counts its tokens and bytes."""
        chooser = self._operator.chooser
        assert chooser is not None
        if query.ahead is None and chooser.looks_ahead:
            query = query._replace(ahead=self._fetched(query))
        answer = chooser.attend(query)
        layer.count(step.length, query.end - query.first, answer.tokens, answer.read)
        if answer.share is not None:
            layer.state = replace(layer.state, share=layer.state.share.plus(answer.share))
        return answer

    def chosen_for(self, layer: TokenRetrievalLayer, step: Step, call: AttentionCall) -> ChosenTokens:
        """The chooser's choice for a coming step with guessed queries; finalizes the blocks that the step completes.

        Blocks of the choice that are in a file are requested from the system.
        """
        blocks = step.blocks(layer.layout)
        if blocks.newly_finalized[0] != blocks.newly_finalized[1]:
            layer.finalize(step)
        return self._fetched(self._token_query(layer, blocks, call))

    def _fetched(self, query: TokenQuery) -> ChosenTokens:
        chooser = self._operator.chooser
        assert chooser is not None
        choice, pool = chooser.choose(query), query.pool
        if pool.read_ahead is not None and pool.reads_ahead():
            rows = np.arange(len(query.table))[:, None, None]
            pool.read_ahead.request(query.context[rows, choice.positions // pool.block_size])
        return choice

    def _token_query(
        self, layer: TokenRetrievalLayer, blocks: StepBlocks, call: AttentionCall, q: np.ndarray | None = None
    ) -> TokenQuery:
        """A decode query with `q`, if the queries are already on the CPU, else with those of the call."""
        pool, table = layer.pool, blocks.table
        assert pool is not None
        queries = kernel_array(call.q, torch.float32) if q is None else q
        q = queries.reshape(len(table), pool.keys.shape[1], -1, call.q.shape[3])
        first, end = min(layer.layout.sink_blocks, blocks.finalized), blocks.finalized
        return TokenQuery(
            q, pool, table, first, end, blocks.lengths, call.scale, call.softcap or 0.0, NO_LSE, layer.state.known,
            self._operator.threads, record=layer.record,
        )  # fmt: skip


def _of_heads(call: AttentionCall, *parts: torch.Tensor) -> list[torch.Tensor]:
    """Reshape out [rows, kv_heads, group, v_dim] and tensors without its last dimension to the heads of `call`."""
    heads = call.q.shape[:3]
    shapes = [(*heads, parts[0].shape[3]), *[heads] * (len(parts) - 1)]
    return [part.reshape(shape).to(call.q.device) for part, shape in zip(parts, shapes, strict=True)]
