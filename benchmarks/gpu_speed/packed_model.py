"""Makes a model with random packed weights on the device, without reading, quantizing or copying anything."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu_checks.packed_kernels import random_packed
from benchmarks.gpu_checks.setting import Setting
from hetero_kv import inject
from hetero_kv.adapter.quantized_matrix import QuantizedMatrix
from hetero_kv.rules.injecting import eject_around_packed_weights
from hetero_kv.weights.moving import packed_weight


def packed_model(setting: Setting, name: str, **shape: Any) -> Any:
    """A Llama whose matrices are packed in GGML's format `name`; any rules can be injected on top."""
    config = AutoConfig.for_model("llama", **shape)
    torch.manual_seed(0)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.eval().requires_grad_(False)
    injection = inject(model, "dense")
    for module in injection.operators.values():
        if isinstance(module, QuantizedMatrix):
            rows, columns = module.wrapped.weight.shape
            module.keep(packed_weight(random_packed(name, rows, columns, setting.device), name, rows, columns))
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                ones = torch.ones(parameter.shape, dtype=parameter.dtype, device=setting.device)
                module._parameters[leaf] = nn.Parameter(ones, requires_grad=False)
        module._buffers.update(
            {leaf: each.to(setting.device) for leaf, each in module._buffers.items() if each is not None}
        )
    eject_around_packed_weights(model)
    return model
