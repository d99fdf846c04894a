"""The declared form of Mamba-2's mixer (arXiv:2405.21060), as in Bamba, Falcon-H1, Granite 4, Mamba 2 and Nemotron-H.

Its input projection gives gates, the channels x, B and C of a convolution, and a time step for each head. Falcon-H1
multiplies its input by a number, and its outputs by one each. A mixer with these parts may compute something else, so
each path is tested before use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hetero_kv.adapter.decoder_form import floats_of
from hetero_kv.adapter.llama_layer import float32_array, norm_of
from hetero_kv.adapter.mixer_form import MixerForm, convolution_weights, has_silu, is_depthwise
from hetero_kv.adapter.recurrent_prompt import MixerForward, past_states
from hetero_kv.cpu_ops.cpu_features import isa
from hetero_kv.cpu_ops.parallel_region import all_threads
from hetero_kv.cpu_ops.recurrent_prompts import convolution_region
from hetero_kv.cpu_ops.state_space_prompts import block_region, gated_norm_region, mamba2_prompt
from hetero_kv.cpu_ops.state_space_steps import mamba2_between, update_region
from hetero_kv.cpu_ops.threads import at_most, one_kernel_at_a_time
from hetero_kv.weights.kernel_arrays import ARRAY_DTYPES, NAMES, bits

_SIZES = "num_heads", "head_dim", "ssm_state_size", "n_groups"
_NUMBERS = {"A_log", "D", "dt_bias"}
_PARTS = {"in_proj", "conv1d", "out_proj"}
# The factors of the input projection's outputs, and of its input.
_FACTORS, _FACTOR = "mup_vector", "ssm_in_multiplier"


@dataclass(frozen=True)
class Mamba2Form(MixerForm):
    """A Mamba-2 mixer's numbers as kernels take them.

    Attributes:
        inner, channels: widths of the gates, and of x, B and C together.
        groups: of heads that share B and C.
        numbers: -exp(A_log), the time step's bias and D, [heads] float32 each.
        norm: factors [inner] float32, empty for none; epsilon; number of groups; whether it precedes the gates.
        factors: of the input projection's outputs, [1, 1, outputs], in the mixer's dtype; None for none.
    """

    inner: int
    channels: int
    groups: int
    numbers: tuple[np.ndarray, np.ndarray, np.ndarray]
    norm: tuple[np.ndarray, np.float32, int, int]
    factors: torch.Tensor | None = None

    @classmethod
    def of(cls, mixer: Any) -> Mamba2Form | None:
        """The form of a mixer on a CPU; None for another one."""
        parts = {name: child for name, child in mixer.named_children() if name != "act"}
        own = {name for name, _ in mixer.named_parameters(recurse=False)}
        sizes: list[Any] = [getattr(mixer, name, None) for name in _SIZES]
        buffers = dict(mixer.named_buffers(recurse=False))
        factors = buffers.pop(_FACTORS, None)
        if not _PARTS <= parts.keys() <= {*_PARTS, "norm"} or own != _NUMBERS or buffers:
            return None
        if not all(isinstance(size, int) for size in sizes) or not has_silu(mixer):
            return None
        heads, head_dim, state_dim, groups = sizes
        inner = heads * head_dim
        channels = inner + 2 * groups * state_dim
        is_whole = heads % groups == 0 and mixer.in_proj.out_features == inner + channels + heads
        if not is_whole or not is_depthwise(mixer.conv1d, channels) or mixer.out_proj.in_features != inner:
            return None
        if factors is not None and (
            factors.shape != (1, 1, mixer.in_proj.out_features) or factors.dtype is not mixer.conv1d.weight.dtype
        ):
            return None
        norm = _gated_norm(parts.get("norm"), inner)
        if norm is None or any(each.dtype not in ARRAY_DTYPES for each in mixer.parameters()):
            return None
        numbers = -np.exp(float32_array(mixer.A_log)), float32_array(mixer.dt_bias), float32_array(mixer.D)
        if any(each.shape != (heads,) for each in numbers):
            return None
        return cls(mixer, *convolution_weights(mixer.conv1d), inner, channels, groups, numbers, norm, factors)

    @property
    def other_tensors(self) -> list[torch.Tensor | None]:
        mixer = self.mixer
        norm = getattr(getattr(mixer, "norm", None), "weight", None)
        return [mixer.A_log, mixer.dt_bias, mixer.D, norm, self.factors]

    def forward(self) -> Mamba2Forward:
        return Mamba2Forward(self)

    @property
    def has_factors(self) -> bool:
        """Whether the input projection's input or outputs are multiplied by other numbers than one."""
        return self.factor != 1 or (self.factors is not None and not bool((self.factors == 1).all()))

    @property
    def factor(self) -> float:
        """Of the input projection's input."""
        return float(getattr(self.mixer, _FACTOR, 1.0))

    @property
    def limits(self) -> tuple[np.float32, np.float32]:
        """The least and the largest time step of a prompt; transformers limits none of a decoded token's."""
        least, most = getattr(self.mixer, "time_step_limit", (0.0, float("inf")))
        return np.float32(least), np.float32(most)


class Mamba2Forward(MixerForward):
    """A Mamba-2 mixer's forward, of prompts and of decoded tokens."""

    takes_tokens = True

    def __init__(self, form: Mamba2Form) -> None:
        super().__init__(form.mixer)
        self.form = form
        # Multiplication by one changes nothing.
        self._factors = form.factors if form.has_factors else None

    def __call__(self, hidden_states: torch.Tensor, layer: Any, is_prompt: bool) -> torch.Tensor:
        """See `MixerForward`."""
        form, mixer = self.form, self._mixer
        if form.factor != 1:
            hidden_states = hidden_states * form.factor
        inputs = mixer.in_proj(hidden_states)
        inputs = (inputs if self._factors is None else inputs * self._factors).detach().contiguous()
        batch, tokens, _ = inputs.shape
        taps, dtype = form.weight.shape[1], inputs.dtype
        shape = batch, mixer.num_heads, mixer.head_dim, mixer.ssm_state_size
        history, state = past_states(layer, (batch, form.channels, taps), shape, dtype)
        mixed = torch.empty(batch, tokens, form.inner, dtype=dtype)
        name, threads = NAMES[bits(mixed).dtype], at_most(torch.get_num_threads())
        if not is_prompt and tokens == 1 and layer.has_previous_state[0]:
            with one_kernel_at_a_time:
                mamba2_between(name)(
                    all_threads(), update_region(), bits(inputs[:, 0]), bits(history), form.weight, form.weight_bias,
                    *form.numbers, bits(state), form.groups, *form.norm, bits(mixed[:, 0]), threads,
                )  # fmt: skip
        else:
            self._pass_prompt(inputs, history, state, mixed, name, threads)
            new = inputs[:, -taps:, form.inner : form.inner + form.channels].transpose(1, 2)
            layer.update_conv_state(new, conv_kernel_size=taps)
            layer.update_recurrent_state(state)
        output: torch.Tensor = mixer.out_proj(mixed)
        return output

    def _pass_prompt(
        self, inputs: torch.Tensor, history: torch.Tensor, state: torch.Tensor, mixed: torch.Tensor, name: str,
        threads: int,
    ) -> None:  # fmt: skip
        form, instructions = self.form, isa()
        kernel = mamba2_prompt(name, instructions)
        addresses = convolution_region(f"{name} float32"), block_region(name, instructions), gated_norm_region(name)
        # The weight may be the memory of the module's, which others may change: it is transposed for each prompt.
        weight, limits = np.ascontiguousarray(form.weight.T), form.limits
        for row in range(len(inputs)):
            with one_kernel_at_a_time:
                kernel(
                    all_threads(), *addresses, bits(inputs[row]), bits(history[row : row + 1]), weight,
                    form.weight_bias, *form.numbers, *limits, bits(state[row : row + 1]), form.groups, *form.norm,
                    bits(mixed[row]), threads,
                )  # fmt: skip


def _gated_norm(norm: Any, inner: int) -> tuple[np.ndarray, np.float32, int, int] | None:
    """A gated RMSNorm as `Mamba2Form.norm`; None for another module."""
    if norm is None or type(norm) is nn.Identity:
        return floats_of(None), np.float32(0), 1, 0
    weight, epsilon = norm_of(norm)
    size = getattr(norm, "group_size", inner // getattr(norm, "n_groups", 1))
    if weight.size != inner or inner % size:
        return None
    return weight, epsilon, inner // size, int(getattr(norm, "norm_before_gate", False))
