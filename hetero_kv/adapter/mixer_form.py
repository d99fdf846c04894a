"""What the declared forms of mixers with a convolution and a scan have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hetero_kv.adapter.decoder_form import floats_of
from hetero_kv.adapter.llama_layer import float32_array
from hetero_kv.adapter.recurrent_prompt import MixerForward

# The activation that kernels compute, by transformers' names.
_SILU = "silu", "swish"


@dataclass(frozen=True)
class MixerForm(ABC):
    """A mixer's numbers as kernels take them.

    Attributes:
        mixer: the module.
        weight: the convolution's, [channels, taps] float32, mostly the memory of the module's.
        weight_bias: [channels] float32; empty for none.
    """

    mixer: Any
    weight: np.ndarray
    weight_bias: np.ndarray

    @property
    @abstractmethod
    def other_tensors(self) -> list[torch.Tensor | None]:
        """The tensors of which it has copies, besides those of the convolution."""

    @abstractmethod
    def forward(self) -> MixerForward:
        """The mixer's forward by kernels."""

    @property
    def _reads_weight(self) -> bool:
        return self.weight.ctypes.data == self.mixer.conv1d.weight.data_ptr()

    @property
    def copied(self) -> list[torch.Tensor]:
        """The tensors of which it has copies."""
        convolution = self.mixer.conv1d
        found = [*self.other_tensors, convolution.bias, None if self._reads_weight else convolution.weight]
        return [each for each in found if each is not None]

    @property
    def views(self) -> tuple[torch.Tensor, ...]:
        """The tensors whose memory it reads."""
        return (self.mixer.conv1d.weight,) if self._reads_weight else ()


def convolution_weights(convolution: Any) -> tuple[np.ndarray, np.ndarray]:
    """The weight, [channels, taps], and bias, empty for none, of a convolution for each channel, float32."""
    return float32_array(convolution.weight).reshape(convolution.in_channels, -1), floats_of(convolution.bias)


def has_silu(mixer: Any) -> bool:
    """Whether a mixer declares SiLU as its activation."""
    return getattr(mixer, "activation", None) in _SILU


def is_depthwise(convolution: Any, channels: int) -> bool:
    """Whether a convolution has a filter for each of `channels` channels, over a token and those before it."""
    return (
        type(convolution) is nn.Conv1d
        and convolution.in_channels == convolution.out_channels == convolution.groups == channels
        and convolution.stride == convolution.dilation == (1,)
        and convolution.padding == (convolution.kernel_size[0] - 1,)
    )
