"""Layer-by-layer prefill in chunks: a long prompt needs one layer's KV and one chunk's activations at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hetero_kv.adapter import attention_module, bridge, chunking, recurrent
from hetero_kv.adapter.cache_argument import passed_cache
from hetero_kv.adapter.declarations import CHUNKED_DECODER_LAYER
from hetero_kv.adapter.foreign import is_plain
from hetero_kv.adapter.fused_decode_layer import FusedDecodeLayer
from hetero_kv.adapter.fused_feed_forward_layer import FusedFeedForwardLayer
from hetero_kv.adapter.fused_prefill_layer import FusedPrefillLayer, is_plain_but_for_projections
from hetero_kv.adapter.fused_recurrent_layer import FusedRecurrentLayer
from hetero_kv.adapter.kernel_mixer import KernelMixer
from hetero_kv.adapter.llama_layer import FastPathOwner
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.adapter.queued_tensor import computed
from hetero_kv.adapter.replacement import Operator
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.forward_batch import ForwardBatch, ForwardKind
from hetero_kv.engine.recurrent_state import state_layer
from hetero_kv.errors import UnsupportedModelError
from hetero_kv.malloc_tuning import freed_memory_kept, give_back_freed_memory
from hetero_kv.settings.engine_settings import EngineSettings

# States of the fused decode layer: not tried yet; or the layer has foreign parts, which each prompt checks again.
_UNTRIED, _FOREIGN = object(), object()
# Attributes of an attention module that it passes to its attention function.
#: Parts of layers that pass several streams of hidden states: of Gemma 3n, DeepSeek V4 and Hunyuan 4, Qwen4-Exp.
STREAMS = "altup", "attn_hc", "attn_hyper_connection"
_CALLED_WITH = "scaling", "sliding_window"
# From this many tokens on, a layer's temporaries are so large that freed memory is kept for the next layer.
_LONG_PROMPT = 512
# Minimum number of last tokens for which the last layer's output is computed: smaller products use other kernels.
_MIN_OUTPUT_TOKENS = 128


class ChunkedDecoderLayer(Operator):
    """Runs a decoder layer over a prompt chunk by chunk, within one prefill of its attention's cache layer.

    A layer with a recurrent module carries its state from chunk to chunk. A layer may have both attention and such a
    module (Falcon-H1), or neither (an MLP, or experts, alone).

    The model's own forward walks from layer to layer with the hidden states of the whole prompt, so that only one
    layer's keys and values are on the compute device at a time (KTransformers' layer-wise chunked prefill). From the
    second layer on the output overwrites the input: one buffer of hidden states serves all layers.

    Attributes:
        attention: the layer's attention, or its operator; without one, the recurrent module.
        is_recurrent: whether it has a recurrent module.
    """

    meaning = CHUNKED_DECODER_LAYER.meaning
    prefills_exactly = True
    continues_exactly = True

    def __init__(self, path: str, wrapped: nn.Module, settings: Any, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        found = _mixers_of(path, wrapped)
        self.layer_idx = found.layer_idx
        # Not registered as submodules, because `wrapped` has them. Operators of deeper modules are already in place.
        attention, mixer = (name and wrapped.get_submodule(name) for name in (found.attention, found.recurrent))
        self.__dict__.update(attention=attention or mixer, _attention=attention, _recurrent=mixer)
        self._recurrent_path = f"{path}.{found.recurrent}"
        self._is_replaced = isinstance(attention, AttentionOperator)
        if self._is_replaced:
            attention.__dict__["input_norm"] = getattr(wrapped, "input_layernorm", None)
        self.is_recurrent = mixer is not None
        # All paths are tried before the first token and the first prompt: weights are loaded after rules are injected.
        self._native: Any = _UNTRIED
        #: Beside attention, the recurrent module's.
        self._kernels: Any = _UNTRIED
        self._short: FusedPrefillLayer | None = None
        #: The modules and settings with which the fused prefill layer was tried.
        self._tried_with: list[Any] | None = None

    @classmethod
    def require_suitable(cls, path: str, module: nn.Module) -> None:
        found = _mixers_of(path, module)
        if found.attention and attention_module.is_passed_repeatedly(module.get_submodule(found.attention)):
            raise UnsupportedModelError(
                f"{path} ({type(module).__name__}) is passed several times by a token; "
                "ChunkedDecoderLayer supports one pass; leave the model without rules"
            )
        if streams := [name for name in STREAMS if hasattr(module, name)]:
            raise UnsupportedModelError(
                f"{path} ({type(module).__name__}) passes several streams of hidden states ({streams[0]}); "
                "ChunkedDecoderLayer supports one; leave the model without rules"
            )

    def compile_own_kernels(self) -> None:
        """Try the fused decode and prefill layers, which compiles both."""
        if self._is_replaced:
            self._fused_decode()
            self._fused_prefill()
        if self.is_recurrent:
            self._fused_recurrent()
        elif self._attention is None:
            self._fused_feed_forward()

    @property
    def multiplies_by_tiles(self) -> bool:
        """Whether many rows take the fused decode layer, whose products are then computed by AMX tiles."""
        native = self._fused_decode() if self._is_replaced else None
        return native is not None and native.by_tiles

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The wrapped layer's output for [batch, tokens, hidden]; a decoded token is not chunked."""
        cache = passed_cache(kwargs)
        if type(cache) is not HeteroCache:
            cache = bridge.cache_in(args, kwargs, self.path)
        batch = cache.required_batch
        is_prefill = batch.kind is ForwardKind.PREFILL
        attention = self._attention
        replaced = self._is_replaced
        if replaced and not is_prefill:
            if attention.reads_hidden_states:
                attention.layer_input = hidden_states
            native = self._fused_decode()
            if native is not None and not args and native.fits(hidden_states, cache, kwargs, batch.decoded_rows):
                return self._kept(cache, batch, native(hidden_states, cache, kwargs, batch.decoded_rows))
        if (replaced or attention is None) and not is_prefill:
            if attention is None and not self.is_recurrent:
                block = self._fused_feed_forward()
                if block is not None and not args and block.fits(hidden_states):
                    return self._kept(cache, batch, block(hidden_states, batch.queue))
            step = self._fused_recurrent() if self.is_recurrent else None
            if isinstance(step, FusedRecurrentLayer) and not args and step.fits(hidden_states, cache, kwargs):
                return self._kept(cache, batch, step(hidden_states, cache, batch.queue))
            own = None if step is None else step.mixer_forward
            with own.in_place(is_prompt=False) if own is not None and own.takes_tokens else nullcontext():
                return self._kept(cache, batch, self.wrapped(computed(hidden_states), *args, **kwargs))

        if hidden_states.dim() != 3:
            raise UnsupportedModelError(
                f"{self.path}: hidden states have the shape {list(hidden_states.shape)}; ChunkedDecoderLayer supports "
                "[batch, tokens, hidden] only"
            )
        total = hidden_states.shape[1]
        if self._native is _FOREIGN:
            self._native = _UNTRIED
        if self._kernels is _FOREIGN:
            self._kernels = _UNTRIED
        _refuse_unsliceable(self.path, args, kwargs)
        chunk_size = min(self.engine.chunk_size, cache.chunk_tokens or total, total)
        cache.passing_tokens = chunk_size
        chunked_pass = chunking.chunked_pass(hidden_states, kwargs, chunk_size, chunking.is_reusable(hidden_states))
        is_on_cpu = hidden_states.device.type == "cpu"
        is_plain = replaced and is_on_cpu and not torch.is_autocast_enabled("cpu")
        short = self._fused_prefill() if is_plain else None
        is_long = total >= _LONG_PROMPT and is_on_cpu
        is_last = self.layer_idx == cache.number_of_layers - 1
        kept = batch.request.logits_to_keep if is_last else 0
        first_needed = total - max(kept, _MIN_OUTPUT_TOKENS) if kept else 0
        if self.layer_idx == 0:
            cache.report_progress(0, 0, total)
        with attention.prefill(batch.steps[0]) if isinstance(attention, AttentionOperator) else nullcontext():
            for chunk, part, chunk_kwargs in chunked_pass.chunks():
                if attention is not None and not replaced:
                    chunk_kwargs["attention_mask"] = bridge.chunk_mask(
                        attention, cache, part, chunk_kwargs.get("position_ids")
                    )
                with self._continuing(cache, part), freed_memory_kept() if is_long else nullcontext():
                    place = chunked_pass.place(chunk)
                    if short is not None and place is not None and not args and short.fits(part, chunk_kwargs):
                        needed = chunk.stop - max(chunk.start, first_needed)
                        result = short(part, cache, chunk_kwargs, place, max(0, needed))
                    else:
                        result = self.wrapped(part, *args, **chunk_kwargs)
                chunked_pass.put(chunk, result[0] if isinstance(result, tuple) else result)
                cache.report_progress(self.layer_idx, chunk.stop, total)
        if is_long and is_last:
            give_back_freed_memory()
        output = chunked_pass.output()
        chunking.mark_reusable(output)
        return (output, *result[1:]) if isinstance(result, tuple) else output

    def _kept(self, cache: HeteroCache, batch: ForwardBatch, output: Any) -> Any:
        """A layer's output; the last layer's is computed, without the rows of a prompt's part that need no logits."""
        if self.layer_idx != cache.number_of_layers - 1:
            return output
        output = (computed(output[0]), *output[1:]) if isinstance(output, tuple) else computed(output)
        if batch.kind is not ForwardKind.MIXED:
            return output
        rows = batch.kept_rows
        return (output[0][rows], *output[1:]) if isinstance(output, tuple) else output[rows]

    def _fused_decode(self) -> FusedDecodeLayer | None:
        """The fused decode layer; None if the layer, in its present state, has no equivalent one."""
        native = self._native
        if native is _UNTRIED or (isinstance(native, FusedDecodeLayer) and not native.is_current):
            is_theirs = not is_plain(self.wrapped)
            self._native = native = _FOREIGN if is_theirs else FusedDecodeLayer.of(self.wrapped, self.attention)
        return None if native is _FOREIGN else native

    def _fused_recurrent(self) -> FusedRecurrentLayer | KernelMixer | None:
        """The fused decode step of a recurrent layer, or its mixer's kernels; None if it has, at present, neither."""
        native = self._native if self._attention is None else self._kernels
        if native is _UNTRIED or (isinstance(native, FusedRecurrentLayer | KernelMixer) and not native.is_current):
            owner = FastPathOwner(self._recurrent_path, self.engine)
            if is_plain(self.wrapped):
                native = FusedRecurrentLayer.of(self.wrapped, owner) or KernelMixer.of(self._recurrent, owner)
            else:
                native = _FOREIGN
            self.__dict__["_native" if self._attention is None else "_kernels"] = native
        return None if native is _FOREIGN else native

    def _fused_feed_forward(self) -> FusedFeedForwardLayer | None:
        """The fused decode step of a layer of an MLP or of experts alone; None if it has, at present, none."""
        native = self._native
        if native is _UNTRIED or (isinstance(native, FusedFeedForwardLayer) and not native.is_current):
            owner = FastPathOwner(self.path, self.engine)
            is_theirs = not is_plain(self.wrapped)
            self._native = native = _FOREIGN if is_theirs else FusedFeedForwardLayer.of(self.wrapped, owner)
        return None if native is _FOREIGN else native

    def _fused_prefill(self) -> FusedPrefillLayer | None:
        """The fused prefill layer; None if the layer, in its present state, has no equivalent one."""
        if not is_plain_but_for_projections(self.wrapped):
            return None
        attention: Any = self.attention.wrapped
        first = next(self.wrapped.parameters(), None)
        there = [*self.wrapped.modules(), *([] if first is None else [first.dtype, first.device])]
        called_with = (getattr(attention, name, None) for name in _CALLED_WITH)
        there += [value for value in called_with if isinstance(value, int | float)]
        if there != self._tried_with:
            self._short, self._tried_with = FusedPrefillLayer.of(self.wrapped, self.attention), there
        return self._short

    @contextmanager
    def _continuing(self, cache: HeteroCache, chunk: torch.Tensor) -> Iterator[None]:
        """Within this context the layer continues from its cached data, including a recurrent state.

        While its attention pauses, the recurrent module has its own forward for other forwards of the model.
        """
        if not self.is_recurrent:
            yield
            return
        step, module = cache.required_batch.steps[0], self._recurrent
        own, pause = module.__dict__.get("forward"), step.pause

        def pause_with_own_forward() -> None:
            assert pause is not None
            with recurrent.forward_replaced(module, own):
                pause()

        with self._recurrent_continuing(cache, chunk):
            step.pause = None if pause is None else pause_with_own_forward
            try:
                yield
            finally:
                step.pause = pause

    def _recurrent_continuing(self, cache: HeteroCache, chunk: torch.Tensor) -> AbstractContextManager[None]:
        """Within this context the recurrent module continues from its cached state."""
        step = self._fused_recurrent()
        own = None if step is None else step.mixer_forward
        state = state_layer(cache, self.layer_idx)
        takes = own is not None and own.fits(chunk, state)
        if own is not None and takes and (chunk.shape[1] > 1 or own.takes_tokens):
            return own.in_place()
        if chunk.shape[1] == 1 or not cache.has_previous_state(self.layer_idx):
            return nullcontext()
        module = self._recurrent
        if recurrent.continues_in_chunks(self._recurrent_path, module, chunk, state.number_of_states):
            return nullcontext()
        return recurrent.token_by_token(module)


@dataclass(frozen=True)
class _Mixers:
    """The modules of a decoder layer that read other tokens: their paths within it, and their layer index."""

    attention: str | None
    recurrent: str | None
    layer_idx: int


def _mixers_of(path: str, decoder_layer: nn.Module) -> _Mixers:
    """The token mixers of a decoder layer. Raises UnsupportedModelError unless there are at most one of each kind."""
    modules = [(name, module) for name, module in decoder_layer.named_modules() if name]
    attentions = [(name, module) for name, module in modules if attention_module.is_attention(module)]
    recurrents = [(name, module) for name, module in modules if recurrent.is_recurrent(module)]
    names = [name for name, _ in (*attentions, *recurrents)]
    inner = {name for name in names if any(name.startswith(f"{other}.") for other in names)}
    kinds = [[each for each in found if each[0] not in inner] for found in (attentions, recurrents)]
    numbers = {module.layer_idx for found in kinds for _, module in found}
    if not names and attention_module.has_no_cache(decoder_layer):
        numbers = {decoder_layer.layer_idx}
    if any(len(found) > 1 for found in kinds) or len(numbers) != 1:
        outermost = [name for found in kinds for name, _ in found]
        raise UnsupportedModelError(
            f"{path} ({type(decoder_layer).__name__}) has {len(outermost)} modules with a layer_idx (attention or "
            f"recurrent){_listed(outermost)}; ChunkedDecoderLayer needs exactly one, one of each kind with the same "
            "index, or a block of an MLP alone; match decoder layers only"
        )
    attention, mixer = (found[0][0] if found else None for found in kinds)
    return _Mixers(attention, mixer, int(numbers.pop()))


def _listed(names: list[str]) -> str:
    return f" ({', '.join(names[:4])}{', …' if names[4:] else ''})" if names else ""


def _refuse_unsliceable(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise UnsupportedModelError for an argument with a possible sequence dimension that is not known."""
    for name, value in (*((f"positional argument {i + 1}", a) for i, a in enumerate(args)), *kwargs.items()):
        if isinstance(value, torch.Tensor) and name not in chunking.SEQUENCE_DIM:
            raise UnsupportedModelError(
                f"{path}: the layer receives {name}, a tensor of shape {list(value.shape)}, which ChunkedDecoderLayer "
                f"cannot cut into chunks (it can cut {', '.join(chunking.SEQUENCE_DIM)})"
            )
        if name.startswith("output_") and value:
            raise UnsupportedModelError(
                f"{path}: {name}={value!r} would be recorded once per chunk; request it without a HeteroCache, after "
                "hetero_kv.eject(model)"
            )
