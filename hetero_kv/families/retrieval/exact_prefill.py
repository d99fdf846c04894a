"""Exact prefill of families that keep all tokens in blocks, and the work that follows once a prompt is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numba
import torch
from torch import nn

from hetero_kv.adapter import attention_module, bridge, chunking
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.adapter.replacement import Operator
from hetero_kv.engine.buffered_layer import PrefillBuffer
from hetero_kv.engine.recorded_prompt import RecordedPrompt
from hetero_kv.engine.step import Step
from hetero_kv.errors import UnsupportedModelError
from hetero_kv.families.gpu_prefill.pieces import attention_after_pieces
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.observation import Observation
from hetero_kv.families.retrieval.recording import add_blocks
from hetero_kv.families.retrieval.short_turn import is_short, store_and_attend
from hetero_kv.families.window.attention import SlidingWindowAttention
from hetero_kv.gpu_ops.attention import chunk_attention
from hetero_kv.gpu_ops.merge import apply_sink
from hetero_kv.settings.engine_settings import EngineSettings

# Scores of a head between two pauses of a prompt (20 to 40 ms with 14 heads of 64 numbers on two cores), and the fewest
# queries that share a reading of the keys.
_SCORES_BETWEEN_PAUSES, _LEAST_QUERIES = 1 << 23, 64


class ExactPrefill(AttentionOperator):
    """Base of operators whose layers are RetrievalLayers; subclasses derive blocks' arrays in `_finalize_blocks`."""

    prefills_exactly = True
    continues_exactly = True
    records_attention = True

    def __init__(self, path: str, wrapped: nn.Module, settings: object, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        self.threads = min(engine.resolved_threads(), numba.config.NUMBA_NUM_THREADS)

    @classmethod
    def operator_for(cls, module: nn.Module) -> type[Operator]:
        """SlidingWindowAttention for a layer with the model's own sliding window, which retrieval does not apply to."""
        if attention_module.has_window(module):
            return SlidingWindowAttention
        return cls

    def prefill_chunk(self, layer: RetrievalLayer, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        if call.sliding_window is not None:
            self._refuse_window(call.sliding_window)
        if layer.prefill_buffer is None:
            layer.accumulate_pending(step.past)
            if step.part.is_first:
                layer.state = replace(layer.state, observation=self._new_observation(step))
        out, lse, q = self._attended_chunk(layer, step, call)
        observation = layer.state.observation
        if observation is not None:
            layer.state = replace(layer.state, observation=observation.grown(q, lse, call.scale, call.softcap))
        if layer.record is not None and step.stores:
            self._record_prompt(layer, step, call, lse)
        return out.to(call.q.dtype)

    def _attended_chunk(
        self, layer: Any, step: Step, call: bridge.AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Attention of a chunk to all earlier tokens and to itself.

        Returns out and lse as from `chunk_attention`, and the queries that observe keys.
        """
        if is_short(step, call):
            out, lse = store_and_attend(layer, step, call, self.threads)
            return *((out, lse) if call.sink is None else apply_sink(out, lse, call.sink)), call.q
        past_k, past_v = layer.extend(call.k, call.v)
        assert layer.prefill_buffer is not None
        if not layer.prefill_buffer.first:
            if step.pause is None:
                return *self.attend_chunk(step, call, past_k, past_v), call.q
            return *self._attended_between_pauses(layer.prefill_buffer, step, call, step.pause), call.q
        return *attention_after_pieces(layer.pieces(0, call.k), call, past_k, past_v), call.q

    def _attended_between_pauses(
        self, buffer: PrefillBuffer, step: Step, call: bridge.AttentionCall, pause: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`attend_chunk` for a few queries at a time; the buffer ends with the chunk's keys and values."""
        n = call.q.shape[2]
        past, parts = buffer.length - n, list[tuple[torch.Tensor, torch.Tensor]]()
        for tokens in chunking.cut(n, max(_LEAST_QUERIES, _SCORES_BETWEEN_PAUSES // buffer.length)):
            if parts:
                pause()
            before = slice(past + tokens.start)
            parts.append(
                self.attend_chunk(step, call.of_tokens(tokens), buffer.keys[:, :, before], buffer.values[:, :, before])
            )
        # Tokens are the outer dimension in memory, as the layer's output projection takes them.
        out = torch.cat([each.transpose(1, 2) for each, _ in parts], dim=1).transpose(1, 2)
        return out, torch.cat([lse for _, lse in parts], dim=2)

    def _record_prompt(
        self, layer: RetrievalLayer, step: Step, call: bridge.AttentionCall, total: torch.Tensor
    ) -> None:
        """Record the attention of a prompt's last token, a chunk of its own."""
        record, buffer, past = layer.record, layer.prefill_buffer, step.past
        assert record is not None
        if buffer is None:
            add_blocks(layer, step.blocks(layer.layout), call)
        else:
            for first, keys, _ in layer.pieces(0, call.k) if buffer.first else ():
                record.add_keys(call.q, keys[0], first + torch.arange(keys.shape[2]), call.scale, call.softcap)
            own = buffer.keys[0, :, : past + 1 - buffer.first]
            record.add_keys(call.q, own, torch.arange(buffer.first, past + 1), call.scale, call.softcap)
        record.complete(total, sink=call.sink)

    def attend_chunk(
        self, step: Step, call: bridge.AttentionCall, past_k: torch.Tensor, past_v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of a chunk behind keys and values [batch, kv_heads, past, dim]; returns as `chunk_attention`."""
        return chunk_attention(call.q, past_k, past_v, call.k, call.v, call.scale, call.softcap, call.sink)

    def load_prefill(self, layer: RetrievalLayer, step: Step, recorded: RecordedPrompt) -> None:
        observation = self._new_observation(step)
        if observation is not None:
            observation = recorded.observed_by(observation)
        layer.state = replace(layer.state, observation=observation)
        buffer = PrefillBuffer(recorded.keys, recorded.values, past=0, length=recorded.length)
        try:
            layer.store(step, recorded.keys, recorded.values, buffer)
            self.end_of_prompt(layer, step, buffer)
        finally:
            layer.leave_prefill()

    def _new_observation(self, step: Step) -> Observation | None:
        """The observation window of a new prompt; None if nothing needs it."""
        return None

    def _refuse_window(self, window: int) -> None:
        raise UnsupportedModelError(
            f"{self.path}: the model requests a sliding window of {window}; use SlidingWindowAttention there"
        )

    def end_prefill(self, layer: RetrievalLayer, step: Step) -> None:
        buffer = layer.end_prefill(step)
        if step.stores:
            self.end_of_prompt(layer, step, buffer)

    def end_of_prompt(self, layer: RetrievalLayer, step: Step, buffer: PrefillBuffer | None) -> None:
        """After a layer has stored a prompt: read the observation window, and finalize new blocks.

        `buffer` has the whole sequence, or on a GPU the tokens from its `first` on. It is None after a short turn,
        which reads the pool instead. A prompt that passes in several parts does this once, at its end. The result is
        that of a prompt in one part, up to the precision of the storage types, in which later parts see earlier ones.
        """
        if step.part.is_last:
            self._look_back(layer, step, buffer)
            self._finalize_blocks(layer, step)

    def _look_back(self, layer: RetrievalLayer, step: Step, buffer: PrefillBuffer | None) -> None:
        """Read the attention of the prompt's last queries."""

    def _finalize_blocks(self, layer: RetrievalLayer, step: Step) -> None:
        """Compute the arrays derived from the blocks that enter the Context."""
        raise NotImplementedError("an operator whose blocks are scored derives something from them")
