"""DeepSeek V4 and Hunyuan 4, whose layers pass several streams."""

from __future__ import annotations

from tests.support.gguf_models.changes import last_pairs
from tests.support.gguf_models.layouts.deepseek import INDEXER, INDEXER_KEYS, KEYS, LAYER, dense_layers
from tests.support.gguf_models.layouts.keys import EXPERT_WIDTH, USUAL
from tests.support.gguf_models.layouts.layout import Layout, Place, Value, always
from tests.support.gguf_models.layouts.names import MIXED, MODEL, NORMS, SHARED

STREAM_KEYS: dict[str, Value] = {"hyper_connection.count": "hc_mult", "hyper_connection.epsilon": "hc_eps"}
STREAMS: dict[str, Place] = {
    f"{part}_hc.{leaf}": f"hc_{part}_{leaf}.weight" for part in ("attn", "ffn") for leaf in ("fn", "base", "scale")
}
LAST_STREAMS: dict[str, Place] = {
    f"model.hc_head.hc_{leaf}": f"output_hc_{leaf}.weight" for leaf in ("fn", "base", "scale")
}


def _compressing(name: str) -> Value:
    """A value of the rotation of layers that make one key of several."""
    return lambda config: config.rope_parameters["compress"].get(name)


def compressor(path: str, name: str) -> dict[str, Place]:
    """What makes one key and value of several."""
    return {
        f"{path}.kv_proj": f"{name}_kv",
        f"{path}.gate_proj": f"{name}_gate",
        f"{path}.position_bias": f"{name}_ape.weight",
        f"{path}.kv_norm": f"{name}_norm",
    }


RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
DEEPSEEK: dict[str, Value] = {
    **{key: value for key, value in USUAL.items() if not key.startswith(("rope", "feed"))},
    **EXPERT_WIDTH,
    **INDEXER_KEYS,
    **STREAM_KEYS,
    "rope.freq_base": lambda config: config.rope_parameters["main"]["rope_theta"],
    "rope.dimension_count": "qk_rope_head_dim",
    "rope.scaling.type": lambda config: config.rope_parameters["compress"]["rope_type"],
    "rope.scaling.factor": _compressing("factor"),
    "rope.scaling.original_context_length": _compressing("original_max_position_embeddings"),
    "rope.scaling.yarn_beta_fast": _compressing("beta_fast"),
    "rope.scaling.yarn_beta_slow": _compressing("beta_slow"),
    "attention.q_lora_rank": "q_lora_rank",
    "attention.sliding_window": "sliding_window",
    "attention.output_group_count": "o_groups",
    "attention.output_lora_rank": "o_lora_rank",
    "attention.compress_ratios": lambda config: [RATIOS[kind] for kind in config.layer_types],
    "attention.compress_rope_freq_base": "compress_rope_theta",
    "embedding_length_out": lambda config: config.hidden_size * config.hc_mult,
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_gating_func": always(4),
    "hash_layer_count": lambda config: config.mlp_layer_types.count("hash_moe"),
    "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
    "swiglu_clamp_exp": lambda config: [config.swiglu_limit] * config.num_hidden_layers,
    "swiglu_clamp_shexp": lambda config: [config.swiglu_limit] * config.num_hidden_layers,
}

#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    "deepseek_v4": Layout(
        "deepseek4",
        DEEPSEEK,
        {
            **NORMS,
            **MIXED,
            **SHARED,
            **STREAMS,
            **compressor("self_attn.compressor", "attn_compressor"),
            **compressor("self_attn.compressor.indexer", "indexer_compressor"),
            "self_attn.compressor.indexer.q_b_proj": "indexer.attn_q_b",
            "self_attn.compressor.indexer.scorer.weights_proj": "indexer.proj",
            "self_attn.q_a_proj": "attn_q_a",
            "self_attn.q_a_norm": "attn_q_a_norm",
            "self_attn.q_b_proj": "attn_q_b",
            "self_attn.kv_proj": "attn_kv",
            "self_attn.kv_norm": "attn_kv_a_norm",
            "self_attn.o_a_proj": "attn_output_a",
            "self_attn.o_b_proj": "attn_output_b",
            "self_attn.sinks": "attn_sinks.weight",
            "mlp.gate.tid2eid": "ffn_gate_tid2eid.weight",
        },
        {**MODEL, **LAST_STREAMS},
        pre="deepseek-v3",
    ),
    "hy_v4": Layout(
        "hy_v4",
        {
            **{key: value for key, value in KEYS.items() if "group" not in key},
            **INDEXER_KEYS,
            **STREAM_KEYS,
            "attention.indexer.types": lambda config: [kind == "full" for kind in config.indexer_types],
            "expert_gating_func": always(2),
            "hyper_connection.magnitude": "hc_magnitude",
            "leading_dense_block_count": dense_layers,
            "swiglu_clamp_exp": lambda config: [config.swiglu_limit] * config.num_hidden_layers,
        },
        {
            **LAYER,
            **INDEXER,
            **STREAMS,
            # transformers' class rotates halves, and the published model neighbours.
            "self_attn.q_b_proj": ("attn_q_b", last_pairs("qk_head_dim")),
            "self_attn.kv_a_proj_with_mqa": ("attn_kv_a_mqa", last_pairs(None)),
            "self_attn.indexer.wq_b": ("indexer.attn_q_b", last_pairs("index_head_dim")),
            "self_attn.indexer.wk": ("indexer.attn_k", last_pairs("index_head_dim")),
            "self_attn.indexer.k_norm": ("indexer.k_norm", last_pairs("index_head_dim")),
            "self_attn.gate_proj": "attn_gate",
            "self_attn.sinks": "attn_sinks.weight",
        },
        {**MODEL, **LAST_STREAMS},
        pre="hy_v4",
    ),
}
