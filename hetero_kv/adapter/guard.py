"""The guard of a model's forward: it refuses unsupported calls before anything is stored, and undoes failed forwards.

A call without a cache gets a new one. Forwards of one model run one after the other, also from several threads.

Rows of equal length are computed in one forward. Left-padded prompts are computed row by row, or in runs of equal rows,
each as if it were alone; decoded tokens are computed together, regardless of their rows' lengths.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from hetero_kv.adapter import bridge
from hetero_kv.adapter.cache_argument import STATE_NAME, cache_name, passed_cache, renamed
from hetero_kv.adapter.cacheless import refuse_other_caches, without_cache
from hetero_kv.adapter.capture_state import CaptureState
from hetero_kv.adapter.captured_steps import CapturedSteps
from hetero_kv.adapter.hidden_state_offload import logits_to_keep, offload_hidden_states
from hetero_kv.adapter.model_call import ModelCall, Signature, joined_rows
from hetero_kv.adapter.padding import tokens_per_row
from hetero_kv.adapter.strided_prefill import run_strided
from hetero_kv.engine.batch_slice import BatchSlice
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.rollback import CacheTransaction, rollback_on_error
from hetero_kv.errors import HeteroKVError, UnsupportedModelError, is_out_of_memory
from hetero_kv.gpu_ops.attention_backend import AttentionBackend, attending_by
from hetero_kv.gpu_ops.host_copies import on_device
from hetero_kv.settings.engine_settings import EngineSettings

_RECORDED = ("output_hidden_states", "output_attentions")
# Names by which a forward reads the position of its first token.
_LENGTH_NAMES = frozenset({"get_seq_length", "get_query_offset", "cache_position"})


class GuardContext(Protocol):
    """The properties of an injected model that its forwards depend on.

    Attributes:
        engine: its `hidden_device` places the hidden states between layers.
        attention: the attention backend on a GPU.
        captures: whether decoded tokens are captured there.
        one_at_a_time: the context of a forward: a second thread waits.
        needs_cache: whether the model's layers require a HeteroCache.
    """

    @property
    def engine(self) -> EngineSettings: ...
    @property
    def attention(self) -> AttentionBackend: ...
    @property
    def captures(self) -> CaptureState: ...
    @property
    def one_at_a_time(self) -> AbstractContextManager[Any]: ...
    @property
    def needs_cache(self) -> bool: ...
    def new_cache(self) -> HeteroCache: ...
    def adopt(self, cache: HeteroCache) -> None:
        """Adopt a cache that was created under equal rules in this model.

        Raises HeteroKVError, naming the difference, for a cache of other rules or another model.
        """


def guarded(model: Any, by: GuardContext, *, has_head: bool) -> Callable[..., Any]:
    """`model.forward` with the guard around it.

    Args:
        model: the module that walks through the layers; or, with `has_head`, the whole model around it.

    Raises, when called:
        CacheFullError: the new tokens do not fit into every layer.
        CacheInUseError: another thread uses the cache.
        HeteroKVError: the cache has another model or other rules, or is no HeteroCache.
        OutOfMemoryError: Python, numpy or torch ran out of memory; the message says what fits.
        UnsupportedModelError: the config requests records that chunks would garble, or the attention mask is no left
            padding.
    """
    inner = model.forward
    if not has_head:
        inner = offload_hidden_states(model, _behind_the_cache(model), by.engine)
    forward = CapturedSteps(model, inner, by.captures, has_head)
    signature = Signature(inner)
    signature.forward = forward
    name = cache_name(inner)

    @functools.wraps(inner)
    def guarded_forward(*args: Any, **kwargs: Any) -> Any:
        kwargs = renamed(kwargs, name)
        cache = _cache_among(args, kwargs)
        if cache is not None:
            if cache.batch is not None or cache.strided is not None:
                with cache.in_use:
                    return nested(cache, args, kwargs)
            # The outermost context: the forward is over, or undone, when it ends.
            with CacheTransaction(cache) as whole:
                return first(cache, whole.go_back, args, kwargs)
        if not by.needs_cache:
            with by.one_at_a_time:
                return forward(*args, **kwargs)
        return without_cache(model, signature.call(args, kwargs), by.new_cache, guarded_forward)

    def nested(cache: HeteroCache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not has_head:
            _require_unchanged(model, cache)
        if cache.batch is not None or has_head:
            return forward(*args, **kwargs)
        return _inner(signature.call(args, kwargs), cache)

    def first(cache: HeteroCache, go_back: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # PEFT's prefix tuning passes a second cache, under the argument's older name.
        refuse_other_caches(model, kwargs)
        if cache.injection is not by:
            by.adopt(cache)
        if not has_head:
            _require_unchanged(model, cache)
        with by.one_at_a_time:
            return outermost(cache, go_back, args, kwargs)

    def outermost(
        cache: HeteroCache, go_back: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        _refuse_conflicts(model, kwargs)
        # Parts of the call pass through this guard again, as parts of a strided forward.
        whole = signature if has_head else reentrant
        call = signature.call(args, kwargs)
        try:
            kept = logits_to_keep(model, call) if has_head else 0
            with (
                rollback_on_error(cache, go_back),
                _without_gradients(),
                attending_by(by.attention),
                cache.requesting(logits_to_keep=kept),
            ):
                return _outermost(call, whole, cache, has_head)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            refusal = cache.ran_out_of_memory(error, *call.shape)
        # Raised after the handler, whose exception keeps the forward's allocations alive.
        raise refusal

    reentrant = Signature(inner)
    reentrant.forward = guarded_forward
    return guarded_forward


@contextmanager
def _without_gradients() -> Iterator[None]:
    """No gradients, and no inference mode: its tensors could not be written to outside of it, which caches do."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _behind_the_cache(model: Any) -> Callable[..., Any]:
    """The forward, with positions that follow the cached tokens, for models that would count from zero (Bamba)."""
    forward = model.forward
    signature = Signature(forward)
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is None or "position_ids" not in signature.names or not _LENGTH_NAMES.isdisjoint(code.co_names):
        return forward

    @functools.wraps(forward)
    def placed_forward(*args: Any, **kwargs: Any) -> Any:
        cache, call = _cache_among(args, kwargs), signature.call(args, kwargs)
        if cache is not None and call.arguments.get("position_ids") is None:
            first = cache.get_seq_length()
            call = call.placed(torch.arange(first, first + call.shape[1], device=_device(call))[None])
        return call.run()

    return placed_forward


def _cache_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> HeteroCache | None:
    cache = passed_cache(kwargs)
    if isinstance(cache, HeteroCache):
        return cache
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, HeteroCache)), None)


def _require_unchanged(model: Any, cache: HeteroCache) -> None:
    """Raise if the config has changed since the rules were injected, or since the cache got its tokens."""
    if model.config._attn_implementation != bridge.IMPLEMENTATION:
        raise UnsupportedModelError(
            f"the attention implementation of {type(model).__name__} was set to {model.config._attn_implementation!r} "
            "after inject (set_attn_implementation), but its operators compute attention themselves; call "
            "hetero_kv.eject(model), set it, and inject again"
        )
    depth = getattr(model.config, "num_hidden_layers", None)
    if cache.depth is None:
        cache.depth = depth
    elif cache.depth != depth:
        raise HeteroKVError(
            f"num_hidden_layers of {type(model).__name__} is {depth}, but the tokens in the cache passed through "
            f"{cache.depth} layers; use a HeteroCache for each depth, or restore config.num_hidden_layers"
        )
    if depth is not None and depth < cache.number_of_layers and cache.strided_layers:
        raise UnsupportedModelError(
            f"tokens leave {type(model).__name__} after {depth} of {cache.number_of_layers} layers "
            f"(assistant_early_exit), but layers of kind {type(cache.strided_layers[0]).__name__} need tokens that "
            "pass through all layers; generate without it, or inject rules that keep every token"
        )


def _refuse_conflicts(model: Any, kwargs: dict[str, Any]) -> None:
    """Raise for arguments and states that contradict a HeteroCache."""
    if kwargs.get("use_cache") is False:
        raise HeteroKVError(
            "use_cache=False was passed together with a HeteroCache, which stores every token; omit one of the two"
        )
    if model.training and any(getattr(each, "gradient_checkpointing", False) for each in model.modules()):
        raise UnsupportedModelError(
            f"{type(model).__name__} is training with gradient checkpointing, which withholds the cache from its "
            "layers; call model.eval(), or hetero_kv.eject(model) to train it"
        )
    _refuse_recording(model, kwargs)


def _refuse_recording(model: Any, kwargs: dict[str, Any]) -> None:
    for name in _RECORDED:
        if getattr(model.config, name, False) or kwargs.get(name):
            raise UnsupportedModelError(
                f"{name} would be recorded once per chunk and layer; request it without a HeteroCache, after "
                "hetero_kv.eject(model)"
            )


def _inner(call: ModelCall, cache: HeteroCache) -> Any:
    """Walk through the layers with one part of a strided forward."""
    strided = cache.strided
    if strided.replayed is not None:
        return strided.replayed
    rows, tokens = call.shape
    with cache.forward([BatchSlice(strided.group, slice(0, rows), slice(0, tokens))]), _without_gradients():
        strided.hidden = call.run()
    return strided.hidden


def _outermost(call: ModelCall, parts: Signature, cache: HeteroCache, has_head: bool) -> Any:
    """Pass the call's tokens through the layers and into the cache.

    Args:
        parts: the forward that runs the parts of a strided call.
    """
    if (rows := cache.request.rows) is not None:
        cache.reserve(rows.slices)
        return _token_by_row(call, cache, rows.slices)
    width = call.shape[1]
    tokens = tokens_per_row(call, cache.columns)
    slices = cache.plan_batch(tokens, width)
    strided_layers = [layer for batch_slice in slices for layer in batch_slice.group.strided_layers]
    if len(slices) > 1 and _pass_together(cache, slices):
        for layer in strided_layers:
            layer.begin_turn(1)
        output = _token_by_row(call, cache, slices)
    elif strided_layers:
        output = _slice_by_slice(call, parts, cache, slices, has_head)
    elif _is_whole(slices[0], call) and not cache.columns.is_ragged:
        # Layers of states alone get the mask itself, which is no chunk's; here it hides nothing.
        whole = call.without_mask() if STATE_NAME in call.signature.names else call
        with cache.forward(slices):
            output = whole.run()
    else:
        output = _slice_by_slice(call, None, cache, slices, has_head)
    cache.columns = cache.columns.grown(width, tokens)
    return output


def _token_by_row(call: ModelCall, cache: HeteroCache, slices: Sequence[BatchSlice]) -> Any:
    """Compute one token per row, each at its own position."""
    with cache.forward(slices) as batch:
        positions = on_device(torch.tensor(batch.positions)[:, None], _device(call))
        batch.placed.append(positions)
        return call.with_positions(positions).run()


def _is_whole(batch_slice: BatchSlice, call: ModelCall) -> bool:
    rows, width = call.shape
    return batch_slice.tokens == width and batch_slice.rows == slice(0, rows)


def _pass_together(cache: HeteroCache, slices: Sequence[BatchSlice]) -> bool:
    """Whether each row has one new token, and every layer takes rows of several lengths in one forward."""
    return len(slices) == len(cache.groups) and all(
        batch_slice.tokens == 1 and batch_slice.group.takes_other_lengths for batch_slice in slices
    )


def _slice_by_slice(
    call: ModelCall, parts: Signature | None, cache: HeteroCache, slices: Sequence[BatchSlice], has_head: bool
) -> Any:
    """Run the call for one group after the other; with `parts`, each in strides."""
    outputs = []
    for batch_slice in slices:
        own = call if _is_whole(batch_slice, call) and not cache.columns.is_ragged else call.of_slice(batch_slice)
        if parts is not None:
            outputs.append(run_strided(ModelCall(parts, own.arguments), cache, batch_slice.group, has_head=has_head))
            continue
        with cache.forward([batch_slice]):
            outputs.append(own.run())
    if _is_whole(slices[0], call):
        return outputs[0]
    return joined_rows(outputs, slices, call)


def _device(call: ModelCall) -> torch.device:
    assert call.inputs is not None
    return call.inputs.device
