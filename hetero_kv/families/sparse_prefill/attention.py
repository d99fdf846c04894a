"""Attention of prompts' chunks as an operator's settings say: dense or sparse."""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary, WeakSet

import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.engine.step import Step
from hetero_kv.families.sparse_prefill import flexprefill, minference
from hetero_kv.families.sparse_prefill.chunk import Chunk
from hetero_kv.families.sparse_prefill.device_chunk import DeviceChunk, SetsOf
from hetero_kv.families.sparse_prefill.device_sets import HeadPatterns, flexprefill_sets, measured_patterns
from hetero_kv.families.sparse_prefill.key_lists import KeyBlocks, KeyLines
from hetero_kv.families.sparse_prefill.known_patterns import KnownPatterns, layer_key
from hetero_kv.families.sparse_prefill.minference import MeasuredPattern, Pattern
from hetero_kv.families.sparse_prefill.settings import PrefillSettings
from hetero_kv.gpu_ops.attention import chunk_attention
from hetero_kv.gpu_ops.attention_backend import obstacle_to_sets
from hetero_kv.gpu_ops.chosen_keys import compile_for_chosen

#: Patterns are searched in prompts of at least this many times `prefill_from` tokens.
_SEARCHED_FROM = 4

_logger = logging.getLogger(__name__)

#: Steps whose dense prefill on a device has been logged already: one warning for all layers.
_warned: WeakSet[Step] = WeakSet()


class PromptAttention:
    """One operator's attention in prompts.

    Args:
        operator: the operator.
        settings: which keys are attended to.
    """

    def __init__(self, operator: AttentionOperator, settings: PrefillSettings) -> None:
        self._operator, self._settings = operator, settings
        self._tried: list[list[MeasuredPattern]] | None = None
        self._key: str | None = None
        #: The heads' patterns on a GPU, as for the last chunk.
        self._placed: HeadPatterns | None = None
        #: Last queries of prompts in progress, and their dense attention: the search needs both.
        self._ends: WeakKeyDictionary[Step, tuple[torch.Tensor, torch.Tensor]] = WeakKeyDictionary()
        #: Keys that query blocks have attended to so far, and keys that they could have attended to.
        self.attended: float | torch.Tensor = 0.0
        self.there = 0.0

    def __call__(
        self,
        step: Step,
        call: AttentionCall,
        past_k: torch.Tensor,
        past_v: torch.Tensor,
        length: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `chunk_attention`, for the call's chunk after [batch, kv_heads, past, dim] keys and values.

        length: the number of tokens that the step's last query sees; None for the whole sequence.
        """
        settings, length = self._settings, step.length if length is None else length
        chunk = Chunk(call.q, past_k, past_v, call.k, call.v, call.scale, call.softcap, call.sink)
        if not settings.prefills_sparsely or length <= settings.prefill_from or not self._can(step, call):
            return self._dense(chunk)
        if settings.prefill == "minference" and self._known(chunk) is None:
            out, lse = self._dense(chunk)
            if step.part.is_last and length >= _SEARCHED_FROM * settings.prefill_from:
                self._collect_queries(step, chunk, out, length)
            return out, lse
        if chunk.total <= settings.prefill_from:
            return self._dense(chunk)
        # The last tokens are dense: they are the question, and the last query gives the answer's first token.
        whole = max(0, chunk.total - (length - settings.prefill_last)) if step.part.is_last else 0
        first = max(0, settings.prefill_from - chunk.past)
        if not first:
            return self._sparse(chunk, length, whole)
        parts = self._dense(chunk.first(first)), self._sparse(chunk.last(chunk.n - first), length, whole)
        out, lse = (torch.cat(each, dim=2) for each in zip(*parts, strict=True))
        return out, lse

    def compile(self, dtype: torch.dtype, k_dim: int, v_dim: int, softcap: float) -> None:
        """Compile the kernels that prompts need on a CPU, before the first prompt."""
        device = next(self._operator.wrapped.parameters(), torch.empty(0)).device
        if self._settings.prefills_sparsely and device.type == "cpu":
            compile_for_chosen(dtype, k_dim, v_dim, softcap > 0)

    def log_dense(self, step: Step, why: str) -> None:
        """Log once for all layers of a step that its prompt attends to all tokens, and why, if that is not as set."""
        if self._settings.prefills_sparsely and step not in _warned:
            _warned.add(step)
            _logger.warning("prefill %s: this prompt attends to all tokens, because %s", self._settings.prefill, why)

    def _can(self, step: Step, call: AttentionCall) -> bool:
        """Whether the queries' device supports sparse prefill; if not, the step's first layer logs a warning."""
        device = call.q.device.type
        if device == "cpu":
            return True
        obstacle: str | None = f"it is sparse on a CPU and on CUDA, not on {device}"
        if device == "cuda":
            obstacle = obstacle_to_sets(call.q, call.k, call.v)
        if obstacle is not None:
            self.log_dense(step, obstacle)
        return obstacle is None

    def _sparse(self, chunk: Chunk, length: int, whole: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `chunk_attention`, to chosen keys. length: tokens of the whole context; whole: see `runs_of`."""
        if chunk.q.device.type == "cpu":
            out, lse, tokens = chunk.attention(self._keys_of(chunk, length), whole)
            self._count(chunk, float(tokens.mean()))
            return out, lse
        out, lse, attended = DeviceChunk.of(chunk).attention(self._sets_of(chunk, length), whole)
        # On the device: nobody waits for it here.
        self._count(chunk, attended.double().mean())
        return out, lse

    def _keys_of(self, chunk: Chunk, length: int) -> list[KeyLines | KeyBlocks]:
        settings = self._settings
        if settings.prefill == "flexprefill":
            return flexprefill.keys_of(chunk, settings.prefill_mass, settings.prefill_min_budget)
        matches = minference.matches_at(settings.prefill_matches, length)
        return minference.keys_of(chunk, self._patterns(length), matches)

    def _sets_of(self, chunk: Chunk, length: int) -> SetsOf:
        """As `_keys_of`, on a GPU."""
        settings = self._settings
        if settings.prefill == "flexprefill":
            return lambda part, n, head: flexprefill_sets(part, n, settings.prefill_mass, settings.prefill_min_budget)
        patterns, device = tuple(self._patterns(length)), chunk.q.device
        placed = self._placed
        if placed is None or placed.patterns != patterns or placed.numbers.device != device:
            placed = self._placed = HeadPatterns.of(patterns, device)
        matches = minference.matches_at(settings.prefill_matches, length)
        return lambda part, n, head: placed.sets(part, n, head, matches)

    def _patterns(self, length: int) -> list[Pattern]:
        assert self._tried is not None
        price = minference.price_at(self._settings.error_budget, length)
        return [minference.best_pattern(head, price) for head in self._tried]

    def _dense(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """As `chunk_attention`."""
        self._count(chunk, chunk.mean_keys)
        return chunk_attention(
            chunk.q, chunk.past_k, chunk.past_v, chunk.k, chunk.v, chunk.scale, chunk.softcap, chunk.sink
        )

    def _count(self, chunk: Chunk, keys: float | torch.Tensor) -> None:
        self.attended = self.attended + keys * chunk.query_blocks
        self.there += chunk.mean_keys * chunk.query_blocks

    @property
    def _file(self) -> KnownPatterns:
        config = self._operator._own_config
        return KnownPatterns(f"{config.model_type}-{config.num_hidden_layers}x{config.hidden_size}")

    def _known(self, chunk: Chunk) -> list[list[MeasuredPattern]] | None:
        """The patterns found for the layer's heads; None before a search."""
        if self._tried is None:
            heads = chunk.q.shape[1]
            if self._key is None:
                tried_with = {"budget": self._settings.prefill_budget}
                self._key = layer_key(self._operator.layer_idx, self._operator.wrapped, heads, tried_with)
            self._tried = self._file.of_layer(self._key, heads)
        return self._tried

    def _collect_queries(self, step: Step, chunk: Chunk, exact: torch.Tensor, length: int) -> None:
        """Collect the prompt's last queries over its chunks; search patterns once all of them are there.

        exact: [batch, heads, n, v_dim], the chunk's dense attention. length: see `__call__`.
        """
        count = min(minference.TRIED_QUERIES, length)
        if length - chunk.total >= count:
            return
        before = self._ends.pop(step, (chunk.q[:, :, :0], exact[:, :, :0]))
        pairs = zip(before, (chunk.q, exact), strict=True)
        q, exact = (torch.cat([kept, new[:, :, -count:]], dim=2)[:, :, -count:] for kept, new in pairs)
        if chunk.total < length:
            # Clones, because slices would keep the whole chunk alive.
            self._ends[step] = q.clone(), exact.clone()
        elif q.shape[2] == count:
            self._search(chunk, q, exact)

    def _search(self, chunk: Chunk, q: torch.Tensor, exact: torch.Tensor) -> None:
        """Find the heads' patterns by the prompt's last queries q and their dense attention; the chunk ends with it."""
        budget = self._settings.prefill_budget
        if q.device.type == "cpu":
            self._tried = minference.measured_patterns(chunk.seen_by(q), exact, budget)
        else:
            self._tried = measured_patterns(DeviceChunk.of(chunk, q), exact, budget)
        assert self._key is not None
        self._file.add(self._key, self._tried, chunk.total)
