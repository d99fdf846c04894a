"""Attention operators: they compute the attention of a module that they replace, and own its cache layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from hetero_kv.adapter import attention_module, bridge
from hetero_kv.adapter.cache_argument import passed_cache
from hetero_kv.adapter.decode_buffers import DecodeBuffers
from hetero_kv.adapter.footprint import LayerFootprint
from hetero_kv.adapter.graph_recording import NotCapturableError
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.adapter.replacement import Operator
from hetero_kv.cpu_ops.kernel_queue import KernelQueue
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.checkpoint import LayerCheckpoint
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.engine.recorded_prompt import RecordedPrompt
from hetero_kv.engine.statistics import Statistic
from hetero_kv.engine.step import Step
from hetero_kv.errors import HeteroKVError, UnsupportedModelError
from hetero_kv.settings.engine_settings import EngineSettings


class AttentionOperator(Operator):
    """An operator in the place of an attention module: it computes the attention and owns the layer's cache.

    The wrapped module still computes queries, keys and values, and projects the output. In between it calls the
    attention function `hetero_kv`, which calls `attend`.

    A family is a subclass of this class with its cache layer. The planner, `rules`, reports, JSON and the documentation
    know no family: they use only the methods below "used by the planner and reports".
    """

    #: Statistics of its cache layers (`FamilyLayer.statistics`).
    statistics: ClassVar[tuple[Statistic, ...]] = ()
    #: Whether `arguments_for` is called, for every layer and token. May be an instance attribute.
    changes_arguments: bool = False
    #: Whether `arguments_for` reads the hidden states, and the decoder layer's input (`layer_input`).
    reads_hidden_states: bool = False
    #: Whether it decodes several tokens of a sequence in one forward, layer by layer, as it would one after the other.
    #: May be an instance attribute.
    decodes_drafts: bool = False
    #: Whether tokens that are verified together may share a reading of keys and values, which rounds sums otherwise
    #: than for one token. `sparse` guesses need it; others leave the answer as it is, bit by bit.
    shares_readings: bool = False
    #: Whether it can decode a token by attention to few blocks, for a guess (`Step.draft_blocks`), or attends to few
    #: tokens anyway.
    drafts_sparsely: ClassVar[bool] = False
    #: Whether `attend_on: gpu` or `split` makes it attend on the GPU.
    reads_attend_on: ClassVar[bool] = False
    #: Whether it records the attention of a token in a layer that has a record (`FamilyLayer.record`).
    records_attention: bool = False
    #: The decoder layer's input of a decoded token, before any norm, [rows, 1, width]; None: unknown.
    layer_input: torch.Tensor | None = None
    #: The decoder layer's norm before the attention module; None where unknown.
    input_norm: nn.Module | None = None

    def __init__(self, path: str, wrapped: Any, settings: Any, engine: EngineSettings) -> None:
        super().__init__(path, wrapped, settings, engine)
        self.layer_idx: int = wrapped.layer_idx
        self._own_config = wrapped.config

    @classmethod
    def require_suitable(cls, path: str, module: nn.Module) -> None:
        attention_module.require_attention_interface(path, module)

    @property
    def gpu_obstacle(self) -> str | None:
        """What of a decoded token's attention only the CPU computes, because of which `attend_on: gpu` is refused."""
        return None

    def attend_on(self, place: str) -> None:
        """Take the place that `attend_on` names, or `auto` decides, for the cache layers that follow."""
        self.engine = replace(self.engine, attend_on=place)

    def divide_missing(self, share: float) -> None:
        """Take the share of missing blocks that a GPU reads under `attend_on: split`, for the cache layers that follow.

        The CPU attends to the others.
        """

    @property
    def indexes_on_gpu(self) -> bool:
        """Whether a GPU chooses what it attends to (`index_device`)."""
        return False

    def install(self) -> None:
        self.wrapped.config = bridge.with_implementation(self._own_config)

    def uninstall(self) -> nn.Module:
        self.wrapped.config = self._own_config
        return self.wrapped

    def stored_by(self) -> dict[str, Any]:
        """The settings that, together with the model, determine the contents of its cache layer.

        A saved context can be continued if these are equal. By default all settings; an operator may omit those that
        only choose what is read.
        """
        return self.settings_in_layer()

    @abstractmethod
    def new_cache_layer(self) -> FamilyLayer:
        """An empty cache layer."""

    def load_prefill(self, layer: Any, step: Step, recorded: RecordedPrompt) -> None:
        """Bring an empty cache layer into the state after the prefill of the recorded prompt, whose step is `step`.

        Raises HeteroKVError when the operator's prefill is not full attention (`prefills_exactly`), or `recorded` is
        incomplete.
        """
        raise HeteroKVError(
            f"{self.path} ({type(self).__name__}) cannot load a recorded prefill; prefill the prompt under its own "
            "rules: model(input_ids, past_key_values=HeteroCache(model))"
        )

    @abstractmethod
    def prefill_chunk(self, layer: Any, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        """Exact attention of a chunk of the prompt: [batch, heads, tokens, v_dim]."""

    @abstractmethod
    def decode_step(self, layer: Any, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        """Attention of one new token per row: [batch, heads, 1, v_dim]."""

    def arguments_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments for the wrapped module's forward; an operator may record or replace some."""
        return kwargs

    def lasting_arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The result of `arguments_for` without its side effects, valid for every decoded token and cache.

        The tensors are the same, or have the same numbers. Raises NotCapturableError when they differ from token to
        token.
        """
        raise NotCapturableError(f"{type(self).__name__} computes from the arguments of its attention module")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, its attention computed by this operator over a HeteroCache."""
        cache = passed_cache(kwargs)
        if type(cache) is not HeteroCache:
            cache = bridge.cache_in(args, kwargs, self.path)
        if self.changes_arguments:
            recording = cache.required_batch.recording
            if recording is None:
                kwargs = self.arguments_for(args, kwargs)
            else:
                kwargs = recording.record_arguments(self, args, kwargs)
        with bridge.handled_by(self, cache) as service:
            output = self.wrapped(*args, **kwargs)
        if service.calls != 1:
            raise UnsupportedModelError(
                f"{self.path} ({type(self.wrapped).__name__}) called its attention function {service.calls} times in "
                "one forward instead of once; exclude it with `class: default`"
            )
        return output

    def attend(self, cache: HeteroCache, call: bridge.AttentionCall) -> torch.Tensor:
        """The attention of a call: [batch, heads, tokens, v_dim].

        Rows of several lengths are several steps; the tokens of a part of a prompt may be rows of one step.
        """
        steps = cache.required_batch.steps
        if len(steps) > 1 or steps[0].part.is_mixed:
            return torch.cat([self._attend_rows(step, call.of_rows(step.rows)) for step in steps])
        step = steps[0]
        layer = step.group.layers[self.layer_idx]
        if step.is_decode:
            return self.decode_step(layer, step, call)
        if layer.is_prefilling:
            return self.prefill_chunk(layer, step, call)
        with self.prefill(step):
            return self.prefill_chunk(layer, step, call)

    def _attend_rows(self, step: Step, call: bridge.AttentionCall) -> torch.Tensor:
        """The attention of a step's rows, of one token each: [rows, heads, 1, v_dim]."""
        layer = step.group.layers[self.layer_idx]
        if step.is_draft:
            step.show_length()
            attended = self.decode_step(layer, step, call)
            step.states[self.layer_idx] = LayerCheckpoint(layer.snapshot(), 0)
            return attended
        if step.is_decode:
            return self.decode_step(layer, step, call)
        with self.prefill(step):
            return self.prefill_chunk(layer, step, call.as_prompt()).transpose(0, 2)

    def prepare_arrays(self, cache: HeteroCache, dtype: Any, softcap: float | None) -> list[Any] | None:
        """The data that `attend_arrays` needs for the present token; None if `attend` must compute it.

        Args:
            dtype: numpy type of the arrays (`kernel_arrays.ARRAY_DTYPES`).
        """
        steps = cache.required_batch.steps
        if steps[-1].is_decode:
            of_steps = self.prepare_steps(steps, dtype, softcap)
            return None if of_steps is None else list(zip(steps, of_steps, strict=True))
        # Parts of prompts are last.
        decoded = [step for step in steps if step.is_decode]
        of_steps = self.prepare_steps(decoded, dtype, softcap) if decoded else []
        return None if of_steps is None else list(zip_longest(steps, of_steps))

    def attend_arrays(
        self, prepared: list[Any], arrays: DecodeBuffers, scale: float, softcap: float, sink: np.ndarray,
        queue: KernelQueue,
    ) -> None:  # fmt: skip
        """`attend` from `arrays.q`, `k` and `v` to `arrays.attended`, without intermediate tensors.

        Kernels are added to the queue, whose earlier ones compute `arrays.q`, `k` and `v`. sink: [heads] float32,
        scores of learned sinks; empty for none.
        """
        if not prepared[-1][0].is_decode:
            parts = [step for step, _ in prepared if not step.is_decode]
            queue.run()
            # Parts of prompts, the last rows of a mixed forward.
            for step in parts:
                part = arrays.of_rows(step.rows)
                added = torch.from_numpy(sink) if sink.size else None
                call = bridge.AttentionCall(*part.inputs, scale, softcap or None, None, added)
                part.put(self._attend_rows(step, call))
            prepared = prepared[: -len(parts)]
            if not prepared:
                return
            arrays = arrays.of_rows(slice(0, parts[0].rows.start))
        if self.takes_together(prepared):
            self.attend_steps(prepared, arrays, scale, softcap, sink, queue)
            return
        for each in prepared:
            if each[0].is_draft:
                # The blocks of earlier tokens are read with other lengths.
                queue.run()
                each[0].show_length()
            self.attend_steps([each], arrays.of_rows(each[0].rows), scale, softcap, sink, queue)

    def prepare_steps(self, steps: Sequence[Step], dtype: Any, softcap: float | None) -> list[Any] | None:
        """`prepare_arrays` for decoded or drafted tokens: something for each step; None if `attend` must compute."""
        return None

    def takes_together(self, prepared: list[tuple[Step, Any]]) -> bool:
        """Whether one call of `attend_steps` takes all steps of a forward.

        Drafted tokens are steps of one sequence. Their blocks have room for all of them already.
        """
        return len(prepared) == 1

    def attend_steps(
        self, prepared: list[tuple[Step, Any]], arrays: DecodeBuffers, scale: float, softcap: float, sink: np.ndarray,
        queue: KernelQueue,
    ) -> None:  # fmt: skip
        """`decode_step` of the rows of neighbouring steps over their `arrays`.

        prepared: each step with what `prepare_steps` gives for it. sink, queue: as for `attend_arrays`.
        """
        raise NotImplementedError("an operator that prepares arrays attends to them")

    @contextmanager
    def prefill(self, step: Step) -> Iterator[None]:
        """Within this context a prompt passes through the layer in chunks; without an error it is stored at the end."""
        layer = step.group.layers[self.layer_idx]
        layer.begin_prefill(step)
        try:
            yield
            self.end_prefill(layer, step)
        finally:
            layer.leave_prefill()

    def end_prefill(self, layer: Any, step: Step) -> None:
        """Called after a prompt, or a part of one, has passed through the layer."""
        layer.end_prefill(step)

    # -- used by the planner and reports

    def footprint(self, shape: KVShape) -> LayerFootprint:
        """The layer's memory, for keys and values of `shape`; by default all of them on the compute device."""
        return LayerFootprint(shape)

    def attended_tokens(self, length: int) -> float:
        """Tokens that a decode step after `length` tokens attends to; the maximum if each step decides."""
        return length

    def require_recordable(self, *, in_prompt: bool) -> None:
        """Raise HeteroKVError unless it records a token's attention exactly.

        in_prompt: whether the token is the last one of a prompt, instead of a generated one.
        """
        if not self.records_attention:
            raise HeteroKVError(
                f"{self.path} ({type(self).__name__}) cannot say which tokens it attends to; use rules with other "
                "operators"
            )
        if in_prompt and not self.prefills_exactly:
            raise HeteroKVError(
                f"{self.path} ({type(self).__name__}) does not attend to all of a prompt, and cannot say what the "
                "first token after one attended to; choose a later token"
            )

    @property
    def observed_queries(self) -> int:
        """Number of last queries of a recorded prompt that `load_prefill` reads."""
        return 0

    def choosing_queries(self, length: int, question: int | None) -> int:
        """How many last queries of a prompt choose what its answer attends to; 0 if each token chooses for itself.

        A prompt that reuses a prefix must compute at least as many tokens.

        Args:
            length: tokens of the sequence at the prompt's end.
            question: how many of the prompt's last tokens are its question; None if unknown.
        """
        return 0

    def compile_kernels(self, kv_heads: int, group: int, k_dim: int, v_dim: int, softcap: float) -> None:
        """Compile the kernels of decoding, before the first token needs them.

        Args:
            group: query heads per kv head.
            k_dim, v_dim: dimensions of a key and of a value.
            softcap: of the scores; 0 for none.
        """

    @classmethod
    def configure_together(cls, operators: Sequence[AttentionOperator]) -> None:
        """Configure all operators of a model together, once all are created; called for each of their classes.

        Raises HeteroKVError for operators that cannot work together; none is injected then.
        """
