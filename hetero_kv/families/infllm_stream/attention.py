"""InfLLM's streaming (Xiao et al. 2024, arXiv:2402.04617): prompts of any length in a window and what it retrieves.

A chunk of a prompt attends to its neighbours at their distances, and to the initial tokens and the blocks that it
retrieves at the distance of the window's end, as a decoded token does. So no distance is longer than the window, and a
token of a long prompt costs no more than one of a short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.functional import pad

from gpu_ops.attention import chunk_attention
from gpu_ops.host_copies import on_host
from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.engine.step import Step
from hetero_kv.families.retrieval.observation import Observation
from hetero_kv.families.retrieval.unseen import NONE_UNSEEN
from hetero_kv.families.self_extend.attention import SelfExtendAttention
from hetero_kv.families.self_extend.layer import SelfExtendLayer
from hetero_kv.families.self_extend.settings import SharedPositionSettings
from hetero_kv.settings.setting import SettingError, setting

# All keys beyond the window share one position: a group of more tokens than a sequence has.
_EVERY_TOKEN = 1 << 62
# Blocks whose keys are looked at once: bounds their float32 copy.
_REPRESENTED_AT_ONCE = 64
_FIXED: tuple[tuple[str, Any, str], ...] = (
    ("representative_type", "DYNAMIC", "blocks are represented by the keys that the window's queries score highest"),
    ("representative_reduce", "mean", "a block is scored by all of its representatives"),
    ("group_reduce", "mean", "a chunk scores blocks by the sum over its queries"),
    ("preselect_block", False, "every chunk retrieves from all blocks"),
)


@dataclass(frozen=True)
class InfLLMStreamSettings(SharedPositionSettings):
    """Retrieval by prompts and answers alike; the window of neighbours is Local."""

    representative_reduce: Literal["max", "mean"] = setting(
        "mean", "a block's score from those of its representatives: their mean, by which InfLLM's sum orders blocks"
    )
    stream_chunk: int = setting(512, "tokens of a prompt that retrieve blocks together", unit="tokens", minimum=1)

    @property
    def shared_positions(self) -> tuple[int, int]:
        return _EVERY_TOKEN, self.local_windows_len

    def validate(self) -> None:
        """Check settings against each other. Raises SettingError."""
        super().validate()
        for name, value, why in _FIXED:
            if getattr(self, name) != value:
                raise SettingError(name, getattr(self, name), f"{why} as they stream; take {value}")


class InfLLMStreamLayer(SelfExtendLayer):
    """A layer that says of a block what represents it as soon as the window has passed it, within a prompt too."""

    _represented: torch.Tensor | None = None

    def note_neighbours(self, q: torch.Tensor, start: int, keys: torch.Tensor, first: int) -> None:
        """See SelfExtendLayer: adds up the products of keys with the window's queries behind them."""
        if self.accumulates:
            (scores,) = on_host(local_scores(q, start, keys, first, self.positions.neighbours))
            self.accumulate(scores, first)

    def accumulate_unseen(self, length: int) -> None:
        """Add the products of queries that were decoded since; `length` is what the last of them saw."""
        if not self.unseen.count:
            return
        assert self.rotary is not None
        positions, rotary = self.positions, self.rotary
        grouped = torch.from_numpy(self.unseen.stacked()[0])
        start = length - self.unseen.count
        self.unseen = NONE_UNSEEN
        first = max(self.state.open_start, start - positions.neighbours + 1)
        keys, q = (part.to(rotary.cos.device) for part in (self.read_keys(first, length), grouped))
        q = positions.neighbouring_queries(q, start, rotary)
        self.note_neighbours(q, start, positions.neighbouring_keys(keys, first, rotary), first)

    def representatives_before(self, end: int, vectors_of: Callable[..., torch.Tensor]) -> torch.Tensor:
        """What stands for the Context's blocks before block `end` of the sequence that is being prefilled.

        vectors_of: as `RetrievalPrefill.vectors_of`. Returns [batch, kv_heads, blocks, k_dim] float32.
        """
        size, sink = self.layout.block_size, self.layout.sink_blocks
        parts = [] if self._represented is None else [self._represented]
        done = sink + sum(part.shape[2] for part in parts)
        stored = max(done, min(end, self.state.open_start // size))
        if done < stored:
            parts.append(self._stored_representatives(done, stored))
        parts += [
            self._new_representatives(first, min(first + _REPRESENTED_AT_ONCE, end), vectors_of)
            for first in range(stored, end, _REPRESENTED_AT_ONCE)
        ]
        self._represented = torch.cat(parts, dim=2)
        return self._represented[:, :, : end - sink]

    def _stored_representatives(self, first: int, end: int) -> torch.Tensor:
        """Of blocks [first, end) that were represented before this prompt."""
        assert self.pool is not None
        assert self.prefill_buffer is not None
        tables = [self.block_ids(row)[first:end].astype(np.int64) for row in range(len(self.cohort.sequences))]
        stored = torch.stack([self.pool.representatives[torch.from_numpy(table)] for table in tables])
        vectors = self.pool.representative_storage.decode(stored).float()
        return vectors.squeeze(3).transpose(1, 2).to(self.prefill_buffer.keys.device)

    def _new_representatives(self, first: int, end: int, vectors_of: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Of blocks [first, end) that this prompt's queries have passed."""
        buffer, accumulated, size = self.prefill_buffer, self.state.accumulated, self.layout.block_size
        assert buffer is not None
        assert accumulated is not None
        keys = buffer.keys[:, :, first * size : end * size]
        scores = accumulated[:, :, first * size - self.state.open_start :][:, :, : keys.shape[2]].to(keys.device)
        keys, scores = (part.unflatten(2, (end - first, size)).transpose(1, 2) for part in (keys, scores))
        vectors = vectors_of(keys.flatten(0, 1).float(), scores.flatten(0, 1))
        return vectors.squeeze(2).unflatten(0, (len(keys), end - first)).transpose(1, 2)

    def leave_prefill(self) -> None:
        super().leave_prefill()
        self._represented = None

    def reopen(self) -> None:
        """See FamilyLayer: what the window's queries said of its keys does not hang on what is asked."""


class InfLLMStreamAttention(SelfExtendAttention):
    """InfLLM with its own prefill; with a window that has the whole sequence it is full attention.

    Of a query the last `local_windows_len` keys are neighbours; all others stand at the distance of the window's end.
    """

    meaning = (
        "prompts and answers attend to a window and to the blocks that they retrieve, however long: InfLLM's stream"
    )
    settings_class = InfLLMStreamSettings
    continues_exactly = False
    rotation_use = "InfLLMStreamAttention would clip distances; use RetrievalAttention there"
    layer_class = InfLLMStreamLayer

    settings: InfLLMStreamSettings

    def _new_observation(self, step: Step) -> Observation | None:
        """None: blocks are represented by what the window's queries, and not the prompt's last, look at."""
        return None

    def _far(
        self, layer: SelfExtendLayer, grouped: AttentionCall, start: int, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See SelfExtendAttention: attention to initial tokens and retrieved blocks, chunk by chunk of the stream."""
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
        """As `_far` of queries [first, stop) of the call, of a chunk of the stream that begins at `begin`."""
        buffer, layout = layer.prefill_buffer, layer.layout
        assert buffer is not None
        window, blocks = layer.positions.neighbours, layout.context_blocks(start + begin)
        q = grouped.q[:, :, first:stop]
        # The last key of each query is `window` before it.
        behind = start + first - window
        own = slice(behind, behind + q.shape[2])
        past = buffer.keys[:, :, :behind], buffer.values[:, :, :behind]
        assert self.budget is not None
        if blocks > self.budget:
            chosen = self._retrieved(layer, grouped.q[:, :, begin:stop], blocks)
            past = _of_blocks(past, chosen, layout.sink_blocks, layout.sink_blocks + blocks, layout.block_size)
        keys, values = (part[:, :, own] for part in (buffer.keys, buffer.values))
        return chunk_attention(q, *past, keys, values, grouped.scale, grouped.softcap)

    def _retrieved(self, layer: InfLLMStreamLayer, q: torch.Tensor, blocks: int) -> torch.Tensor:
        """The best of the Context's `blocks` blocks, by their representatives' products with all queries.

        q: [batch, heads, n, k_dim]. Returns positions in the Context, [batch, lists, budget], ascending; lists is 1
        where all kv heads choose together.
        """
        vectors = layer.representatives_before(layer.layout.sink_blocks + blocks, self.vectors_of)
        # Scores are linear in the query: their sum is the score of the queries' sum, up to what does not order blocks.
        mean = q.float().mean(dim=2).unflatten(1, (vectors.shape[1], -1)).mean(dim=2)
        scores = (vectors @ mean.unsqueeze(3)).squeeze(3)
        if self.shared:
            scores = scores.sum(dim=1, keepdim=True)
        order = scores.argsort(dim=2, descending=True, stable=True)
        return order[:, :, : self.budget].sort(dim=2).values

    # -- what others ask

    def stored_by(self) -> dict[str, Any]:
        """See AttentionOperator: what is retrieved for a prompt decides what the layers behind it store."""
        return super().stored_by() | {"second_block_count": self.settings_in_layer()["second_block_count"]}


def local_scores(q: torch.Tensor, start: int, keys: torch.Tensor, first: int, window: int) -> torch.Tensor:
    """The sum of each key's products with the queries behind it that have it among their last `window` keys.

    Args:
        q: [batch, heads, n, k_dim], queries from position `start` on.
        keys: [batch, kv_heads, m, k_dim], those from position `first` on.

    Returns [batch, kv_heads, m] float32. InfLLM's representative score (section 3.2), times the queries' number.
    """
    n = q.shape[2]
    sums = q.float().unflatten(1, (keys.shape[1], -1)).sum(dim=2).cumsum(dim=2)
    sums = pad(sums, (0, 0, 1, 0))
    at = torch.arange(first, first + keys.shape[2], device=keys.device) - start
    seen_by = sums[:, :, (at + window).clamp(0, n)] - sums[:, :, (at + 1).clamp(0, n)]
    return (seen_by * keys.float()).sum(dim=3)


def _of_blocks(
    past: tuple[torch.Tensor, torch.Tensor], chosen: torch.Tensor, sink: int, end: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [batch, kv_heads, tokens, dim] of Initial, the chosen blocks, and what is behind block `end`.

    chosen: [batch, lists, blocks], positions behind the `sink` blocks of Initial.
    """
    tokens = ((chosen + sink).unsqueeze(3) * size + torch.arange(size, device=chosen.device)).flatten(2)
    batch, kv_heads = past[0].shape[:2]
    at = tokens.expand(batch, kv_heads, -1).unsqueeze(3)
    keys, values = (
        torch.cat(
            [part[:, :, : sink * size], part.gather(2, at.expand(-1, -1, -1, part.shape[3])), part[:, :, end * size :]],
            2,
        )
        for part in past
    )
    return keys, values
