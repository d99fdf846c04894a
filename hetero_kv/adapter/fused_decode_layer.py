"""The fused decode step of a decoder layer with attention: two kernels per token, around its attention's.

A layer takes some fifty small torch calls per token around its attention, with a mixture of experts more than a
hundred. If all its weights are quantized and it has a declared form (`DecoderForm`), `cpu_ops.fused_decode_layer` and
`cpu_ops.fused_mixture` compute the same in two calls. These wait in the forward's queue, mostly until the last layer.
A recurrent mixer beside attention (Falcon-H1) takes two more (`RecurrentPart`).
Equivalence is tested: before the first token the path and the wrapped layer get the same random input, and the path is
used only if their outputs agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hetero_kv.adapter import bridge
from hetero_kv.adapter.decode_buffers import decode_buffers
from hetero_kv.adapter.decoder_form import DecoderForm, applied_factors, applied_norm, floats_of
from hetero_kv.adapter.feed_forward import FeedForward, feed_forward_of
from hetero_kv.adapter.foreign import PlainTree
from hetero_kv.adapter.llama_layer import (
    NONE,
    READ_NUMBERS,
    CopiedFrom,
    Trial,
    agrees,
    largest_difference,
    update_difference,
)
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.adapter.queued_tensor import QueuedTensor, hidden_array, number_of_tokens
from hetero_kv.adapter.recurrent_part import MixerInTrial, RecurrentPart
from hetero_kv.adapter.recurrent_prompt import states_difference
from hetero_kv.cpu_ops.fused_decode_layer import attention_inputs
from hetero_kv.cpu_ops.kernel_queue import KernelQueue
from hetero_kv.cpu_ops.parallel_region import all_threads
from hetero_kv.cpu_ops.quantized_linear import multiply_region
from hetero_kv.cpu_ops.threads import at_most
from hetero_kv.cpu_ops.weight_dots import rows_per_pass
from hetero_kv.engine.recurrent_state import fork, state_layer
from hetero_kv.weights.kernel_arrays import ARRAY_DTYPES, DTYPES, NAMES, bits
from hetero_kv.weights.packed_weight import FEW_ROWS
from hetero_kv.weights.quantized_weight import most_rows_of_codes

#: Largest relative difference (of norms) from the wrapped layer, by the model's dtype: it covers rounding to that
#: dtype, and int8 activations that round differently in consequence.
TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 3e-2}
# The tolerance for what a layer adds to its input, as a multiple of the tolerance.
_OF_UPDATES = 4
_TRIED_ROWS, _BEFORE = 2, 5
_NO_GATES = np.empty((0, 0), np.float32)
#: cos and sin; None for a layer that does not rotate.
_Embeddings = tuple[torch.Tensor, torch.Tensor] | None


class FusedDecodeLayer:
    """The fused decode step of one decoder layer.

    Args:
        layer: the decoder layer, its attention replaced by `operator`.
        form: its parts.
        feed_forward: the half after attention.
        beside: the recurrent mixer beside attention; None for none.

    Use `of`, which checks the layer's form.
    """

    def __init__(
        self, layer: Any, operator: AttentionOperator, form: DecoderForm, feed_forward: FeedForward,
        beside: RecurrentPart | None = None,
    ) -> None:  # fmt: skip
        self.operator = operator
        self.dim: int = form.attention.head_dim
        *inputs, output = form.projections
        widths = output.in_features, *(each.out_features for each in inputs[1:])
        q_heads, k_heads, v_heads = (width // self.dim for width in widths)
        self.heads = q_heads, k_heads, v_heads
        self._gate_width = output.in_features if form.has_gates else 0
        dtype = form.dtype
        matrices = [matrix.quantized for matrix in form.projections]
        self._most_rows = min(feed_forward.most_rows, *(most_rows_of_codes(matrix.name, dtype) for matrix in matrices))
        self._inputs = np.array([matrix.kernels for matrix in matrices[:3]], dtype=np.int64)
        biases = [projection.bias for projection in inputs]
        self._bias = floats_of(torch.cat(biases)) if biases[0] is not None else NONE
        self._input_norm, self._input_factor = form.norm, form.input_factor
        factors, self._epsilon = applied_norm(form.norm)
        self._norm = factors * np.float32(form.input_factor)
        self._key_factor = np.float32(form.key_factor)
        self._query_norm, self._head_epsilon = applied_norm(form.head_norms[0])
        self._key_norm = applied_factors(form.head_norms[1])
        self._per_pass = rows_per_pass()
        self._multiply = all_threads(), multiply_region()
        self._feed_forward, self._beside = feed_forward, beside
        #: Numbers of a head that may be rotated.
        self._widths = {self.dim, _rotated_part(form.attention)} if form.rotates else {0}
        #: How many numbers of a head are rotated, according to the trial.
        self._rotated: frozenset[int] = frozenset()
        self._are_halves = False
        # What follows the output in a tuple, according to the trial; None for no tuple.
        self._behind: tuple[None, ...] | None = None
        self.call_settings: tuple[float, float | None, int | None, Any] = (0.0, None, None, None)
        sinks = getattr(form.attention, "sinks", None)
        self._sink = NONE if sinks is None else floats_of(sinks)
        self._tree = PlainTree(layer, READ_NUMBERS)
        copied = [*(norm.weight for norm in form.norms), *biases, output.bias, sinks, *feed_forward.copied]
        copied += [] if beside is None else beside.copied
        views = () if beside is None else beside.step.views
        self._copied = CopiedFrom([each for each in copied if each is not None], views)

    @property
    def by_tiles(self) -> bool:
        """Whether parts of prompts may be more rows than codes are for (`FeedForward`)."""
        return self._feed_forward.by_tiles and self._beside is None

    @property
    def is_current(self) -> bool:
        """Whether the layer's modules, hooks, and all copied numbers are unchanged since the path was created."""
        return self._tree.is_unchanged and self._copied.is_unchanged and self._feed_forward.is_current

    @classmethod
    def of(cls, layer: Any, operator: Any) -> FusedDecodeLayer | None:
        """The fused decode step of a plain decoder layer; None for another form, or if the outputs differ."""
        form = DecoderForm.of(layer, operator)
        feed_forward = None if form is None else feed_forward_of(form)
        if form is None or feed_forward is None:
            return None
        beside = None if form.beside is None else RecurrentPart.beside(form)
        if form.beside is not None and beside is None:
            return None
        path = cls(layer, operator, form, feed_forward, beside)
        return path if agrees(path, layer, TOLERANCE[form.dtype], "the fused decode layer") else None

    def fits(self, hidden_states: torch.Tensor, cache: Any, kwargs: Mapping[str, Any], decoded: int) -> bool:
        """Whether these tokens, one per row, can take the path.

        Args:
            decoded: how many of the first rows are decoded or drafted; the others are parts of prompts.
        """
        embeddings = kwargs.get("position_embeddings")
        rows = number_of_tokens(hidden_states)
        return (
            rows is not None
            and (rows <= self._most_rows or (self.by_tiles and decoded <= self._most_rows))
            and (isinstance(embeddings, tuple) or embeddings is None)
            and (0 if embeddings is None else embeddings[0].shape[-1]) in self._rotated
            and kwargs.get("attention_mask") is None
            and not bridge.changes_attention(kwargs)
            # The path has no dropout.
            and not self.operator.training
            and (self._beside is None or self._beside.fits(state_layer(cache, self.operator.layer_idx)))
        )

    def __call__(
        self, hidden_states: torch.Tensor, cache: Any, kwargs: Mapping[str, Any], decoded: int
    ) -> QueuedTensor | tuple[Any, ...]:
        """The layer's output for [rows, 1, width], a `QueuedTensor`, or a tuple that begins with it; see `fits`.

        Where there are tiles, decoded tokens still take codes: their results do not depend on what passes beside them.
        """
        hidden, queue = hidden_array(hidden_states), cache.required_batch.queue
        few = decoded if self.by_tiles and len(hidden) > FEW_ROWS else len(hidden)
        if self.operator.changes_arguments:
            arguments = (self._attention_input(hidden_states),) if self.operator.reads_hidden_states else ()
            kwargs = self.operator.arguments_for(arguments, dict(kwargs))
        embeddings = kwargs.get("position_embeddings")
        dtype = DTYPES[hidden.dtype]
        scale, softcap, window, _ = self.call_settings
        can_be_arrays = window is None or window == getattr(self.operator, "window", None)
        prepared = self.operator.prepare_arrays(cache, ARRAY_DTYPES[dtype], softcap) if can_be_arrays else None
        if prepared is None:
            q, k, v, gates = self.queries_keys_values(queue, hidden, embeddings, few)
            queue.run()
            attended = self.operator.attend(cache, bridge.AttentionCall(q, k, v, *self.call_settings))
            residual = hidden if self._beside is None else self._added(queue, hidden, cache)
            output = self.output(queue, residual, _array(attended), gates, few)
            return output if self._behind is None else (output, *self._behind)
        arrays = decode_buffers(len(hidden), self.heads, self.dim, dtype)
        gates = self._make_inputs(queue, hidden, embeddings, arrays.q, arrays.k, arrays.v, few)
        self.operator.attend_arrays(prepared, arrays, scale, softcap or 0.0, self._sink, queue)
        residual = hidden if self._beside is None else self._added(queue, hidden, cache)
        output = self.output(queue, residual, arrays.attended_rows, gates, few)
        return output if self._behind is None else (output, *self._behind)

    def _attention_input(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self._input_norm(hidden_states)
        return normed if self._input_factor == 1 else normed * self._input_factor

    def _added(self, queue: KernelQueue, hidden: np.ndarray, cache: Any) -> np.ndarray:
        """The layer's input plus the output of the mixer beside attention, computed when the queue runs."""
        assert self._beside is not None
        added = np.empty_like(hidden)
        self._beside(queue, hidden, state_layer(cache, self.operator.layer_idx), added)
        return added

    def queries_keys_values(
        self, queue: KernelQueue, hidden: np.ndarray, position_embeddings: _Embeddings, few: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray]:
        """The arguments of the attention function, [rows, heads, 1, dim] each, from hidden states [rows, width].

        They are computed when the queue runs. The last result is the gates of attention's output, [rows, heads * dim],
        or empty. few: as for `FeedForward`.
        """
        dtype = DTYPES[hidden.dtype]
        q, k, v = (torch.empty((len(hidden), heads, 1, self.dim), dtype=dtype) for heads in self.heads)
        return q, k, v, self._make_inputs(queue, hidden, position_embeddings, bits(q), bits(k), bits(v), few)

    def _make_inputs(
        self, queue: KernelQueue, hidden: np.ndarray, position_embeddings: _Embeddings,
        q: np.ndarray, k: np.ndarray, v: np.ndarray, few: int,
    ) -> np.ndarray:  # fmt: skip
        if position_embeddings is None:
            cos = sin = np.empty((len(hidden), 0), hidden.dtype)
        else:
            cos, sin = _ROTATION.arrays(position_embeddings, len(hidden), self._are_halves)
        gates = np.empty((len(hidden), self._gate_width), np.float32) if self._gate_width else _NO_GATES
        kernel = attention_inputs(NAMES[hidden.dtype], NAMES[cos.dtype])
        queue.add(
            kernel, *self._multiply, hidden, self._norm, self._epsilon, self._inputs, self._bias, self._key_factor,
            self._query_norm, self._key_norm, self._head_epsilon, cos, sin, q, k, v, gates, few, self._per_pass,
            at_most(torch.get_num_threads()),
        )  # fmt: skip
        return gates

    def output(
        self, queue: KernelQueue, hidden: np.ndarray, attended: np.ndarray, gates: np.ndarray, few: int
    ) -> QueuedTensor:
        """The layer's output from its attention's [rows, all] and its input [rows, width], or what `_added` gives."""
        out = QueuedTensor.empty(hidden, queue)
        self._feed_forward(queue, hidden, attended, gates, out.array, few)
        return out

    def found(self) -> Any:
        """See `KeptFastPath`."""
        *settings, sink = self.call_settings
        behind = None if self._behind is None else len(self._behind)
        return None if sink is not None else [sorted(self._rotated), self._are_halves, settings, behind]

    def take(self, found: Any) -> None:
        """See `KeptFastPath`."""
        rotated, self._are_halves, (scale, softcap, window), behind = found
        self._behind = None if behind is None else (None,) * behind
        self._rotated, self.call_settings = frozenset(rotated), (scale, softcap, window, None)

    def difference_from(self, layer: Any) -> float:
        """The largest relative difference, of norms, from the layer's output for random input.

        Of a layer whose model rotates a part of a head, both that and whole heads are tried.
        """
        widths = self._widths
        try:
            difference = max(self._difference_from(layer, width) for width in widths)
        except RuntimeError:
            # gpt-oss's embeddings have the angles once, for both halves.
            widths, self._are_halves = {self.dim // 2}, True
            difference = self._difference_from(layer, *widths)
        self._rotated = frozenset(widths)
        return difference

    @torch.no_grad()
    def _difference_from(self, layer: Any, rotated: int) -> float:
        trials = [self._tried(layer, rotated, seed) for seed in range(self._feed_forward.trials)]
        found = []
        # By codes; and also by tiles, if the layer may take these.
        for few in (_TRIED_ROWS, 0) if self.by_tiles else (_TRIED_ROWS,):
            inputs, outputs = zip(*(self._differences_in(*each, few) for each in trials), strict=True)
            # Two experts may be nearly tied for a row of some trial.
            found.append(max(*inputs, min(outputs)))
        return max(found)

    def _tried(self, layer: Any, rotated: int, seed: int) -> tuple[Trial, MixerInTrial | None]:
        """A trial, and the mixer beside attention in it."""
        beside = self._beside
        if beside is None:
            return Trial.of(layer, self.operator, _TRIED_ROWS, 1, rotated, seed), None
        mixers = {name: module for name, module in layer.named_children() if module is beside.mixer}
        generator = torch.Generator().manual_seed(seed)
        before = torch.randn(_TRIED_ROWS, _BEFORE, len(self._norm), generator=generator)
        tried = {name: MixerInTrial(mixer, before.to(beside.norm.weight.dtype)) for name, mixer in mixers.items()}
        trial = Trial.of(layer, self.operator, _TRIED_ROWS, 1, rotated, seed, tried)
        return trial, next(iter(tried.values()))

    def _differences_in(self, trial: Trial, mixer: MixerInTrial | None, few: int) -> tuple[float, float]:
        """The differences of the attention's inputs and of a state, and of the output, with so many rows by codes."""
        call, hidden = trial.call, trial.hidden
        if call is None or call.sink is not getattr(self.operator.wrapped, "sinks", None):
            return float("inf"), float("inf")
        self.call_settings = (call.scale, call.softcap, call.sliding_window, call.sink)
        self._behind = trial.behind
        array, queue = _array(hidden), KernelQueue()
        q, k, v, gates = self.queries_keys_values(queue, array, trial.embeddings, few)
        state = None if mixer is None else fork(mixer.before)
        residual = array
        if self._beside is not None:
            if not self._beside.fits(state):
                return float("inf"), float("inf")
            residual = np.empty_like(array)
            self._beside(queue, array, state, residual)
        output = self.output(queue, residual, _array(trial.attended), gates, few).computed()
        inputs = largest_difference((q, k, v), (call.q, call.k, call.v))
        if mixer is not None and state is not None:
            inputs = max(inputs, states_difference(state, mixer.state))
        return inputs, output_difference(output, trial.output, hidden)


def output_difference(mine: torch.Tensor, reference: torch.Tensor, hidden: torch.Tensor) -> float:
    """The larger relative difference: of a layer's outputs, and of what they add to `hidden` (with more tolerance)."""
    return max(largest_difference([mine], [reference]), update_difference(mine, reference, hidden) / _OF_UPDATES)


class _Rotation:
    """The latest position embeddings as arrays: all layers of a token get the same embeddings."""

    def __init__(self) -> None:
        self.last: tuple[Any, ...] = (None, None, 0, None)

    def arrays(
        self, embeddings: tuple[torch.Tensor, torch.Tensor], rows: int, are_halves: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin as [rows, rotated]; are_halves: whether they have the angles of a half, which apply to both."""
        cos, sin, last_rows, made = self.last
        if cos is not embeddings[0] or sin is not embeddings[1] or last_rows != rows:
            both = [each.repeat(1, 1, 2) if are_halves else each for each in embeddings]
            made = (_array(both[0].expand(rows, 1, -1)), _array(both[1].expand(rows, 1, -1)))
            self.last = (*embeddings, rows, made)
        return made


_ROTATION = _Rotation()


def _rotated_part(attention: Any) -> int:
    """How many numbers of a head the model rotates, by its configuration."""
    config = attention.config
    said = getattr(config, "rope_parameters", None) or {}
    share = said.get("partial_rotary_factor", 1.0)
    return int(getattr(config, "rotary_dim", None) or attention.head_dim * share)


def _array(tensor: torch.Tensor) -> np.ndarray:
    """[rows, all else] as float32, or the bits of bfloat16; rows that share memory are copied."""
    return bits(tensor.detach().reshape(tensor.shape[0], -1).contiguous())
