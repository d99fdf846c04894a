"""InfLLM's streaming prefill (Xiao et al. 2024, arXiv:2402.04617): prompts of any length through a sliding window.

A chunk of a prompt attends to its neighbours at their own distances. It attends to the initial tokens and to the blocks
that it retrieves at the distance of the window's end, as a decoded token does. So no distance exceeds the window, and
the cost per token does not grow with the prompt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.engine.step import Step
from hetero_kv.families.infllm_stream.layer import InfLLMStreamLayer
from hetero_kv.families.infllm_stream.settings import INFLLM_STREAM, InfLLMStreamSettings
from hetero_kv.families.retrieval.observation import Observation
from hetero_kv.families.self_extend.attention import SelfExtendAttention
from hetero_kv.families.self_extend.layer import SelfExtendLayer
from hetero_kv.gpu_ops.attention import chunk_attention


class InfLLMStreamAttention(SelfExtendAttention):
    """InfLLM with its own prefill. With a window as long as the sequence it equals full attention.

    The last `local_windows_len` keys of a query are its neighbours; all others have the distance of the window's end.
    """

    meaning, settings_class = INFLLM_STREAM.meaning, INFLLM_STREAM.settings_class
    continues_exactly = False
    rotation_use = (
        "InfLLMStreamAttention clips distances, which needs one rotation per position; use RetrievalAttention there"
    )
    layer_class = InfLLMStreamLayer

    settings: InfLLMStreamSettings

    def _new_observation(self, step: Step) -> Observation | None:
        """None: the window's queries choose the representatives, not the prompt's last queries."""
        return None

    def _far(
        self, layer: SelfExtendLayer, grouped: AttentionCall, start: int, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See SelfExtendAttention: attention to initial tokens and retrieved blocks, by stream chunks."""
        assert isinstance(layer, InfLLMStreamLayer)
        if self.budget is None:
            return super()._far(layer, grouped, start, first)
        n, size = grouped.q.shape[2], self.settings.stream_chunk
        begins = range(first // size * size, n, size)
        parts = [
            self._far_part(layer, grouped, start, begin, max(first, begin), min(begin + size, n)) for begin in begins
        ]
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2)

    def _far_part(
        self, layer: InfLLMStreamLayer, grouped: AttentionCall, start: int, begin: int, first: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`_far` of the call's queries [first, stop), which belong to the stream chunk that begins at `begin`."""
        buffer, layout = layer.prefill_buffer, layer.layout
        assert buffer is not None
        window, blocks = layer.positions.neighbours, layout.context_blocks(start + begin)
        q = grouped.q[:, :, first:stop]
        assert self.budget is not None
        if blocks <= self.budget:
            return super()._far(layer, replace(grouped, q=grouped.q[:, :, :stop]), start, first)
        chosen = self._retrieved(layer, grouped.q[:, :, begin:stop], blocks)
        # The last key of each query is `window` tokens before it.
        behind = start + first - window - buffer.first
        tail = slice((layout.sink_blocks + blocks) * layout.block_size - buffer.first, behind)
        past_k, past_v = (
            torch.cat([part, of_all[:, :, tail]], dim=2)
            for part, of_all in zip(layer.of_blocks(chosen), (buffer.keys, buffer.values), strict=True)
        )
        own = slice(behind, behind + q.shape[2])
        keys, values = (part[:, :, own] for part in (buffer.keys, buffer.values))
        return chunk_attention(q, past_k, past_v, keys, values, grouped.scale, grouped.softcap)

    def _retrieved(self, layer: InfLLMStreamLayer, q: torch.Tensor, blocks: int) -> torch.Tensor:
        """The best of the Context's `blocks` blocks, by their representatives' summed products with all queries.

        q: [batch, heads, n, k_dim]. Returns positions in the Context, [batch, lists, budget], ascending; lists is 1 if
        all kv heads choose together.
        """
        vectors = layer.representatives_before(layer.layout.sink_blocks + blocks, self.vectors_of)
        # Scores are linear in the query, so the mean query's score orders blocks as the sum of all scores does.
        mean = q.float().mean(dim=2).unflatten(1, (vectors.shape[1], -1)).mean(dim=2)
        # A matrix product would round a score by its place and by the number of rows, and break ties so.
        scores = (vectors * mean.unsqueeze(2)).sum(dim=3)
        if self.shared:
            scores = scores.sum(dim=1, keepdim=True)
        order = scores.argsort(dim=2, descending=True, stable=True)
        return order[:, :, : self.budget].sort(dim=2).values

    # -- descriptions for the engine

    def stored_by(self) -> dict[str, Any]:
        """See AttentionOperator: includes the budget, because a prompt's retrieval affects what later layers store."""
        return super().stored_by() | {"top_k_blocks": self.settings_in_layer()["top_k_blocks"]}
