"""Shares one prefill among many methods: records a prompt's full-attention prefill and fills caches from it.

Methods that prefill exactly differ only in later steps, so that a comparison of ten of them on one prompt costs one
prefill. A cache from a recording is in the state that a prefill of the prompt under its rules would leave: bit for bit
if the recording used the same `chunk_size`, else up to rounding.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from hetero_kv.adapter import attention_module
from hetero_kv.adapter.cache_argument import as_cache
from hetero_kv.adapter.recurrent import is_recurrent
from hetero_kv.adapter.replacement import Operator
from hetero_kv.engine.cache import HeteroCache, Progress
from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.recorded_layer import RecordedLayer, RecordingLayer
from hetero_kv.evals.recording_attention import recording_rules
from hetero_kv.families.retrieval.settings import LONGEST_QUESTION, UNKNOWN_QUESTION
from hetero_kv.families.window.layer import WindowLayer
from hetero_kv.rules.injecting import eject, inject, suspended
from hetero_kv.rules.injection import Injection
from hetero_kv.settings.engine_settings import EngineSettings

# Addresses of a rotation's parts -> the concatenated rotation.
_Rotations = dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]]

_STORAGE = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class RecordedPrefill:
    """The exact, full-attention prefill of one prompt.

    Attributes:
        input_ids: [1, tokens] int64, the prompt.
        logits: [1, vocab], after the prompt's last token.
        layers: a recording per layer of the model.
        max_seq_len: capacity in tokens of the caches made from it; None uses the rules' setting.
        question: how many of the prompt's last tokens are the question about the earlier ones; None if unknown.
    """

    input_ids: torch.Tensor
    logits: torch.Tensor
    layers: tuple[RecordedLayer, ...]
    max_seq_len: int | None
    question: int | None
    _model: weakref.ref[PreTrainedModel]

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return self.input_ids.shape[1]

    def cache_for(self, model: PreTrainedModel) -> HeteroCache:
        """A cache in the state after a prefill of the prompt under the rules now injected.

        Raises:
            HeteroKVError: an operator's prefill is not full attention, no rules are injected, the recording has fewer
                last queries than an operator observes, or it belongs to another model.
            CacheFullError: the prompt does not fit into `max_seq_len`.
            OutOfMemoryError: `max_seq_len` does not fit into the free memory.
        """
        self._require_own(model)
        injection: Injection | None = getattr(model, "hetero_kv_injection", None)
        if injection is None:
            raise HeteroKVError(
                f"{type(model).__name__} has no rules injected; call hetero_kv.inject(model, rules) before cache_for, "
                "or take untouched_cache for the model as it is"
            )
        for path, operator in injection.operators.items():
            if not operator.prefills_exactly:
                raise HeteroKVError(
                    f"{path} ({type(operator).__name__}) does not prefill with full attention, so that a recorded "
                    "prefill is not its own; prefill the prompt under its rules: "
                    "model(input_ids, past_key_values=HeteroCache(model))"
                )
        cache = HeteroCache(model, self.max_seq_len)
        self._fill(cache, model, injection)
        return cache

    def _fill(self, cache: HeteroCache, model: PreTrainedModel, injection: Injection) -> None:
        """Bring every layer of an empty cache into the state after the prompt. Raises the errors of `cache_for`."""
        self._require_own(model)
        operators = {operator.layer_idx: operator for operator in injection.attention_operators()}
        rotations: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        with (
            cache.asking(self.question),
            cache.forward(cache.plan_batch([self.tokens], self.tokens), is_decode=False) as batch,
        ):
            (step,) = batch.steps
            for index, recorded in enumerate(self.layers):
                layer = step.group.layers[index]
                if index not in operators:
                    recorded.fill(layer)
                    continue
                device = _device_of(operators[index])
                moved = recorded.to(device)
                if recorded.rotation is not None and moved.rotation is not None:
                    # Layers that share a rotation share it on every device.
                    key = id(recorded.rotation[0]), device
                    moved = replace(moved, rotation=rotations.setdefault(key, moved.rotation))
                operators[index].load_prefill(layer, step, moved)
        cache.columns = cache.columns.grown(self.tokens, [self.tokens])

    def untouched_cache(self, model: PreTrainedModel) -> DynamicCache:
        """A transformers cache after the prompt, for the model without rules.

        Raises HeteroKVError if the recording belongs to another model, or the model has rules injected.
        """
        self._require_own(model)
        if getattr(model, "hetero_kv_injection", None) is not None:
            raise HeteroKVError(
                f"{type(model).__name__} has rules injected; call hetero_kv.eject(model) before untouched_cache, or "
                "take cache_for"
            )
        cache = DynamicCache(config=attention_module.text_config(model))
        for layer, recorded in zip(cache.layers, self.layers, strict=True):
            recorded.to(model.device).fill(layer)
        return cache

    def _require_own(self, model: PreTrainedModel) -> None:
        if self._model() is not model:
            raise HeteroKVError(
                f"the prefill was recorded with another model than this {type(model).__name__}; record it anew: "
                "record_prefill(model, input_ids)"
            )


def record_prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    after: RecordedPrefill | None = None,
    observation_len: int = UNKNOWN_QUESTION,
    question: int | None = None,
    chunk_size: int | None = None,
    max_seq_len: int | None = None,
    on_progress: Progress | None = None,
) -> RecordedPrefill:
    """Prefill a prompt with full attention, layer by layer in chunks, and record the result.

    The recording is in DRAM, in the model's dtype. The model and its injected rules, if any, are unchanged afterwards.

    Args:
        input_ids: [1, tokens], at least two tokens.
        after: a recording of the prompt's beginning, which `input_ids` continue: many questions about one text cost one
            prefill of the text. It is unchanged.
        observation_len: how many last queries to keep, in addition to the question's; an operator uses as many as it
            observes.
        question: how many of the prompt's last tokens are the question about the earlier ones; None if unknown.
        chunk_size: tokens per chunk; None uses the setting of the rules now injected, or the default.
        max_seq_len: capacity in tokens of the caches made from the recording; None uses the rules' setting.
        on_progress: called after every chunk.

    Raises:
        HeteroKVError: `input_ids` has another shape, or `after` belongs to another model.
        UnsupportedModelError: the model's attention cannot be recorded.
        OutOfMemoryError: the recording does not fit into the free memory.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 2:
        raise HeteroKVError(
            f"input_ids has the shape {list(input_ids.shape)}; a recorded prefill is of one prompt of two tokens or "
            "more, [1, tokens]"
        )
    injected: Injection | None = getattr(model, "hetero_kv_injection", None)
    if chunk_size is None:
        chunk_size = injected.engine.chunk_size if injected else EngineSettings.chunk_size
    observed = max(observation_len, min(question or 0, LONGEST_QUESTION))
    settings = {"chunk_size": chunk_size, "observation": observed, "kv_type": _storage_type(model)}
    whole = input_ids if after is None else torch.cat([after.input_ids, input_ids], dim=1)
    with suspended(model):
        recording = inject(model, recording_rules(), command_line=settings)
        recording.preparation.skip()
        try:
            cache = HeteroCache(model, max_seq_len=whole.shape[1], on_progress=on_progress)
            if after is not None:
                after._fill(cache, model, recording)
            with torch.no_grad():
                arguments = as_cache(model.forward, cache)
                logits = model(input_ids.to(model.device), logits_to_keep=1, **arguments).logits[:, -1]
        finally:
            eject(model)
    rotations: _Rotations = {}
    layers = tuple(_recorded(layer, rotations) for layer in cache.layers)
    return RecordedPrefill(whole, logits, layers, max_seq_len, question, weakref.ref(model))


def shares_prefill(model: PreTrainedModel | Injection) -> bool:
    """Whether all operators now injected can load a recorded prefill; recurrent states are not recorded."""
    injection = model if isinstance(model, Injection) else getattr(model, "hetero_kv_injection", None)
    if injection is None:
        return True
    return all(operator.prefills_exactly for operator in injection.operators.values()) and not any(
        is_recurrent(module) for module in injection.model.modules()
    )


def _recorded(layer: Any, rotations: _Rotations) -> RecordedLayer:
    if isinstance(layer, RecordingLayer):
        assert layer.recorded is not None
        return replace(layer.recorded, rotation=_rotation(layer, rotations))
    if isinstance(layer, WindowLayer):
        keys, values, _, end, length, _ = layer.snapshot()
        assert keys is not None
        assert values is not None
        newest = slice(max(0, end - min(length, layer.window - 1)), end)
        return RecordedLayer(keys[:, :, newest].clone(), values[:, :, newest].clone(), length).to(torch.device("cpu"))
    raise HeteroKVError(
        f"a layer whose cache is of kind {type(layer).__name__} cannot be recorded: the rules of full attention do not "
        "replace its attention"
    )


def _rotation(layer: RecordingLayer, known: _Rotations) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The rotation of the whole prompt in DRAM; layers that share a rotation get the same tensors."""
    if not layer.rotations:
        return None
    parts = tuple(cos.data_ptr() for cos, _ in layer.rotations)
    if parts not in known:
        cos, sin = (torch.cat(all_of_one, dim=1).cpu() for all_of_one in zip(*layer.rotations, strict=True))
        known[parts] = cos, sin
    return known[parts]


def _storage_type(model: PreTrainedModel) -> str:
    """The storage type of the model's dtype, for the memory plan of the recording."""
    if model.dtype not in _STORAGE:
        raise HeteroKVError(
            f"the model's dtype is {model.dtype}; a prefill is recorded in {', '.join(map(str, _STORAGE))}"
        )
    return _STORAGE[model.dtype]


def _device_of(operator: Operator) -> torch.device:
    return next(operator.parameters()).device
