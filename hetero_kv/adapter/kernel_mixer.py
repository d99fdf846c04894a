"""A recurrent mixer whose forward is computed by kernels, for layers that have no fused decode step.

The module's projections remain its own, of any weights. The forward and the module's get the same random input and
state before the first token, and it is used only if outputs and states agree.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hetero_kv.adapter.foreign import PlainTree
from hetero_kv.adapter.fused_decode_layer import TOLERANCE
from hetero_kv.adapter.llama_layer import READ_NUMBERS, CopiedFrom, FastPathOwner, agrees
from hetero_kv.adapter.mixer_form import MixerForm
from hetero_kv.adapter.selective_form import SelectiveForm
from hetero_kv.adapter.state_space_form import Mamba2Form

_FORMS = Mamba2Form, SelectiveForm
# The trial: tokens, of which so many are the first part of a prompt.
_TOKENS, _FIRST_PART, _ROWS = 6, 3, 2


class KernelMixer:
    """A recurrent mixer's forward by kernels; use `of`, which checks the mixer's form.

    Attributes:
        mixer_forward: the forward.
    """

    def __init__(self, mixer: nn.Module, owner: FastPathOwner, form: MixerForm) -> None:
        self.operator, self.mixer_forward = owner, form.forward()
        self._width: int = form.mixer.in_proj.in_features
        self._tree = PlainTree(mixer, READ_NUMBERS)
        self._copied = CopiedFrom(form.copied, form.views)
        self._dtype = form.mixer.conv1d.weight.dtype

    @classmethod
    def of(cls, mixer: nn.Module, owner: FastPathOwner) -> KernelMixer | None:
        """The forward of a mixer; None for another form, or if outputs or states differ."""
        if any(parameter.device.type != "cpu" for parameter in mixer.parameters()):
            return None
        form = next((form for form in (kind.of(mixer) for kind in _FORMS) if form is not None), None)
        if form is None:
            return None
        path = cls(mixer, owner, form)
        return path if agrees(path, mixer, TOLERANCE[path._dtype], "the mixer's kernel") else None

    @property
    def is_current(self) -> bool:
        """Whether the mixer's modules, hooks, and all copied numbers are unchanged since the path was created."""
        return self._tree.is_unchanged and self._copied.is_unchanged

    def difference_from(self, layer: Any) -> float:
        """The largest relative difference, of norms, from the mixer's outputs and states for random tokens."""
        generator = torch.Generator().manual_seed(layer.layer_idx)
        hidden = torch.randn(_ROWS, _TOKENS, self._width, generator=generator).to(self._dtype)
        return self.mixer_forward.difference_from_module(hidden, _FIRST_PART)
