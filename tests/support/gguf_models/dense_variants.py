"""Variants with dense feed-forward layers."""

from __future__ import annotations

from typing import Any

from tests.support.gguf_models.settings import (
    DIM,
    GEMMA,
    GEMMA3N,
    GEMMA4,
    GRANITE_SWA,
    LONG,
    TIED,
    WINDOW,
    YARN,
    rotation,
)

#: As `variants.VARIANTS`.
DENSE_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", rotation(theta=5e4)),
    "llama: biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama: tied, wide heads": ("llama", {**TIED, **DIM}),
    "llama: rotation of Llama 3.1": (
        "llama",
        rotation(
            "llama3", 50.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
        ),
    ),
    "llama: linear": ("llama", rotation("linear", 5e3, factor=3.0)),
    "llama: YaRN": ("llama", rotation("yarn", 5e3, **YARN)),
    "llama: YaRN, all told": (
        "llama", rotation("yarn", 5e3, **YARN, attention_factor=0.8, beta_fast=16.0, beta_slow=2.0)
    ),
    "llama: InternLM 3": ("internlm3", {"layout": "internlm3", **DIM, **rotation("linear", 5e4, factor=6.0)}),
    "llama: Mistral": ("mistral", {**DIM, "sliding_window": None}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "use_sliding_window": False, **rotation(theta=2e6)}),
    "mistral3": (
        "ministral3",
        {
            **DIM,
            "sliding_window": None,
            **rotation(
                "yarn", 1e4, factor=32.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0,
                mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
            ),
        },
    ),
    "arcee": ("arcee", {}),
    "apertus": (
        "apertus",
        {
            "hidden_act": "xielu",
            **rotation(
                "llama3", 50.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        },
    ),
    "chatglm": ("glm", {"head_dim": 16, "attention_bias": True, **rotation(partial_rotary_factor=0.5)}),
    "internlm2": ("llama", {"layout": "internlm2", **rotation(theta=1e6)}),
    "xverse": ("llama", {"layout": "xverse"}),
    "exaone": (
        "llama",
        {
            "layout": "exaone",
            **rotation(
                "llama3", 50.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        },
    ),
    "minicpm": (
        "granite",
        {
            "layout": "minicpm",
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
        },
    ),
    "granite": (
        "granite",
        {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    ),
    "granite_swa": ("granite_swa", {**GRANITE_SWA, "tie_word_embeddings": True}),
    "bitnet": ("bitnet", {**TIED, "hidden_act": "silu", **rotation(theta=1e4)}),
    "olmo": ("olmo", {"clip_qkv": 1.5}),
    "qwen2": ("qwen2", rotation(theta=1e6)),
    "qwen2: wide heads": ("qwen2", {**DIM, **TIED, "num_key_value_heads": 4}),
    "qwen3": ("qwen3", {**DIM, **rotation(theta=1e6)}),
    "qwen3: YaRN": ("qwen3", {**DIM, **TIED, **rotation("yarn", 1e4, **YARN)}),
    "gemma": ("gemma", {**DIM, **TIED, "hidden_activation": "gelu_pytorch_tanh"}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}),
    "gemma2: layers of 27B": ("gemma2", {**GEMMA, "num_hidden_layers": 46, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 7}),
    "gemma3: linear, capped": (
        "gemma3_text",
        {
            **GEMMA,
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
            **rotation("longrope", 1e4, **LONG, original_max_position_embeddings=32),
        },
    ),
    "starcoder2": ("starcoder2", {"sliding_window": None, "use_bias": True, **rotation(theta=1e5)}),
    "falcon": ("falcon", {"new_decoder_architecture": False, "multi_query": True, "alibi": False, "num_kv_heads": 1}),
    "falcon: of 40B": ("falcon", {"new_decoder_architecture": True, "alibi": False, "num_kv_heads": 2}),
    "bloom": ("bloom", {"n_layer": 3, "n_head": 4}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "stablelm: of 12B": (
        "stablelm", {"partial_rotary_factor": 0.5, "qk_layernorm": True, "use_parallel_residual": True}
    ),
    "jais2": ("jais2", {**DIM, **rotation(theta=5e5)}),
    "mpt": (
        "mpt",
        {"d_model": 96, "n_layers": 3, "n_heads": 6, "max_seq_len": 512, "attn_config": {"clip_qkv": 2.0}},
    ),
    "starcoder": ("gpt_bigcode", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, **TIED}),
    "nemotron": ("nemotron", {"partial_rotary_factor": 0.5, "norm_eps": 1e-3}),
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
    "command-r": ("cohere", {**TIED, "logit_scale": 0.3}),
    "cohere2": (
        "cohere2",
        {**TIED, "logit_scale": 0.3, "num_hidden_layers": 4, "sliding_window": WINDOW, "head_dim": 16},
    ),
    "glm4": ("glm4", {**DIM, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "seed_oss": ("seed_oss", {**DIM, "attention_bias": True}),
    "exaone4": ("exaone4", {**DIM, "num_hidden_layers": 4, "sliding_window": WINDOW, "sliding_window_pattern": 4}),
    "ernie4_5": ("ernie4_5", {**DIM, **rotation(theta=1e5)}),
    "hunyuan-dense": ("hunyuan_v1_dense", DIM),
    "gptneox": ("gpt_neox", rotation(partial_rotary_factor=0.25)),
    "phi2": ("phi", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4, "intermediate_size": 256}),
    "gemma3n": ("gemma3n_text", GEMMA3N),
    "gemma3n: keys of other layers": ("gemma3n_text", {
            **GEMMA3N,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
            "num_hidden_layers": 6,
            "activation_sparsity_pattern": [0.95, 0.8, 0.0, 0.0, 0.7, 0.0],
        },
    ),
    "gemma4": ("gemma4_text", {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4: keys of other layers": (
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 329,
        },
    ),
    "hrm_text": (
        "hrm_text",
        {
            "num_hidden_layers": 2, "head_dim": 32, "H_cycles": 2, "L_cycles": 2, "embedding_scale": 3.0,
            "prefix_lm": False, **rotation(theta=5e4),
        },
    ),
    "qwen2vl": ("qwen2", {"layout": "qwen2vl", **rotation(theta=1e6)}),
    "qwen3vl": ("qwen3", {"layout": "qwen3vl", **DIM, **TIED, **rotation(theta=1e6)}),
}  # fmt: skip
