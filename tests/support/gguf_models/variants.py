"""Tiny random models to be written as files, in which every loss of a file would show."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.gguf_models.layouts import LAYOUTS
from tests.support.gguf_models.vocabularies import GEMMA, LLAMA, of_bytes, of_pieces

WINDOW = 16
_BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_DIM = {"head_dim": 32}
_TIED = {"tie_word_embeddings": True}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
}
_GEMMA = {**_DIM, **_TIED, "query_pre_attn_scalar": 32, "sliding_window": WINDOW}


def _rotation(kind: str = "default", theta: float = 1e4, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


# Trained on fewer tokens than the tests have, so that whatever depends on that acts.
_YARN = {"factor": 16.0, "original_max_position_embeddings": 32}
_LONG = {"long_factor": [1 + 0.3 * n for n in range(8)], "short_factor": [1 + 0.1 * n for n in range(8)]}

_LATENT = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
_GROUPS = {**_ROUTED, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
_V2 = {"norm_topk_prob": False}
_ROUTED_YARN = _rotation("yarn", 1e4, **_YARN, beta_fast=32.0, beta_slow=1.0, mscale=0.707, mscale_all_dim=0.707)

#: Name -> (transformers' model type, settings). The part before a colon is the file's architecture.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _rotation(theta=5e4)),
    "llama: biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama: tied, wide heads": ("llama", {**_TIED, **_DIM}),
    "llama: rotation of Llama 3.1": (
        "llama",
        _rotation(
            "llama3", 50.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
        ),
    ),
    "llama: linear": ("llama", _rotation("linear", 5e3, factor=3.0)),
    "llama: YaRN": ("llama", _rotation("yarn", 5e3, **_YARN)),
    "llama: YaRN, all told": (
        "llama", _rotation("yarn", 5e3, **_YARN, attention_factor=0.8, beta_fast=16.0, beta_slow=2.0)
    ),
    "llama: Mistral": ("mistral", {**_DIM, "sliding_window": None}),
    "llama: Mixtral": ("mixtral", {**_LOCAL_EXPERTS, "sliding_window": None}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "use_sliding_window": False, **_rotation(theta=2e6)}),
    "mistral3": (
        "ministral3",
        {
            **_DIM,
            "sliding_window": None,
            **_rotation(
                "yarn", 1e4, factor=32.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0,
                mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
            ),
        },
    ),
    "arcee": ("arcee", {}),
    "granite": (
        "granite",
        {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    ),
    "olmo": ("olmo", {"clip_qkv": 1.5}),
    "granitemoe": (
        "granitemoe",
        {
            **_LOCAL_EXPERTS,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
        },
    ),
    "qwen2": ("qwen2", _rotation(theta=1e6)),
    "qwen2moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 64, "norm_topk_prob": False}),
    "qwen3": ("qwen3", {**_DIM, **_rotation(theta=1e6)}),
    "qwen3: YaRN": ("qwen3", {**_DIM, **_TIED, **_rotation("yarn", 1e4, **_YARN)}),
    "qwen3moe": ("qwen3_moe", {**_DIM, **_EXPERTS, "norm_topk_prob": True}),
    "gemma": ("gemma", {**_DIM, **_TIED, "hidden_activation": "gelu_pytorch_tanh"}),
    "gemma2": ("gemma2", {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}),
    "gemma2: layers of 27B": ("gemma2", {**_GEMMA, "num_hidden_layers": 46, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {**_GEMMA, "num_hidden_layers": 7}),
    "gemma3: linear, capped": (
        "gemma3_text",
        {
            **_GEMMA,
            "num_hidden_layers": 6,
            "final_logit_softcapping": 7.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3: partly rotated": ("phi3", {"sliding_window": None, "partial_rotary_factor": 0.75, "hidden_size": 128}),
    "phi3: long rotation": (
        "phi3",
        {
            "sliding_window": None,
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 32,
            **_rotation("longrope", 1e4, **_LONG, original_max_position_embeddings=32),
        },
    ),
    "starcoder2": ("starcoder2", {"sliding_window": None, "use_bias": True, **_rotation(theta=1e5)}),
    "gpt-oss": (
        "gpt_oss",
        {
            **_DIM,
            **_LOCAL_EXPERTS,
            "sliding_window": WINDOW,
            **_rotation("yarn", 1.5e4, **_YARN, beta_fast=32.0, beta_slow=1.0, truncate=False),
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
        },
    ),
    "falcon": ("falcon", {"new_decoder_architecture": False, "multi_query": True, "alibi": False, "num_kv_heads": 1}),
    "falcon: of 40B": ("falcon", {"new_decoder_architecture": True, "alibi": False, "num_kv_heads": 2}),
    "bloom": ("bloom", {"n_layer": 3, "n_head": 4}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "stablelm: of 12B": (
        "stablelm", {"partial_rotary_factor": 0.5, "qk_layernorm": True, "use_parallel_residual": True}
    ),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, **_TIED}),
    "nemotron": ("nemotron", {"partial_rotary_factor": 0.5, "norm_eps": 1e-3}),
    "minimax-m2": ("minimax_m2", {**_DIM, **_LOCAL_EXPERTS, "rotary_dim": 16}),
    "mamba": ("mamba", {"state_size": 8, "use_mambapy": False, **_TIED}),
    "olmo2": ("olmo2", {}),
    "olmo2: OLMo 3": (
        "olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e5},
            },
        },
    ),
    "command-r": ("cohere", {**_TIED, "logit_scale": 0.3}),
    "cohere2": (
        "cohere2",
        {**_TIED, "logit_scale": 0.3, "num_hidden_layers": 4, "sliding_window": WINDOW, "head_dim": 16},
    ),
    "glm4": ("glm4", {**_DIM, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "seed_oss": ("seed_oss", {**_DIM, "attention_bias": True}),
    "exaone4": ("exaone4", {**_DIM, "num_hidden_layers": 4, "sliding_window": WINDOW, "sliding_window_pattern": 4}),
    "ernie4_5": ("ernie4_5", {**_DIM, **_rotation(theta=1e5)}),
    "hunyuan-dense": ("hunyuan_v1_dense", _DIM),
    "gptneox": ("gpt_neox", _rotation(partial_rotary_factor=0.25)),
    "phi2": ("phi", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4, "intermediate_size": 256}),
    "lfm2moe": (
        "lfm2_moe",
        {
            **_EXPERTS,
            **_TIED,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "conv_L_cache": 3,
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "ernie4_5-moe": (
        "ernie4_5_moe",
        {
            "intermediate_size": 64,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
        },
    ),
    "hunyuan-moe": (
        "hunyuan_v1_moe", {"head_dim": 16, "num_experts": 4, "moe_topk": [2] * 3, "num_shared_expert": 1}
    ),
    "dots1": ("dots1", {**_DIM, **_ROUTED, "sliding_window": None}),
    "glm4moe": (
        "glm4_moe", {**_DIM, **_ROUTED, "partial_rotary_factor": 0.5, "use_qk_norm": True, "attention_bias": True}
    ),
    "exaone-moe": (
        "exaone_moe",
        {
            **_DIM,
            **{name: value for name, value in _ROUTED.items() if not name.startswith("n_")},
            **_EXPERTS,
            "n_group": 1,
            "num_shared_experts": 1,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 4,
        },
    ),
    "deepseek2": ("deepseek_v3", {**_LATENT, **_GROUPS, **_ROUTED_YARN}),
    "deepseek2: V2 Lite": ("deepseek_v2", {**_LATENT, **_ROUTED, **_V2, "q_lora_rank": None}),
    "deepseek2: V2 with groups": ("deepseek_v2", {**_LATENT, **_GROUPS, **_V2, "topk_method": "group_limited_greedy"}),
    "deepseek2: GLM 4.7 Flash": ("glm4_moe_lite", {**_LATENT, **_ROUTED}),
    "deepseek2: Youtu": ("youtu", {**_LATENT, **_TIED}),
    "deepseek2: older converter": ("deepseek_v3", {**_LATENT, **_ROUTED, "is_of_older_converter": True}),
}  # fmt: skip
#: Settings that these have by other names.
_NOT_THEIRS = {
    "gpt_neox": ("num_key_value_heads",),
    "falcon": ("num_key_value_heads", "intermediate_size"),
    "bloom": tuple(_BASE.keys() - {"hidden_size"}),
    "gpt2": tuple(_BASE),
    "mamba": ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
}


def vocabulary_of(model_type: str) -> dict[str, Any]:
    """The metadata of the vocabulary that files of this model have."""
    layout = LAYOUTS[model_type]
    if not layout.pieces:
        return of_bytes(layout.pre)
    return of_pieces(GEMMA if model_type.startswith("gemma") else LLAMA)


def tiny_model(name: str, *, eighths: bool = False) -> PreTrainedModel:
    """The model of a variant, float32, always the same one.

    eighths: its matrices are such that Q8_0 has them without rounding.
    """
    model_type, settings = VARIANTS[name]
    vocabulary = vocabulary_of(model_type)
    base = {key: value for key, value in _BASE.items() if key not in _NOT_THEIRS.get(model_type, ())}
    config = AutoConfig.for_model(
        model_type,
        vocab_size=len(vocabulary["tokenizer.ggml.tokens"]),
        bos_token_id=vocabulary["tokenizer.ggml.bos_token_id"],
        eos_token_id=vocabulary["tokenizer.ggml.eos_token_id"],
        pad_token_id=None,
        **{**base, **settings},
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    _randomise(model, torch.Generator().manual_seed(sum(map(ord, name))))
    if eighths:
        _to_eighths(model)
    return model


def _randomise(model: PreTrainedModel, random: torch.Generator) -> None:
    """Nothing is as a new model has it: norms are not one, biases and buffers not zero."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for name, tensor in model.named_parameters():
        numbers = torch.randn(tensor.shape, generator=random)
        inputs = tensor.shape[0] if "c_attn" in name else tensor.shape[-1]
        if tensor is embedding:
            numbers *= 0.5 if head is embedding else 1.0
        elif tensor is head:
            numbers *= 4 / inputs**0.5
        elif "A_log" in name:
            numbers = torch.log(torch.rand(tensor.shape, generator=random) * 7 + 1)
        elif name.endswith("mixer.D"):
            numbers = 1 + 0.5 * numbers
        elif ".post_" in name and model.config.num_hidden_layers > 16:
            # What many layers add: more of it would magnify rounding beyond all bounds.
            numbers = -0.7 + 0.1 * numbers
        elif ("norm" in name or "ln_" in name) and not name.endswith("bias"):
            numbers = 1 + 0.3 * numbers
        elif tensor.dim() == 1 and "sinks" not in name:
            numbers *= 0.3
        elif tensor.dim() > 1:
            numbers *= 0.6 if "conv" in name else 1.3 / inputs**0.5
        tensor.copy_(numbers)
    for name, buffer in model.named_buffers():
        if name in model.state_dict() and buffer.is_floating_point():
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=random))


def _to_eighths(model: PreTrainedModel) -> None:
    """Whole numbers up to 127 times a power of two; in every 32 of a row and of a column one is 127."""
    for tensor in model.parameters():
        if tensor.dim() < 2:
            continue
        step = 2.0 ** torch.round(torch.log2(tensor.std() * 2 / 127))
        whole = (tensor / step).round().clamp(-127, 127)
        rows, columns = torch.arange(tensor.shape[-2]), torch.arange(tensor.shape[-1])
        whole[..., (rows[:, None] + columns) % 32 == 0] = 127
        tensor.copy_(whole * step)
