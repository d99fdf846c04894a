"""Tiny random models of every supported architecture."""

from __future__ import annotations

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

_BASE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "attn_implementation": "sdpa",
}
_HEAD_DIM = {"head_dim": 16}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_EAGER = {"attn_implementation": "eager"}
_SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

#: model type -> settings of its config besides the common ones.
ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": _HEAD_DIM,
    "qwen3_moe": {**_HEAD_DIM, **_MOE},
    "mistral": {"sliding_window": None, **_HEAD_DIM},
    "mixtral": {"sliding_window": None, **_MOE},
    "phi": {},
    "phi3": {"sliding_window": None, "rope_scaling": None},
    "glm": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "gemma2": {**_HEAD_DIM, **_SLIDING, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16, **_EAGER},
    "gemma3_text": {**_HEAD_DIM, **_SLIDING, "query_pre_attn_scalar": 16},
    "olmo2": {},
    "cohere": {},
    "cohere2": {**_HEAD_DIM, **_SLIDING},
    "starcoder2": {"sliding_window": None},
    "granite": {"attention_multiplier": 0.25, "residual_multiplier": 0.5},
    "stablelm": {"partial_rotary_factor": 0.5},
    "gpt_neox": {"rotary_pct": 0.25},
    "gpt_oss": {**_HEAD_DIM, **_SLIDING, **_MOE, **_EAGER},
    "smollm3": {"no_rope_layers": [1, 0, 1], "use_sliding_window": False},
    # Heads that are wider than the hidden states have room for.
    "internlm3": {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4},
    "nemotron": {"partial_rotary_factor": 0.5},
    "deepseek_v3": {
        **_MOE,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
    },
}

# Windows, softcaps, sinks, experts, rotations of a part and of none, heads that share keys or have their own.
_DISTINCT = (
    "llama",
    "qwen3_moe",
    "phi",
    "glm",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "gpt_oss",
    "smollm3",
    "deepseek_v3",
)
#: Those that have nothing which no other has, but numbers and names.
ALIKE = [name for name in ARCHITECTURES if name not in _DISTINCT]

_GATED_DELTA = {
    **_HEAD_DIM,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 4,
    "time_step_limit": (0.0, 100.0),
}
#: The same of models with layers that are no attention; the second of three is. In Falcon-H1 all are both.
HYBRIDS: dict[str, dict[str, object]] = {
    "qwen3_next": {**_GATED_DELTA, **_MOE, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": _GATED_DELTA,
    "olmo_hybrid": _GATED_DELTA,
    "granitemoehybrid": {
        **_MAMBA2,
        **_MOE,
        "shared_intermediate_size": 32,
        "attention_multiplier": 0.25,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {**_MOE, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "jamba": {
        **_MOE,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "use_mamba_kernels": True,
    },
    "falcon_h1": {
        **_HEAD_DIM,
        **_MAMBA2,
        "mamba_d_ssm": 128,
        "mamba_n_groups": 2,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "ssm_in_multiplier": 1.1,
        "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
    },
    # Blocks of one module each: a state, experts or an MLP, attention.
    "nemotron_h": {
        **_HEAD_DIM,
        **{name: value for name, value in _MOE.items() if name != "num_local_experts"},
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 4,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    },
}

#: The same of models that keep states alone.
STATES_ALONE: dict[str, dict[str, object]] = {
    "mamba": {**_EAGER, "state_size": 8, "time_step_rank": 8},
    "falcon_mamba": {**_EAGER, "state_size": 8, "time_step_rank": 8},
    "mamba2": {**_EAGER, "num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 4},
}
#: What these have no settings of.
_OF_ATTENTION = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")


def tiny_config(model_type: str, **overrides: object) -> PreTrainedConfig:
    """The config of a model of this architecture: three layers, a few thousand weights."""
    own = {**ARCHITECTURES, **HYBRIDS, **STATES_ALONE}.get(model_type, {})
    base = {name: value for name, value in _BASE.items() if model_type not in STATES_ALONE or name not in _OF_ATTENTION}
    return AutoConfig.for_model(model_type, **{**base, **own, **overrides})


def tiny_model(model_type: str, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A random model of this architecture in eval mode, three layers, a few thousand weights, float32."""
    config = tiny_config(model_type, **overrides)
    torch.manual_seed(seed)
    return _randomized(AutoModelForCausalLM.from_config(config, attn_implementation=config._attn_implementation))


def tiny_multi_axis_model(seed: int = 0) -> PreTrainedModel:
    """A random model whose positions run along three axes, [3, batch, tokens]: the language part of Qwen2-VL."""
    text = {name: value for name, value in _BASE.items() if name != "attn_implementation"}
    rotation = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 64}
    config = Qwen2VLConfig(text_config={**text, "rope_parameters": rotation}, vision_config=vision)
    torch.manual_seed(seed)
    return _randomized(Qwen2VLForConditionalGeneration(config))


def _randomized(model: PreTrainedModel) -> PreTrainedModel:
    for name, parameter in model.named_parameters():
        # Large weights make attention peaked, so that a wrong key shows in the output.
        torch.nn.init.normal_(parameter, std=1.0 if "sinks" in name else 0.2)
        if "norm" in name:
            parameter.data.add_(1.0)
    return model.eval().requires_grad_(False)
