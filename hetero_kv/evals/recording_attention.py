"""An operator that records a prompt's exact prefill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hetero_kv.adapter import attention_module, bridge
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.adapter.replacement import Operator
from hetero_kv.engine.step import Step
from hetero_kv.evals.recorded_layer import RecordingLayer
from hetero_kv.families.retrieval.footprint import PagedFootprint, bytes_per_token
from hetero_kv.families.retrieval.observation import Observation
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.gpu_ops.attention import chunk_attention
from hetero_kv.operators import RetrievalAttention
from hetero_kv.rules import RuleSet, load_rules
from hetero_kv.rules.operator_names import declaration_of
from hetero_kv.store import storage


class RecordingAttention(AttentionOperator):
    """Prefills exactly, chunk by chunk, and keeps the result as a recording instead of in blocks."""

    meaning = "records a prompt's exact prefill, for many caches to start from"
    settings_class = RetrievalSettings
    prefills_exactly = True
    continues_exactly = True
    changes_arguments = True

    settings: RetrievalSettings

    @classmethod
    def operator_for(cls, module: nn.Module) -> type[Operator]:
        """A layer with the model's sliding window gets retrieval's operator for it, others get this one."""
        return RetrievalAttention.operator_for(module) if attention_module.layer_window(module) is not None else cls

    def new_cache_layer(self) -> RecordingLayer:
        return RecordingLayer(storage.get(self.settings.kv_type))

    def footprint(self, shape: KVShape) -> PagedFootprint:
        """See AttentionOperator; a recording takes the memory of blocks of one token."""
        stored = bytes_per_token(shape, storage.get(self.settings.kv_type), 1, 1, accumulates=False)
        return PagedFootprint(shape, stored=stored, block_size=1, device_window=0)

    def arguments_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """See AttentionOperator; keeps the rotation of the tokens' positions, if the model passes it."""
        layer: RecordingLayer = bridge.cache_in(args, kwargs, self.path).layers[self.layer_idx]
        layer.note_rotation(kwargs.get("position_embeddings"))
        return kwargs

    def prefill_chunk(self, layer: RecordingLayer, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        if layer.observation is None:
            layer.observation = Observation(self.settings.observed(None))
        past_k, past_v = layer.extend(call.k, call.v)
        out, lse = chunk_attention(call.q, past_k, past_v, call.k, call.v, call.scale, call.softcap, call.sink)
        layer.observation = layer.observation.grown(call.q, lse, call.scale, call.softcap)
        return out

    def decode_step(self, layer: RecordingLayer, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        """See AttentionOperator; treats the token as one more token of the prompt."""
        with self.prefill(step):
            return self.prefill_chunk(layer, step, call)

    def load_prefill(self, layer: RecordingLayer, step: Step, recorded: Any) -> None:
        layer.recorded = recorded


def recording_rules() -> RuleSet:
    """The rules of full attention, with retrieval replaced by recording."""
    dense = load_rules("dense")
    declaration = declaration_of(RecordingAttention)
    recording: dict[str, Any] = {"declaration": declaration, "operator_name": declaration.name, "kwargs": {}}
    rules = (replace(rule, **recording) if rule.operator is RetrievalAttention else rule for rule in dense.rules)
    return replace(dense, rules=tuple(rules))
