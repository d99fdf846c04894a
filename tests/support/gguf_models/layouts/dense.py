"""Dense architectures with gated feed-forward layers."""

from __future__ import annotations

from tests.support.gguf_models.layouts.keys import HEAD, RMS, SIZES, USUAL, VOCABULARY, window_pattern
from tests.support.gguf_models.layouts.layout import Layout, Value, always
from tests.support.gguf_models.layouts.names import (
    AFTER_NORMS,
    ATTENTION,
    GATED,
    HEAD_NORMS,
    HUNYUAN_NORMS,
    MODEL,
    NORMS,
    PERMUTED,
    USUAL_LAYER,
)
from tests.support.gguf_models.layouts.rotation import (
    BASE,
    ROTATED,
    ROTATION,
    llama3_factors,
    longrope_attention,
    longrope_factors,
    rotation_of,
)

COHERE: dict[str, Value] = {
    **SIZES,
    **BASE,
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "logit_scale": "logit_scale",
    "rope.scaling.type": always("none"),
}

#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    "phi3": Layout(
        "phi3",
        {
            **SIZES,
            **RMS,
            **BASE,
            **ROTATED,
            "rope.scaling.original_context_length": lambda config: (
                rotation_of(config).get("original_max_position_embeddings") or config.original_max_position_embeddings
            ),
            "rope.scaling.attn_factor": longrope_attention,
            "attention.sliding_window": lambda config: config.sliding_window or 0,
        },
        {
            **NORMS,
            "self_attn.qkv_proj": "attn_qkv",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        },
        MODEL,
        pieces=True,
        extra=longrope_factors,
    ),
    "olmo": Layout(
        "olmo",
        {**SIZES, **ROTATION, "attention.layer_norm_epsilon": always(1e-5), "attention.clamp_kqv": "clip_qkv"},
        {**USUAL_LAYER, **PERMUTED},
        MODEL,
        pre="olmo",
    ),
    "olmo2": Layout("olmo2", USUAL, {**ATTENTION, **HEAD_NORMS, **GATED, **AFTER_NORMS}, MODEL, pre="dbrx"),
    "olmo3": Layout(
        "olmo2",
        {
            **USUAL,
            "rope.freq_base_swa": lambda config: rotation_of(config, "sliding_attention")["rope_theta"],
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": window_pattern,
        },
        {**ATTENTION, **HEAD_NORMS, **GATED, **AFTER_NORMS},
        MODEL,
        pre="dbrx",
    ),
    "apertus": Layout(
        "apertus",
        {**USUAL, **ROTATED, **VOCABULARY},
        {
            **ATTENTION,
            **HEAD_NORMS,
            "attention_layernorm": "attn_norm",
            "feedforward_layernorm": "ffn_norm",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        },
        MODEL,
        pre="tekken",
        extra=llama3_factors,
        scalars={f"mlp.act_fn.{name}": f"xielu.{name}" for name in ("alpha_n", "alpha_p", "beta", "eps")},
    ),
    "glm": Layout(
        "chatglm",
        {**SIZES, **RMS, **BASE, **ROTATED},
        {**NORMS, **ATTENTION, "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down"},
        MODEL,
        pre="chatglm-bpe",
    ),
    "seed_oss": Layout(
        "seed_oss",
        USUAL,
        {**USUAL_LAYER, "post_attention_layernorm": "post_attention_norm"},
        MODEL,
        pre="seed-coder",
    ),
    "ernie4_5": Layout("ernie4_5", USUAL, USUAL_LAYER, MODEL, pieces=True),
    "exaone4": Layout(
        "exaone4",
        {
            **USUAL,
            **VOCABULARY,
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": window_pattern,
        },
        {**ATTENTION, **HEAD_NORMS, **GATED, **AFTER_NORMS},
        MODEL,
        pre="exaone4",
        extra=llama3_factors,
    ),
    "cohere": Layout("command-r", COHERE, {**USUAL_LAYER, **HEAD_NORMS}, MODEL, pre="command-r"),
    "cohere2": Layout(
        "cohere2",
        {**COHERE, **HEAD, **VOCABULARY, **ROTATED, "attention.sliding_window": "sliding_window"},
        USUAL_LAYER,
        MODEL,
        pre="command-r",
    ),
    "glm4": Layout(
        "glm4",
        {**USUAL, **ROTATED},
        {
            **NORMS,
            **ATTENTION,
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
        MODEL,
        pre="glm4",
    ),
    "bitnet": Layout(
        "bitnet",
        {**USUAL, **VOCABULARY, "rope.scaling.type": always("linear"), "rope.scaling.factor": always(1.0)},
        {**USUAL_LAYER, "self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm"},
        MODEL,
        pieces=True,
    ),
    "hunyuan_v1_dense": Layout("hunyuan-dense", USUAL, {**USUAL_LAYER, **HUNYUAN_NORMS}, MODEL, pre="hunyuan-dense"),
    "stablelm": Layout(
        "stablelm",
        {
            **SIZES,
            **ROTATED,
            "use_parallel_residual": "use_parallel_residual",
            "attention.layer_norm_epsilon": "layer_norm_eps",
        },
        {
            **USUAL_LAYER,
            "self_attn.q_layernorm.norms.*": "attn_q_norm",
            "self_attn.k_layernorm.norms.*": "attn_k_norm",
        },
        MODEL,
        pre="stablelm2",
    ),
    "hrm_text": Layout(
        "hrm_text",
        {
            **{key: value for key, value in USUAL.items() if key != "attention.head_count_kv"},
            **ROTATED,
            "embedding_scale": "embedding_scale",
            "hrm.layers_per_stack": "num_layers_per_stack",
            "hrm.h_cycles": "H_cycles",
            "hrm.l_cycles": "L_cycles",
            "hrm.prefix_lm": "prefix_lm",
        },
        {**ATTENTION, **GATED, "self_attn.gate_proj": "attn_gate"},
        {"model.embed_tokens": "token_embd", "lm_head": "output", "model.z_L_init": "hrm.z_l_init"},
        "model.L_module.layers",
        ("model.H_module.layers",),
    ),
}
