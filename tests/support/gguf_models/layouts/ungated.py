"""Architectures whose feed-forward layers have no gate."""

from __future__ import annotations

from tests.support.gguf_models import changes
from tests.support.gguf_models.layouts.keys import HEAD, SIZES, VOCABULARY
from tests.support.gguf_models.layouts.layout import Layout, Place, always
from tests.support.gguf_models.layouts.names import ATTENTION, MODEL, NORMS
from tests.support.gguf_models.layouts.rotation import BASE, ROTATED, ROTATION

GPT_LAYER: dict[str, Place] = {
    "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down", "self_attention.dense": "attn_output",
}  # fmt: skip

#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    "starcoder2": Layout(
        "starcoder2",
        {**SIZES, **ROTATION, "attention.layer_norm_epsilon": "norm_epsilon"},
        {**NORMS, **ATTENTION, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
        MODEL,
        pre="starcoder",
    ),
    "falcon": Layout(
        "falcon",
        {
            **SIZES,
            "context_length": always(2048),
            "tensor_data_layout": always("jploski"),
            "feed_forward_length": lambda config: 4 * config.hidden_size,
            "attention.head_count_kv": "num_kv_heads",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        {
            **GPT_LAYER,
            "self_attention.query_key_value": ("attn_qkv", changes.queries_before_shared_keys),
            "input_layernorm": "attn_norm",
            "ln_mlp": "attn_norm",
            "ln_attn": "attn_norm_2",
        },
        {"transformer.word_embeddings": "token_embd", "transformer.ln_f": "output_norm", "lm_head": "output"},
        "transformer.h",
        pre="falcon",
    ),
    "bloom": Layout(
        "bloom",
        {
            "block_count": "n_layer",
            "context_length": "hidden_size",
            "embedding_length": "hidden_size",
            "feed_forward_length": lambda config: 4 * config.hidden_size,
            "attention.head_count": "n_head",
            "attention.head_count_kv": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        {
            **GPT_LAYER,
            **NORMS,
            "self_attention.query_key_value": ("attn_qkv", changes.queries_before_keys),
        },
        {
            "transformer.word_embeddings": "token_embd",
            "transformer.word_embeddings_layernorm": "token_embd_norm",
            "transformer.ln_f": "output_norm",
            "lm_head": "output",
        },
        "transformer.h",
        pre="bloom",
    ),
    "gpt2": Layout(
        "gpt2",
        {
            "block_count": "n_layer",
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "feed_forward_length": lambda config: config.n_inner or 4 * config.n_embd,
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        {
            "ln_1": "attn_norm",
            "ln_2": "ffn_norm",
            "attn.c_attn": ("attn_qkv", changes.transposed),
            "attn.c_proj": ("attn_output", changes.transposed),
            "mlp.c_fc": ("ffn_up", changes.transposed),
            "mlp.c_proj": ("ffn_down", changes.transposed),
        },
        {
            "transformer.wte": "token_embd",
            "transformer.wpe": "position_embd",
            "transformer.ln_f": "output_norm",
            "lm_head": "output",
        },
        "transformer.h",
        pre="gpt-2",
    ),
    "gpt_bigcode": Layout(
        "starcoder",
        {
            "block_count": "n_layer",
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "feed_forward_length": lambda config: 4 * config.n_embd,
            "attention.head_count": "n_head",
            "attention.head_count_kv": always(1),
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        {
            "ln_1": "attn_norm",
            "ln_2": "ffn_norm",
            "attn.c_attn": "attn_qkv",
            "attn.c_proj": "attn_output",
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
        {
            "transformer.wte": "token_embd",
            "transformer.wpe": "position_embd",
            "transformer.ln_f": "output_norm",
            "lm_head": "output",
        },
        "transformer.h",
        pre="starcoder",
    ),
    "mpt": Layout(
        "mpt",
        {
            "block_count": "n_layers",
            "context_length": "max_seq_len",
            "embedding_length": "d_model",
            "feed_forward_length": lambda config: 4 * config.d_model,
            "attention.head_count": "n_heads",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "attention.clamp_kqv": lambda config: config.attn_config.clip_qkv,
            "attention.max_alibi_bias": lambda config: float(config.attn_config.alibi_bias_max),
        },
        {
            "norm_1": "attn_norm",
            "norm_2": "ffn_norm",
            "attn.Wqkv": "attn_qkv",
            "attn.out_proj": "attn_output",
            "ffn.up_proj": "ffn_up",
            "ffn.down_proj": "ffn_down",
        },
        {"transformer.wte": "token_embd", "transformer.norm_f": "output_norm", "lm_head": "output"},
        "transformer.blocks",
        pre="mpt",
    ),
    "jais2": Layout(
        "jais2",
        {**SIZES, **ROTATION, **ROTATED, **HEAD, "attention.layer_norm_epsilon": "layer_norm_eps"},
        {**NORMS, **ATTENTION, "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"},
        MODEL,
        pre="jais-2",
    ),
    "nemotron": Layout(
        "nemotron",
        {
            **SIZES,
            **BASE,
            **ROTATED,
            **VOCABULARY,
            **HEAD,
            "attention.layer_norm_rms_epsilon": "norm_eps",
            "attention.layer_norm_epsilon": "norm_eps",
            "rope.scaling.type": always("none"),
        },
        {
            **ATTENTION,
            "input_layernorm.weight": ("attn_norm.weight", changes.plus_one),
            "input_layernorm.bias": "attn_norm.bias",
            "post_attention_layernorm.weight": ("ffn_norm.weight", changes.plus_one),
            "post_attention_layernorm.bias": "ffn_norm.bias",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        },
        {
            **MODEL,
            "model.norm.weight": ("output_norm.weight", changes.plus_one),
            "model.norm.bias": "output_norm.bias",
        },
        pieces=True,
    ),
    "gpt_neox": Layout(
        "gptneox",
        {
            **{key: value for key, value in SIZES.items() if key != "attention.head_count_kv"},
            **ROTATED,
            "use_parallel_residual": "use_parallel_residual",
            "attention.layer_norm_epsilon": "layer_norm_eps",
        },
        {
            **NORMS,
            "mlp.dense_h_to_4h": "ffn_up",
            "mlp.dense_4h_to_h": "ffn_down",
            "attention.dense": "attn_output",
            "attention.query_key_value": ("attn_qkv", changes.queries_before_keys),
        },
        {"gpt_neox.embed_in": "token_embd", "gpt_neox.final_layer_norm": "output_norm", "lm_head": "output"},
        "gpt_neox.layers",
        pre="olmo",
    ),
    "phi": Layout(
        "phi2",
        {
            **SIZES,
            **ROTATED,
            "feed_forward_length": lambda config: 4 * config.hidden_size,
            "attention.head_count_kv": "num_attention_heads",
            "attention.layer_norm_epsilon": "layer_norm_eps",
        },
        {**NORMS, **ATTENTION, "self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"},
        {**MODEL, "model.final_layernorm": "output_norm"},
        pre="phi-2",
    ),
}
