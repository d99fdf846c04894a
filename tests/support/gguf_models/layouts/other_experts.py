"""Mixtures of experts of other forms: DBRX, Llama 4, Phi 3.5 MoE."""

from __future__ import annotations

from tests.support.gguf_models import changes
from tests.support.gguf_models.layouts.keys import EXPERTS, RMS, SIZES, USUAL, VOCABULARY
from tests.support.gguf_models.layouts.layout import Layout, always
from tests.support.gguf_models.layouts.names import (
    ATTENTION,
    MIXED,
    MODEL,
    NORMS,
)
from tests.support.gguf_models.layouts.rotation import (
    BASE,
    ROTATED,
    llama3_factors,
    longrope_attention,
    longrope_factors,
    rotation_of,
)

#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    "phimoe": Layout(
        "phimoe",
        {
            **SIZES,
            **RMS,
            **EXPERTS,
            **BASE,
            **ROTATED,
            "rope.scaling.original_context_length": lambda config: rotation_of(config)[
                "original_max_position_embeddings"
            ],
            "rope.scaling.attn_factor": longrope_attention,
            "attention.sliding_window": lambda config: config.sliding_window or 0,
        },
        {**NORMS, **ATTENTION, **MIXED, "mlp.router": "ffn_gate_inp"},
        MODEL,
        pieces=True,
        extra=longrope_factors,
    ),
    "dbrx": Layout(
        "dbrx",
        {
            "block_count": "n_layers",
            "context_length": "max_seq_len",
            "embedding_length": "d_model",
            "feed_forward_length": lambda config: config.ffn_config.ffn_hidden_size,
            "attention.head_count": "n_heads",
            "attention.head_count_kv": lambda config: config.attn_config.kv_n_heads,
            "attention.layer_norm_epsilon": always(1e-5),
            "attention.clamp_kqv": lambda config: config.attn_config.clip_qkv,
            "expert_count": lambda config: config.ffn_config.moe_num_experts,
            "expert_used_count": lambda config: config.ffn_config.moe_top_k,
            **BASE,
        },
        {
            "norm_attn_norm.norm_1": "attn_norm",
            "norm_attn_norm.norm_2": "attn_output_norm",
            "norm_attn_norm.attn.Wqkv": "attn_qkv",
            "norm_attn_norm.attn.out_proj": "attn_output",
            "ffn.router.layer": "ffn_gate_inp",
            "ffn.experts.mlp.w1": ("ffn_gate_exps.weight", changes.by_expert),
            "ffn.experts.mlp.v1": ("ffn_up_exps.weight", changes.by_expert),
            "ffn.experts.mlp.w2": ("ffn_down_exps.weight", changes.columns_by_expert),
        },
        {"transformer.wte": "token_embd", "transformer.norm_f": "output_norm", "lm_head": "output"},
        "transformer.blocks",
        pre="dbrx",
    ),
    "llama4_text": Layout(
        "llama4",
        {
            **USUAL,
            **EXPERTS,
            **VOCABULARY,
            **ROTATED,
            "feed_forward_length": "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
            "attention.sliding_window": lambda config: 0 if set(config.layer_types) == {"full_attention"} else None,
        },
        {
            **NORMS,
            **ATTENTION,
            "feed_forward.gate_proj": "ffn_gate",
            "feed_forward.up_proj": "ffn_up",
            "feed_forward.down_proj": "ffn_down",
            "feed_forward.router": "ffn_gate_inp",
            "feed_forward.experts.gate_up_proj": ("", changes.gate_and_up_columns),
            "feed_forward.experts.down_proj": ("ffn_down_exps.weight", changes.columns_first),
            "feed_forward.shared_expert.gate_proj": "ffn_gate_shexp",
            "feed_forward.shared_expert.up_proj": "ffn_up_shexp",
            "feed_forward.shared_expert.down_proj": "ffn_down_shexp",
        },
        MODEL,
        pre="llama4",
        extra=llama3_factors,
    ),
}
