"""The declared form of Mamba's first mixer (arXiv:2312.00752), as Jamba, Mamba and FalconMamba have it.

Its input projection gives the channels of a convolution, and their gates. A second one gives time steps of few
dimensions, B and C, which may be normalised; a third one widens the time steps to all channels. A mixer with these
parts may compute something else, so each path is tested before use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from hetero_kv.adapter.llama_layer import float32_array
from hetero_kv.adapter.mixer_form import MixerForm, convolution_weights, has_silu, is_depthwise
from hetero_kv.adapter.recurrent_prompt import MixerForward, past_states
from hetero_kv.cpu_ops.cpu_features import isa
from hetero_kv.cpu_ops.parallel_region import all_threads
from hetero_kv.cpu_ops.recurrent_prompts import convolution_region
from hetero_kv.cpu_ops.selective_scans import scan_region, selective_scan, short_prompt_convolution
from hetero_kv.cpu_ops.threads import at_most, one_kernel_at_a_time
from hetero_kv.weights.kernel_arrays import ARRAY_DTYPES, NAMES, bits

_PARTS = {"in_proj", "conv1d", "x_proj", "dt_proj", "out_proj"}
#: The names of the norms of time steps, B and C.
NORMS = "dt_layernorm", "b_layernorm", "c_layernorm"


@dataclass(frozen=True)
class SelectiveForm(MixerForm):
    """A selective mixer's numbers as kernels take them.

    Attributes:
        decay: [state_dim, channels] float32, -exp(A_log).
        time_bias, skip: [channels] float32, the time step's bias and D.
        has_norms: whether time steps, B and C are normalised.
    """

    decay: np.ndarray
    time_bias: np.ndarray
    skip: np.ndarray
    has_norms: bool

    @classmethod
    def of(cls, mixer: Any) -> SelectiveForm | None:
        """The form of a mixer on a CPU; None for another one."""
        parts = {name: child for name, child in mixer.named_children() if name != "act"}
        own = {name for name, _ in mixer.named_parameters(recurse=False)}
        if parts.keys() - NORMS != _PARTS or len(parts) not in (len(_PARTS), len(_PARTS) + len(NORMS)):
            return None
        if own != {"A_log", "D"} or any(mixer.named_buffers(recurse=False)) or not has_silu(mixer):
            return None
        channels, state_dim = mixer.A_log.shape
        projections = mixer.in_proj, mixer.x_proj, mixer.dt_proj
        outputs = 2 * channels, mixer.dt_proj.in_features + 2 * state_dim, channels
        if any(each.out_features != width for each, width in zip(projections, outputs, strict=True)):
            return None
        if not is_depthwise(mixer.conv1d, channels) or mixer.x_proj.bias is not None or mixer.D.shape != (channels,):
            return None
        if mixer.dt_proj.bias is None or any(each.dtype not in ARRAY_DTYPES for each in mixer.parameters()):
            return None
        decay = np.ascontiguousarray(-np.exp(float32_array(mixer.A_log)).T)
        numbers = decay, float32_array(mixer.dt_proj.bias), float32_array(mixer.D)
        return cls(mixer, *convolution_weights(mixer.conv1d), *numbers, len(parts) > len(_PARTS))

    @property
    def other_tensors(self) -> list[torch.Tensor | None]:
        mixer = self.mixer
        return [mixer.A_log, mixer.dt_proj.bias, mixer.D]

    def forward(self) -> SelectiveForward:
        return SelectiveForward(self)


class SelectiveForward(MixerForward):
    """A selective mixer's forward, of prompts and of decoded tokens."""

    takes_tokens = True

    def __init__(self, form: SelectiveForm) -> None:
        super().__init__(form.mixer)
        self.form = form

    def __call__(self, hidden_states: torch.Tensor, layer: Any, is_prompt: bool) -> torch.Tensor:
        """See `MixerForward`."""
        form, mixer = self.form, self._mixer
        inputs = mixer.in_proj(hidden_states).detach().contiguous()
        state_dim, channels = form.decay.shape
        batch, tokens, _ = inputs.shape
        taps, dtype = form.weight.shape[1], inputs.dtype
        history, state = past_states(layer, (batch, channels, taps), (batch, channels, state_dim), dtype)
        x, mixed = (torch.empty(batch, tokens, channels, dtype=dtype) for _ in range(2))
        name, threads = NAMES[bits(x).dtype], at_most(torch.get_num_threads())
        with one_kernel_at_a_time:
            # The weight may be the memory of the module's, which others may change: it is transposed for each call.
            short_prompt_convolution(name)(
                all_threads(), convolution_region(f"{name} {name}"), bits(inputs), bits(history),
                np.ascontiguousarray(form.weight.T), form.weight_bias, bits(x), threads,
            )  # fmt: skip
        times, b, c = mixer.x_proj(x).split([mixer.dt_proj.in_features, state_dim, state_dim], dim=-1)
        if form.has_norms:
            times, b, c = mixer.dt_layernorm(times), mixer.b_layernorm(b), mixer.c_layernorm(c)
        times = functional.linear(times, mixer.dt_proj.weight).detach().contiguous()
        b, c = (each.detach().float().contiguous() for each in (b, c))
        variant = f"{name} {name}"
        with one_kernel_at_a_time:
            selective_scan(variant)(
                all_threads(), scan_region(variant, isa()), bits(x), bits(times), bits(b), bits(c), bits(inputs),
                channels, form.decay, form.time_bias, form.skip, bits(state), bits(mixed), threads,
            )  # fmt: skip
        layer.update_conv_state(inputs[:, -taps:, :channels].transpose(1, 2), conv_kernel_size=taps)
        layer.update_recurrent_state(state)
        output: torch.Tensor = mixer.out_proj(mixed)
        return output
