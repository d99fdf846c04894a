"""Bounded attention: a fixed number of entries per layer and kv head, chosen by an eviction policy."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hetero_kv.adapter import attention_module, bridge
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.adapter.replacement import Operator
from hetero_kv.adapter.rotary_probe import of_rows, position_embeddings, require_constant_rotation, rotation_of
from hetero_kv.adapter.rotary_table import RotaryTable
from hetero_kv.adapter.rotation import Rotation
from hetero_kv.cpu_ops import cached_entries, rotary
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.statistics import READ_BYTES
from hetero_kv.engine.step import Step
from hetero_kv.errors import HeteroKVError, UnsupportedModelError
from hetero_kv.families.bounded import eviction
from hetero_kv.families.bounded.eviction import BoundedSettings, StridedSettings, WholePromptSettings
from hetero_kv.families.bounded.eviction.policy import ObservedAttention
from hetero_kv.families.bounded.eviction.policy_settings import BOUNDED
from hetero_kv.families.bounded.footprint import BoundedFootprint
from hetero_kv.families.bounded.layer import CACHED_ENTRIES, BoundedLayer
from hetero_kv.families.sparse_prefill.attention import PromptAttention
from hetero_kv.families.window.attention import SlidingWindowAttention
from hetero_kv.gpu_ops.attention import attention_with_lse, chunk_attention, folded_heads, unfolded_heads
from hetero_kv.gpu_ops.merge import apply_sink
from hetero_kv.settings.engine_settings import EngineSettings

_NAME = "BoundedAttention"
_logger = logging.getLogger(__name__)


class BoundedAttention(AttentionOperator):
    """Attends to all cached entries and the new tokens; then the policy evicts what exceeds the budget.

    With a budget that covers the sequence the result is full attention, up to rounding.
    """

    meaning, settings_class, chosen_by = BOUNDED.meaning, BOUNDED.settings_class, BOUNDED.chosen_by
    statistics = (CACHED_ENTRIES, READ_BYTES)
    changes_arguments = True
    records_attention = True

    settings: BoundedSettings

    def __init__(self, path: str, wrapped: nn.Module, settings: BoundedSettings, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        registered = eviction.get(settings.policy)
        if type(settings) is not registered.settings:
            raise HeteroKVError(
                f"{path}: policy {settings.policy} has the settings {registered.settings.__name__}, not "
                f"{type(settings).__name__}"
            )
        self.policy = registered.implementation(settings, self.layer_idx, self._own_config.num_hidden_layers)
        self.rotation: Rotation | None = None
        # Sparse prefill needs the whole prompt; strides attend to all cached entries.
        self.prompt_attention = PromptAttention(self, settings) if isinstance(settings, WholePromptSettings) else None
        if self.policy.reindexed:
            require_constant_rotation(path, wrapped, f"{_NAME} with policy {settings.policy}")

    @classmethod
    def settings_class_for(cls, kwargs: Mapping[Any, Any]) -> type[BoundedSettings]:
        """See Operator: the settings of the policy that `kwargs` names."""
        return BOUNDED.settings_class_for(kwargs)

    @classmethod
    def operator_for(cls, module: nn.Module) -> type[Operator]:
        """Returns the sliding-window operator for layers whose model has a sliding window."""
        if attention_module.has_window(module):
            return SlidingWindowAttention
        return cls

    def new_cache_layer(self) -> BoundedLayer:
        return BoundedLayer(self.policy)

    # -- positions within the cache

    def arguments_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Pass identity rotations to the wrapped module if the policy re-indexes positions; see AttentionOperator."""
        if self.policy.reindexed:
            use = (
                f"{_NAME} with policy {self.settings.policy} would re-index positions; use a policy that keeps "
                "positions (tova, h2o)"
            )
            cos, sin = position_embeddings(self.path, self.wrapped, kwargs, use)
            if self.rotation is None:
                self.rotation = rotation_of(self.path, self.wrapped, args, kwargs, use)
            cache = bridge.cache_in(args, kwargs, self.path)
            for step in cache.required_batch.steps:
                self._record(cache, step, self.rotation, of_rows(cos, step.rows), of_rows(sin, step.rows))
            kwargs["position_embeddings"] = _identity(cos.shape, cos.dtype, cos.device)
        return kwargs

    def lasting_arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if not self.policy.reindexed:
            return kwargs
        cos, _ = kwargs["position_embeddings"]
        # Not the cached ones: tensors created during a graph's capture have values only after the graph has run.
        identity = _identity.__wrapped__(cos.shape, cos.dtype, cos.device)
        return {**kwargs, "position_embeddings": identity}

    def _record(self, cache: HeteroCache, step: Step, rotation: Rotation, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Record the rotations of the positions that entries may get in the cache, in one table shared between layers.

        A token's position in the cache never exceeds that in its sequence, so the received rotations suffice.
        """
        layers = step.group.layers
        layer: BoundedLayer = layers[self.layer_idx]
        if layer.rotary is not None and layer.rotary.is_known(cos, layer.length):
            return
        if layer.rotary is None:
            others = (other.rotary for other in layers if isinstance(other, BoundedLayer))
            same = (table for table in others if table is not None and table.rotation == rotation)
            layer.rotary = next((table for table in same if table.is_source(cos)), None) or RotaryTable(rotation)
        most = self.policy.most_entries
        # The catalyst of any layer may follow the entries.
        known = len(layer.rotary)
        is_full = most is not None and known >= most and known >= most + _longest_catalyst(cache)
        if not is_full and not layer.rotary.record(cos, sin, layer.get_seq_length()):
            raise UnsupportedModelError(
                f"{self.path}: the model rotates a position differently than before; {_NAME} with policy "
                f"{self.settings.policy} needs one rotation per position, use one that keeps positions (tova, h2o)"
            )
        layer.rotary.set_known(cos, layer.length)

    # -- attention

    def prefill_chunk(self, layer: BoundedLayer, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        """See AttentionOperator: exact attention to the cached entries, and causal attention among the new tokens."""
        if call.sliding_window is not None:
            raise UnsupportedModelError(
                f"{self.path}: the model requests a sliding window of {call.sliding_window}; use "
                "SlidingWindowAttention there"
            )
        cached = layer.num_entries
        keys, values = layer.extend(call.k, call.v)
        if step.is_decode:
            layer.read = layer.read.plus(keys[0].nbytes + values[0].nbytes)
        q = layer.rotated(call.q, cached)
        if self.prompt_attention is not None and call.k.shape[2] > 1:
            past = keys[:, :, :cached], values[:, :, :cached]
            out, lse = self.prompt_attention(step, call, *past, layer.num_entries + layer.coming)
        else:
            out, lse = _attention(q, keys, values, cached, call.scale, call.softcap)
            if call.sink is not None:
                out, lse = apply_sink(out, lse, call.sink)
        if layer.record is not None and step.is_decode and step.stores:
            assert layer.entries is not None
            layer.record.add_keys(q, keys[0], layer.entries.positions[0], call.scale, call.softcap)
            layer.record.complete(lse, sink=call.sink)
        seen = layer.key_array, step.part.question, step.is_decode
        layer.observe(ObservedAttention(q, lse, keys, call.scale, call.softcap, *seen))
        return out.to(call.q.dtype)

    def decode_step(self, layer: BoundedLayer, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        # As `prefill`, without a context manager's frames.
        layer.begin_prefill(step)
        try:
            out = self.prefill_chunk(layer, step, call)
            self.end_prefill(layer, step)
            return out
        finally:
            layer.leave_prefill()

    # -- description

    @classmethod
    def registries(cls) -> Mapping[str, Mapping[str, str]]:
        return BOUNDED.registries()

    @classmethod
    def configure_together(cls, operators: Sequence[AttentionOperator]) -> None:
        configure_policies(operators)

    def stored_by(self) -> dict[str, Any]:
        """Settings that determine what is stored; sparse prefill settings only if it is used. See AttentionOperator."""
        settings = self.settings
        idle = settings.idle_prefill_settings if isinstance(settings, WholePromptSettings) else frozenset()
        return {name: value for name, value in self.settings_in_layer().items() if name not in idle}

    def footprint(self, shape: KVShape) -> BoundedFootprint:
        return BoundedFootprint(shape, policy=self.policy)

    def compile_kernels(self, kv_heads: int, group: int, k_dim: int, v_dim: int, softcap: float) -> None:
        weight = next(self.wrapped.parameters())
        if weight.device.type != "cpu":
            return
        cached_entries.compile_for(np.dtype(np.float32 if weight.dtype == torch.float32 else np.int16))
        if self.prompt_attention is not None:
            self.prompt_attention.compile(self._own_config.dtype, k_dim, v_dim, softcap)
        if self.policy.reindexed and weight.dtype == torch.float32:
            rotary.compile_kernels()

    def attended_tokens(self, length: int) -> float:
        """See AttentionOperator; a layer may have fewer entries, as InfiniPot has after distillation."""
        return min(length, self.policy.budget_for(length))


@functools.lru_cache(maxsize=16)
def _identity(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the identity rotation, expanded from scalars."""
    one, zero = torch.ones((), dtype=dtype, device=device), torch.zeros((), dtype=dtype, device=device)
    return one.expand(shape), zero.expand(shape)


def _longest_catalyst(cache: HeteroCache) -> int:
    """Length of the longest catalyst text that a policy runs after the entries, in tokens; 0 without any."""
    texts = {layer.policy.catalyst_text() for layer in cache.strided_layers if isinstance(layer, BoundedLayer)}
    return max((len(cache.tokenized(text)) for text in texts if text is not None), default=0)


def _attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cached: int, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of new tokens to keys [batch, kv_heads, cached + new, dim], the new ones last: out and lse, as q is."""
    if q.shape[2] > 1:
        past, own = slice(0, cached), slice(cached, cached + q.shape[2])
        return chunk_attention(
            q, keys[:, :, past], values[:, :, past], keys[:, :, own], values[:, :, own], scale, softcap
        )
    found = attention_with_lse(folded_heads(q, keys.shape[1]), keys, values, scale, softcap)
    return unfolded_heads(q, *found)


def configure_policies(operators: Iterable[Operator]) -> None:
    """Set each policy's rank among the layers of the same settings; warn of positions that exceed the model's training.

    Raises HeteroKVError if some layers need whole prompts and others prompts in strides.
    """
    bounded = [operator for operator in operators if isinstance(operator, BoundedAttention)]
    _require_composable(bounded)
    groups: dict[BoundedSettings, list[BoundedAttention]] = {}
    for operator in sorted(bounded, key=lambda operator: operator.layer_idx):
        groups.setdefault(operator.settings, []).append(operator)
    for group in groups.values():
        for rank, operator in enumerate(group):
            operator.policy.rank, operator.policy.ranks = rank, len(group)
        _warn_of_far_positions(group[0])


def _warn_of_far_positions(operator: BoundedAttention) -> None:
    """Log once if entries may get positions beyond those that the model was trained for."""
    most, settings = operator.policy.most_entries, operator.settings
    trained = getattr(operator._own_config, "max_position_embeddings", None)
    if operator.policy.reindexed and most is not None and trained and most > trained:
        _warn(
            f"policy {settings.policy} may give entries {most} positions, but the model was trained for {trained}: "
            "answers may get worse when the budget is full; set a "
            f"budget{' or a stride' if isinstance(settings, StridedSettings) else ''} that is {most - trained} "
            "smaller"
        )


@functools.cache
def _warn(message: str) -> None:
    _logger.warning(message)


def _require_composable(bounded: Sequence[BoundedAttention]) -> None:
    strided = [operator for operator in bounded if operator.policy.strided]
    full = [operator for operator in bounded if not operator.policy.strided]
    if strided and full:
        raise HeteroKVError(
            f"{full[0].path} has policy {full[0].settings.policy}, which needs the whole prompt in one layer at a "
            f"time, but {strided[0].path} has policy {strided[0].settings.policy}, which needs each stride of a "
            "prompt to pass through all layers; use policies of one kind in all BoundedAttention layers, or combine "
            "one of them with RetrievalAttention"
        )
