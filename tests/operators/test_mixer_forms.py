"""Mixers of models that rules do not take have the forms of those that kernels compute."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hetero_kv.adapter import recurrent
from hetero_kv.adapter.kernel_mixer import KernelMixer
from hetero_kv.adapter.llama_layer import FastPathOwner

_MIXERS = {
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 4},
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("architecture", _MIXERS)
def test_mixers_of_models_that_rules_do_not_take_have_the_form(architecture):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 97, **_MIXERS[architecture]}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes)).eval()
    mixer = next(module for module in model.modules() if recurrent.is_recurrent(module))
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    path = KernelMixer.of(mixer, FastPathOwner("mixer", model))
    assert path is not None
    assert path.difference_from(mixer) < 1e-4
