"""The declared forms of recurrent mixers that have a kernel for the step of a decoded token.

A mixer with the parts of a form may still compute something else, so its layer is tested before use
(`llama_layer.agrees`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hetero_kv.adapter.decoder_form import applied_norm, are_packed, floats_of
from hetero_kv.adapter.foreign import PLAIN_TENSORS
from hetero_kv.adapter.llama_layer import float32_array, norm_of
from hetero_kv.adapter.mixer_form import is_depthwise
from hetero_kv.adapter.recurrent_prompt import DeltaNetPrompt, MixerForward
from hetero_kv.adapter.selective_form import NORMS, SelectiveForm
from hetero_kv.adapter.state_space_form import Mamba2Form
from hetero_kv.cpu_ops.cpu_features import isa
from hetero_kv.cpu_ops.kernel_queue import KernelQueue
from hetero_kv.cpu_ops.parallel_region import all_threads
from hetero_kv.cpu_ops.quantized_linear import multiply_region
from hetero_kv.cpu_ops.recurrent_steps import delta_net, delta_region, short_convolution
from hetero_kv.cpu_ops.routing import router_region
from hetero_kv.cpu_ops.selective_scans import scan_region
from hetero_kv.cpu_ops.selective_steps import selective_mixer
from hetero_kv.cpu_ops.state_space_steps import mamba2, update_region
from hetero_kv.cpu_ops.threads import at_most
from hetero_kv.cpu_ops.weight_dots import rows_per_pass
from hetero_kv.cpu_ops.weight_formats import GROUP, TILE
from hetero_kv.weights.kernel_arrays import ARRAY_DTYPES, NAMES, bits
from hetero_kv.weights.quantized_weight import most_rows_of_codes


class RecurrentStep(ABC):
    """A recurrent mixer's step for decoded tokens, one per row.

    Attributes:
        most_rows: the largest number of rows that it takes.
        inner: width of the output projection's input.
        copied: tensors of which it has copies.
        views: tensors whose memory it reads.
        prompt: the mixer's forward for prompts, and tokens that the kernel cannot take; None: the module's own.
    """

    inner: int
    copied: tuple[torch.Tensor, ...] = ()
    views: tuple[torch.Tensor, ...] = ()
    prompt: MixerForward | None = None

    def __init__(self, norm: Any, matrices: Sequence[Any]) -> None:
        quantized = [matrix.quantized for matrix in matrices]
        self.most_rows = min(most_rows_of_codes(each.name, norm.weight.dtype) for each in quantized)
        self._norm = applied_norm(norm)
        self._matrices = np.array([each.kernels for each in quantized], np.int64)
        self._addresses = all_threads(), multiply_region()

    def _take(self, weight: torch.Tensor) -> None:
        """Copy a convolution's weights, [channels, 1, taps]."""
        self._weight = float32_array(weight).reshape(len(weight), -1)
        if self._weight.ctypes.data == weight.data_ptr():
            self.views = (weight,)
        else:
            self.copied = (weight,)

    @abstractmethod
    def states(self, layer: Any) -> list[np.ndarray] | None:
        """The states of a cache layer as arrays of the same memory; None if the kernel cannot use them."""

    @abstractmethod
    def __call__(self, queue: KernelQueue, hidden: np.ndarray, states: Sequence[np.ndarray], mixed: np.ndarray) -> None:
        """Queue the kernel that updates the states by `hidden` [rows, width], and writes what precedes the output
        projection to `mixed`."""


class ShortConvolution(RecurrentStep):
    """LFM2's gated short convolution."""

    def __init__(self, norm: Any, mixer: Any) -> None:
        super().__init__(norm, [mixer.in_proj])
        self.inner = mixer.conv.in_channels
        self._biases = floats_of(mixer.in_proj.bias), floats_of(mixer.conv.bias)
        self._take(mixer.conv.weight)
        self.copied = *self.copied, *(each for each in (mixer.in_proj.bias, mixer.conv.bias) if each is not None)

    @classmethod
    def of(cls, norm: Any, mixer: Any) -> ShortConvolution | None:
        """The step of a mixer; None for another form."""
        parts = dict(mixer.named_children())
        if parts.keys() != {"conv", "in_proj", "out_proj"} or not are_packed([mixer.in_proj, mixer.out_proj]):
            return None
        width = mixer.in_proj.in_features
        if not is_depthwise(mixer.conv, width) or mixer.in_proj.out_features != 3 * width:
            return None
        return cls(norm, mixer)

    def states(self, layer: Any) -> list[np.ndarray] | None:
        return _arrays([layer.conv_states.get(0)])

    def __call__(self, queue: KernelQueue, hidden: np.ndarray, states: Sequence[np.ndarray], mixed: np.ndarray) -> None:
        bias, of_convolution = self._biases
        queue.add(
            short_convolution(NAMES[hidden.dtype]), *self._addresses, hidden, *self._norm, self._matrices, bias,
            *states, self._weight, of_convolution, mixed, rows_per_pass(), at_most(torch.get_num_threads()),
        )  # fmt: skip


class DeltaNet(RecurrentStep):
    """The gated delta net of Qwen3-Next and Qwen 3.5."""

    def __init__(self, norm: Any, mixer: Any, packed: Sequence[Any], small: Sequence[Any]) -> None:
        super().__init__(norm, packed)
        self.inner = mixer.value_dim
        width = packed[0].in_features
        weights = [each.weight for each in small]
        self._small = bits(torch.cat(weights).detach()) if weights else np.empty((0, width), np.float32)
        tiles = [-(-matrix.out_features // TILE) * TILE for matrix in packed]
        starts = np.cumsum([0, *tiles, *(each.out_features for each in small)])
        places = _PLACES[len(packed) + len(small)]
        self._places = np.ascontiguousarray(places(mixer, starts), np.int64)
        self._decay = -np.exp(float32_array(mixer.A_log))
        self._time_bias = float32_array(mixer.dt_bias)
        self._head_norm = norm_of(mixer.norm)
        self._key_heads = mixer.num_k_heads
        self._regions = (
            router_region(NAMES[self._small.dtype]),
            delta_region(NAMES[np.dtype(ARRAY_DTYPES[norm.weight.dtype])]),
        )
        self._take(mixer.conv1d.weight)
        self.copied = *self.copied, mixer.A_log, mixer.dt_bias, mixer.norm.weight, *weights
        projections = [*packed, *small]
        columns = places(mixer, np.cumsum([0, *(each.out_features for each in projections)]))
        is_ordered = (np.diff(columns) == 1).all()
        numbers = self._weight, self._decay, self._time_bias
        self.prompt = DeltaNetPrompt(mixer, projections, None if is_ordered else columns, numbers, self._head_norm)

    @classmethod
    def of(cls, norm: Any, mixer: Any) -> DeltaNet | None:
        """The step of a mixer; None for another form."""
        parts = dict(mixer.named_children())
        names = next((each for each in _PROJECTIONS if {*each, "conv1d", "norm", "out_proj"} == parts.keys()), None)
        heads = [getattr(mixer, name, None) for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")]
        if names is None or not all(isinstance(each, int) for each in heads) or mixer.activation != "silu":
            return None
        matrices = [parts[name] for name in names]
        packed = [matrix for matrix in matrices if are_packed([matrix])]
        small = matrices[len(packed) :]
        # Matrices with few outputs may be unpacked; those come last.
        if matrices[: len(packed)] != packed or not packed or not are_packed([mixer.out_proj], in_any_order=True):
            return None
        if any(each.bias is not None for each in matrices) or any(
            each.weight.dtype is not norm.weight.dtype or each.out_features > 2 * mixer.num_v_heads for each in small
        ):
            return None
        has_bias = mixer.conv1d.bias is not None
        return None if has_bias or not is_depthwise(mixer.conv1d, mixer.conv_dim) else cls(norm, mixer, packed, small)

    def states(self, layer: Any) -> list[np.ndarray] | None:
        return _with_float32_state(layer)

    def __call__(self, queue: KernelQueue, hidden: np.ndarray, states: Sequence[np.ndarray], mixed: np.ndarray) -> None:
        conv_state, state = states
        queue.add(
            delta_net(NAMES[hidden.dtype], NAMES[self._small.dtype]), *self._addresses, *self._regions, hidden,
            *self._norm, self._matrices, self._small, self._places, conv_state, self._weight, self._decay,
            self._time_bias, state, *self._head_norm, self._key_heads, mixed, rows_per_pass(),
            at_most(torch.get_num_threads()),
        )  # fmt: skip


class Mamba2(RecurrentStep):
    """Mamba-2's mixer."""

    def __init__(self, norm: Any, form: Mamba2Form) -> None:
        mixer = form.mixer
        super().__init__(norm, [mixer.in_proj])
        self.inner = form.inner
        factors, epsilon = self._norm
        # A product with one changes no number.
        self._norm = factors * np.float32(form.factor), epsilon
        self._form, self._bias = form, floats_of(mixer.in_proj.bias)
        self._factors = floats_of(form.factors if form.has_factors else None)
        biases = [] if mixer.in_proj.bias is None else [mixer.in_proj.bias]
        self.copied, self.views = (*form.copied, *biases), form.views
        self.prompt = form.forward()

    @classmethod
    def of(cls, norm: Any, mixer: Any) -> Mamba2 | None:
        """The step of a mixer; None for another form."""
        form = Mamba2Form.of(mixer)
        if form is None or not are_packed([mixer.in_proj]) or not are_packed([mixer.out_proj], in_any_order=True):
            return None
        return cls(norm, form)

    def states(self, layer: Any) -> list[np.ndarray] | None:
        return _with_float32_state(layer)

    def __call__(self, queue: KernelQueue, hidden: np.ndarray, states: Sequence[np.ndarray], mixed: np.ndarray) -> None:
        form, (conv_state, state) = self._form, states
        queue.add(
            mamba2(NAMES[hidden.dtype]), *self._addresses, update_region(), hidden, *self._norm, self._matrices,
            self._bias, self._factors, conv_state, form.weight, form.weight_bias, *form.numbers, state, form.groups,
            *form.norm, mixed, rows_per_pass(), at_most(torch.get_num_threads()),
        )  # fmt: skip


class Selective(RecurrentStep):
    """Mamba's selective mixer."""

    def __init__(self, norm: Any, form: SelectiveForm, widening: torch.Tensor) -> None:
        mixer, dtype = form.mixer, widening.dtype
        few = mixer.x_proj
        is_packed = are_packed([few])
        super().__init__(norm, [mixer.in_proj, few] if is_packed else [mixer.in_proj])
        self.inner = form.decay.shape[1]
        self._form, self._bias = form, floats_of(mixer.in_proj.bias)
        # Packed numbers, or none; and numbers, or none.
        blank = np.empty((0, few.in_features), ARRAY_DTYPES[dtype])
        self._few = self._matrices[1:], blank if is_packed else bits(few.weight.detach())
        self._matrices, self._widening = self._matrices[:1], bits(widening)
        norms = [getattr(mixer, name).weight for name in NORMS] if form.has_norms else []
        epsilon = norm_of(mixer.dt_layernorm)[1] if norms else np.float32(0)
        self._norms = floats_of(torch.cat(norms) if norms else None), epsilon
        name = NAMES[np.dtype(ARRAY_DTYPES[norm.weight.dtype])]
        self._small = NAMES[self._widening.dtype]
        self._regions = router_region(self._small), scan_region(f"float32 {name}", isa())
        biases = [each for each in (mixer.in_proj.bias,) if each is not None]
        viewed = [each.weight for each in (few, mixer.dt_proj) if not are_packed([each])]
        self.copied, self.views = (*form.copied, *biases, *norms), (*form.views, *viewed)
        self.prompt = form.forward()

    @classmethod
    def of(cls, norm: Any, mixer: Any) -> Selective | None:
        """The step of a mixer; None for another form."""
        form = SelectiveForm.of(mixer)
        if form is None or not are_packed([mixer.in_proj]) or not are_packed([mixer.out_proj], in_any_order=True):
            return None
        few, wide = mixer.x_proj, mixer.dt_proj
        # The module reads these weights as numbers, so that packed ones are unpacked, here once for all tokens.
        widening = wide.quantized.unpacked(wide.dtype) if are_packed([wide]) else wide.weight.detach()
        numbers = [widening] if are_packed([few]) else [widening, few.weight]
        if len({each.dtype for each in numbers}) > 1 or not all(map(_is_plain_matrix, numbers)):
            return None
        if form.has_norms:
            norms = [norm_of(getattr(mixer, name)) for name in NORMS]
            if not all(factors.size for factors, _ in norms) or len({epsilon for _, epsilon in norms}) > 1:
                return None
        return cls(norm, form, widening) if form.decay.shape[1] % TILE == 0 else None

    def states(self, layer: Any) -> list[np.ndarray] | None:
        return _with_float32_state(layer)

    def __call__(self, queue: KernelQueue, hidden: np.ndarray, states: Sequence[np.ndarray], mixed: np.ndarray) -> None:
        form, (conv_state, state) = self._form, states
        queue.add(
            selective_mixer(NAMES[hidden.dtype], self._small), *self._addresses, *self._regions, hidden, *self._norm,
            self._matrices, self._bias, conv_state, form.weight, form.weight_bias, *self._few, *self._norms,
            self._widening, form.decay, form.time_bias, form.skip, state, mixed, rows_per_pass(),
            at_most(torch.get_num_threads()),
        )  # fmt: skip


_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj_qkvz", "in_proj_ba")


def _apart(mixer: Any, starts: np.ndarray) -> np.ndarray:
    """The columns of Qwen 3.5's outputs: a matrix for each kind."""
    widths = mixer.conv_dim, mixer.value_dim, mixer.num_v_heads, mixer.num_v_heads
    return np.concatenate([start + np.arange(width) for start, width in zip(starts, widths, strict=False)])


def _by_key_head(mixer: Any, starts: np.ndarray) -> np.ndarray:
    """The columns of Qwen3-Next's outputs: one key head after the other."""
    share = mixer.num_v_heads // mixer.num_k_heads
    widths = mixer.head_k_dim, mixer.head_k_dim, share * mixer.head_v_dim, share * mixer.head_v_dim
    outputs = starts[0] + np.arange(mixer.num_k_heads * sum(widths)).reshape(mixer.num_k_heads, -1)
    times = starts[1] + np.arange(2 * mixer.num_v_heads).reshape(mixer.num_k_heads, -1)
    kinds = [*np.split(outputs, np.cumsum(widths)[:-1], axis=1), *np.split(times, [share], axis=1)]
    return np.concatenate([each.reshape(-1) for each in kinds])


# Number of matrices -> the columns of their outputs.
_PLACES = {4: _apart, 2: _by_key_head}
_STEPS = ShortConvolution, DeltaNet, Mamba2, Selective


def recurrent_step(norm: Any, mixer: Any) -> RecurrentStep | None:
    """The step of a mixer behind a norm; None for another form."""
    step = next((step for step in (kind.of(norm, mixer) for kind in _STEPS) if step is not None), None)
    return None if step is None or step.inner % GROUP else step


def _is_plain_matrix(weight: torch.Tensor) -> bool:
    return type(weight) in PLAIN_TENSORS and weight.dtype in ARRAY_DTYPES and weight.is_contiguous()


def _with_float32_state(layer: Any) -> list[np.ndarray] | None:
    """The states of a convolution and of a recurrence in float32; None for others."""
    recurrent = layer.recurrent_states.get(0)
    if recurrent is None or recurrent.dtype is not torch.float32:
        return None
    return _arrays([layer.conv_states.get(0), recurrent])


def _arrays(states: Sequence[torch.Tensor | None]) -> list[np.ndarray] | None:
    found = [each for each in states if each is not None and each.is_contiguous() and each.dtype in ARRAY_DTYPES]
    return [bits(each) for each in found] if len(found) == len(states) else None
