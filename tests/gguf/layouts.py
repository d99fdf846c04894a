"""The published layout of each architecture: metadata from a configuration, names of tensors, and what is done to them.

A second account of what `hetero_kv` undoes, written without looking at it. Facts: `convert_hf_to_gguf.py` and
`gguf/tensor_mapping.py` of llama.cpp (https://github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.gguf import changes
from tests.gguf.changes import Change, interleaved

#: A setting's name, or a function of the configuration; None is left out of the file.
Value = str | Callable[[Any], Any]
#: A tensor's name in the file, or (name, change).
Place = str | tuple[str, Change]


@dataclass(frozen=True)
class Layout:
    """How models of one architecture lie in a file.

    Attributes:
        architecture: `general.architecture`.
        keys: behind the architecture's name -> value.
        model, layer: parameter -> place. Names without `.weight` and `.bias` stand for both; `*` for numbers, whose
            tensors are stacked.
        blocks: where the layers lie in the model.
        pieces: whether the vocabulary is one of SentencePiece; otherwise of bytes, to be split as `pre` says.
        extra: tensors that are no parameters.
    """

    architecture: str
    keys: Mapping[str, Value]
    layer: Mapping[str, Place]
    model: Mapping[str, Place]
    blocks: str = "model.layers"
    pre: str = "qwen2"
    pieces: bool = False
    extra: Callable[[Any], dict[str, np.ndarray]] = field(default=lambda config: {})


def always(value: Any) -> Value:
    return lambda config: value


def setting(name: str, default: Any = None) -> Value:
    return lambda config: getattr(config, name, default)


def rotation_of(config: Any, layers: str = "full_attention") -> Mapping[str, Any]:
    parameters = config.rope_parameters
    return parameters.get(layers, parameters)


def _scaled(kind: str, name: str) -> Value:
    def value(config: Any) -> Any:
        parameters = rotation_of(config)
        return parameters.get(name) if parameters["rope_type"] in kind.split() else None

    return value


def rotated(config: Any) -> int:
    """How many numbers of a head are rotated."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(dim * rotation_of(config).get("partial_rotary_factor", 1.0))


def llama3_factors(config: Any) -> dict[str, np.ndarray]:
    """What Llama 3.1's scaling divides each frequency by."""
    said = rotation_of(config)
    if said["rope_type"] != "llama3":
        return {}
    lengths = 2 * math.pi * said["rope_theta"] ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    turns = said["original_max_position_embeddings"] / lengths
    share = (turns - said["low_freq_factor"]) / (said["high_freq_factor"] - said["low_freq_factor"])
    share = np.clip(share, 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - share) / said["factor"] + share)).astype(np.float32)}


def long_and_short(config: Any) -> dict[str, np.ndarray]:
    said = rotation_of(config)
    names = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
    return {name: np.array(said[key], np.float32) for name, key in names.items() if said.get(key)}


def _longrope_attention(config: Any) -> float | None:
    said = rotation_of(config)
    if not said.get("long_factor"):
        return None
    times = config.max_position_embeddings / said["original_max_position_embeddings"]
    return math.sqrt(1 + math.log(times) / math.log(said["original_max_position_embeddings"])) if times > 1 else 1.0


SIZES: dict[str, Value] = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
HEAD: dict[str, Value] = {
    "attention.key_length": setting("head_dim"), "attention.value_length": setting("head_dim"),
}  # fmt: skip
RMS: dict[str, Value] = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
BASE: dict[str, Value] = {"rope.freq_base": lambda config: rotation_of(config)["rope_theta"]}
ROTATION: dict[str, Value] = {
    **BASE,
    "rope.scaling.type": lambda config: {"linear": "linear", "yarn": "yarn"}.get(rotation_of(config)["rope_type"]),
    "rope.scaling.factor": _scaled("linear yarn", "factor"),
    "rope.scaling.original_context_length": _scaled("yarn", "original_max_position_embeddings"),
    "rope.scaling.yarn_attn_factor": _scaled("yarn", "attention_factor"),
    "rope.scaling.yarn_beta_fast": _scaled("yarn", "beta_fast"),
    "rope.scaling.yarn_beta_slow": _scaled("yarn", "beta_slow"),
}
ROTATED: dict[str, Value] = {"rope.dimension_count": rotated}
USUAL = {**SIZES, **RMS, **ROTATION, **HEAD}
VOCABULARY: dict[str, Value] = {"vocab_size": "vocab_size"}
EXPERTS: dict[str, Value] = {
    "expert_count": lambda config: getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None),
    "expert_used_count": "num_experts_per_tok",
}
EXPERT_WIDTH: dict[str, Value] = {"expert_feed_forward_length": "moe_intermediate_size"}
ROUTED: dict[str, Value] = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
    **EXPERT_WIDTH,
}

MODEL: dict[str, Place] = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip
NORMS: dict[str, Place] = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
ATTENTION: dict[str, Place] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
HEAD_NORMS: dict[str, Place] = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
GATED: dict[str, Place] = {
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
MIXED: dict[str, Place] = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_up_proj": ("", changes.gate_and_up),
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
SHARED: dict[str, Place] = {
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}
USUAL_LAYER = {**NORMS, **ATTENTION, **GATED}
PERMUTED: dict[str, Place] = {
    "self_attn.q_proj": ("attn_q", interleaved("num_attention_heads")),
    "self_attn.k_proj": ("attn_k", interleaved("num_key_value_heads")),
}
PLUS_ONE_MODEL: dict[str, Place] = {**MODEL, "model.norm": ("output_norm", changes.plus_one)}
GEMMA_NORMS: dict[str, Place] = {
    "input_layernorm": ("attn_norm", changes.plus_one),
    "post_attention_layernorm": ("post_attention_norm", changes.plus_one),
    "pre_feedforward_layernorm": ("ffn_norm", changes.plus_one),
    "post_feedforward_layernorm": ("post_ffw_norm", changes.plus_one),
}
AFTER_NORMS: dict[str, Place] = {
    "post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
GPT_LAYER: dict[str, Place] = {
    "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down", "self_attention.dense": "attn_output",
}  # fmt: skip


GRANITE: dict[str, Value] = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
GRANITE_EXPERTS: dict[str, Place] = {
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.experts.gate_up_proj": ("", changes.gate_and_up),
    "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
}
COHERE: dict[str, Value] = {
    **SIZES,
    **BASE,
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "logit_scale": "logit_scale",
    "rope.scaling.type": always("none"),
}


def llama_like(name: str, **more: Any) -> Layout:
    """An architecture with the keys and the permuted rows of Llama."""
    layer = {**USUAL_LAYER, **PERMUTED, **more.pop("layer", {})}
    keys = {**USUAL, **VOCABULARY, **ROTATED, **more.pop("keys", {})}
    return Layout(name, keys, layer, MODEL, extra=llama3_factors, **more)


def _head_counts(config: Any) -> list[int]:
    return [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]


def _adjusted_width(config: Any) -> int:
    if not config.block_auto_adjust_ff_dim:
        return int(config.intermediate_size)
    width = int(config.block_ffn_dim_multiplier * int(2 * config.intermediate_size / 3))
    return -(-width // config.block_multiple_of) * config.block_multiple_of


def _windowed(config: Any) -> list[bool] | None:
    return [kind == "sliding_attention" for kind in config.layer_types] if config.sliding_window else None


LFM2: dict[str, Value] = {
    **SIZES,
    **ROTATION,
    **VOCABULARY,
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "attention.head_count_kv": _head_counts,
    "shortconv.l_cache": "conv_L_cache",
}
LFM2_LAYER: dict[str, Place] = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "conv.conv": ("shortconv.conv", changes.squeezed),
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
}
LFM2_MODEL: dict[str, Place] = {
    "model.embed_tokens": "token_embd",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
}
HUNYUAN_NORMS: dict[str, Place] = {
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
}

#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    "llama": llama_like("llama", pre="llama-bpe"),
    "mistral": llama_like("llama", pieces=True),
    "mixtral": llama_like("llama", keys=EXPERTS, layer=MIXED, pieces=True),
    "smollm3": llama_like("smollm3", pre="smaug-bpe"),
    "ministral3": llama_like(
        "mistral3",
        pre="tekken",
        keys={
            "rope.scaling.yarn_log_multiplier": _scaled("yarn", "mscale_all_dim"),
            "attention.temperature_scale": _scaled("yarn", "llama_4_scaling_beta"),
        },
    ),
    "arcee": llama_like("arcee", pre="llama-bpe"),
    "granite": llama_like("granite", pre="refact", keys=GRANITE),
    "granitemoe": llama_like("granitemoe", pre="refact", keys={**GRANITE, **EXPERTS}, layer=GRANITE_EXPERTS),
    "granitemoeshared": llama_like(
        "granitemoe",
        pre="refact",
        keys={**GRANITE, **EXPERTS, "expert_shared_feed_forward_length": "shared_intermediate_size"},
        layer={
            **GRANITE_EXPERTS,
            "shared_mlp.input_linear.weight": ("", changes.shared_gate_and_up),
            "shared_mlp.output_linear": "ffn_down_shexp",
        },
    ),
    "qwen2": Layout("qwen2", USUAL, USUAL_LAYER, MODEL),
    "qwen2_moe": Layout(
        "qwen2moe",
        {**USUAL, **EXPERTS, **EXPERT_WIDTH, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        {
            **NORMS,
            **ATTENTION,
            **MIXED,
            "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
            "mlp.shared_expert.up_proj": "ffn_up_shexp",
            "mlp.shared_expert.down_proj": "ffn_down_shexp",
            "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        },
        MODEL,
    ),
    "qwen3": Layout("qwen3", USUAL, {**USUAL_LAYER, **HEAD_NORMS}, MODEL),
    "qwen3_moe": Layout(
        "qwen3moe",
        {**USUAL, **EXPERTS, **EXPERT_WIDTH},
        {**NORMS, **ATTENTION, **HEAD_NORMS, **MIXED},
        MODEL,
    ),
    "gemma": Layout(
        "gemma",
        {**SIZES, **RMS, **HEAD},
        {**USUAL_LAYER, **{name: (place, changes.plus_one) for name, place in NORMS.items()}},
        PLUS_ONE_MODEL,
        pieces=True,
    ),
    "gemma2": Layout(
        "gemma2",
        {
            **SIZES,
            **RMS,
            **HEAD,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
            "attention.sliding_window": "sliding_window",
        },
        {**ATTENTION, **GATED, **GEMMA_NORMS},
        PLUS_ONE_MODEL,
        pieces=True,
    ),
    "gemma3_text": Layout(
        "gemma3",
        {
            **USUAL,
            "rope.freq_base_swa": lambda config: rotation_of(config, "sliding_attention")["rope_theta"],
            "final_logit_softcapping": "final_logit_softcapping",
            "attention.sliding_window": "sliding_window",
        },
        {
            **ATTENTION,
            **GATED,
            **GEMMA_NORMS,
            "self_attn.q_norm": ("attn_q_norm", changes.plus_one),
            "self_attn.k_norm": ("attn_k_norm", changes.plus_one),
        },
        PLUS_ONE_MODEL,
        pieces=True,
    ),
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
            "rope.scaling.attn_factor": _longrope_attention,
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
        extra=long_and_short,
    ),
    "starcoder2": Layout(
        "starcoder2",
        {**SIZES, **ROTATION, "attention.layer_norm_epsilon": "norm_epsilon"},
        {**NORMS, **ATTENTION, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
        MODEL,
        pre="starcoder",
    ),
    "gpt_oss": Layout(
        "gpt-oss",
        {
            **USUAL,
            **EXPERTS,
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "sliding_window",
        },
        {
            **ATTENTION,
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "post_attention_norm",
            "self_attn.sinks": "attn_sinks.weight",
            "mlp.router": "ffn_gate_inp",
            "mlp.experts.gate_up_proj": ("", changes.alternating_gate_and_up),
            "mlp.experts.gate_up_proj_bias": ("", changes.alternating_gate_and_up),
            "mlp.experts.down_proj": ("ffn_down_exps.weight", changes.columns_first),
            "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
        },
        MODEL,
        pre="gpt-4o",
    ),
    "lfm2": Layout(
        "lfm2", {**LFM2, "feed_forward_length": _adjusted_width}, LFM2_LAYER, LFM2_MODEL, pre="lfm2"
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
    "minimax_m2": Layout(
        "minimax-m2",
        {**USUAL, **EXPERTS, **ROTATED, "expert_feed_forward_length": "intermediate_size"},
        {
            **NORMS,
            **ATTENTION,
            **HEAD_NORMS,
            **MIXED,
            "mlp.e_score_correction_bias": "exp_probs_b.bias",
        },
        MODEL,
        pre="minimax-m2",
    ),
    "mamba": Layout(
        "mamba",
        {
            "context_length": always(1 << 20),
            "embedding_length": "hidden_size",
            "feed_forward_length": always(0),
            "attention.head_count": always(0),
            "block_count": "num_hidden_layers",
            "ssm.conv_kernel": "conv_kernel",
            "ssm.inner_size": "intermediate_size",
            "ssm.state_size": "state_size",
            "ssm.time_step_rank": "time_step_rank",
            "ssm.dt_b_c_rms": always(False),
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
        },
        {
            "norm": "attn_norm",
            "mixer.A_log": ("ssm_a", changes.minus_exponential),
            "mixer.D": "ssm_d",
            "mixer.conv1d": ("ssm_conv1d", changes.squeezed),
            "mixer.in_proj": "ssm_in",
            "mixer.x_proj": "ssm_x",
            "mixer.dt_proj": "ssm_dt",
            "mixer.out_proj": "ssm_out",
        },
        {"backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm", "lm_head": "output"},
        "backbone.layers",
        pre="gpt-2",
    ),
    "olmo": Layout(
        "olmo",
        {**SIZES, **ROTATION, "attention.layer_norm_epsilon": always(1e-5), "attention.clamp_kqv": "clip_qkv"},
        {**USUAL_LAYER, **PERMUTED},
        MODEL,
        pre="olmo",
    ),
    "olmo2": Layout("olmo2", USUAL, {**ATTENTION, **HEAD_NORMS, **GATED, **AFTER_NORMS}, MODEL, pre="dbrx"),
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
            "attention.sliding_window_pattern": _windowed,
        },
        {**ATTENTION, **HEAD_NORMS, **GATED, **AFTER_NORMS},
        MODEL,
        pre="exaone4",
        extra=llama3_factors,
    ),
    "exaone_moe": Layout(
        "exaone-moe",
        {
            **USUAL,
            **ROUTED,
            **VOCABULARY,
            "expert_count": "num_experts",
            "expert_shared_count": "num_shared_experts",
            "expert_shared_feed_forward_length": lambda config: (
                config.moe_intermediate_size * config.num_shared_experts
            ),
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": _windowed,
            "nextn_predict_layers": always(0),
            "rope.scaling.type": always("none"),
        },
        {**USUAL_LAYER, **HEAD_NORMS, **MIXED, **SHARED},
        MODEL,
        pre="exaone-moe",
    ),
    "cohere": Layout("command-r", COHERE, {**USUAL_LAYER, **HEAD_NORMS}, MODEL, pre="command-r"),
    "cohere2": Layout(
        "cohere2",
        {**COHERE, **HEAD, **VOCABULARY, **ROTATED, "attention.sliding_window": "sliding_window"},
        USUAL_LAYER,
        MODEL,
        pre="command-r",
    ),
    "olmo3": Layout(
        "olmo2",
        {
            **USUAL,
            "rope.freq_base_swa": lambda config: rotation_of(config, "sliding_attention")["rope_theta"],
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": _windowed,
        },
        {**ATTENTION, **HEAD_NORMS, **GATED, **AFTER_NORMS},
        MODEL,
        pre="dbrx",
    ),
    "olmoe": Layout(
        "olmoe", {**USUAL, **EXPERTS}, {**NORMS, **ATTENTION, **HEAD_NORMS, **MIXED}, MODEL, pre="olmo"
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
    "hunyuan_v1_dense": Layout("hunyuan-dense", USUAL, {**USUAL_LAYER, **HUNYUAN_NORMS}, MODEL, pre="hunyuan-dense"),
    "hunyuan_v1_moe": Layout(
        "hunyuan-moe",
        {
            **USUAL,
            "expert_count": "num_experts",
            "expert_used_count": lambda config: config.moe_topk[0],
            "expert_feed_forward_length": "intermediate_size",
            "expert_shared_count": always(1),
            "expert_shared_feed_forward_length": "intermediate_size",
        },
        {
            **NORMS,
            **ATTENTION,
            **HUNYUAN_NORMS,
            **MIXED,
            "mlp.gate.wg": "ffn_gate_inp",
            "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
            "mlp.shared_mlp.up_proj": "ffn_up_shexp",
            "mlp.shared_mlp.down_proj": "ffn_down_shexp",
        },
        MODEL,
        pre="hunyuan",
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
    "lfm2_moe": Layout(
        "lfm2moe",
        {
            **LFM2,
            **EXPERTS,
            **EXPERT_WIDTH,
            "leading_dense_block_count": "num_dense_layers",
            "expert_gating_func": always(2),
        },
        {
            **LFM2_LAYER,
            "feed_forward.gate": "ffn_gate_inp",
            "feed_forward.experts.gate_up_proj": ("", changes.gate_and_up),
            "feed_forward.experts.down_proj": "ffn_down_exps.weight",
            "feed_forward.expert_bias": "exp_probs_b.bias",
        },
        LFM2_MODEL,
        pre="lfm2",
    ),
    "ernie4_5_moe": Layout(
        "ernie4_5-moe",
        {
            **USUAL,
            **EXPERT_WIDTH,
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
            "expert_shared_count": "moe_num_shared_experts",
            "expert_shared_feed_forward_length": lambda config: config.intermediate_size // config.num_key_value_heads,
        },
        {
            **USUAL_LAYER,
            **MIXED,
            **SHARED,
            "mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
        },
        MODEL,
        pieces=True,
    ),
    "dots1": Layout(
        "dots1", {**USUAL, **ROUTED}, {**USUAL_LAYER, **HEAD_NORMS, **MIXED, **SHARED}, MODEL
    ),
    "glm4_moe": Layout(
        "glm4moe",
        {**USUAL, **ROTATED, **ROUTED, "expert_gating_func": always(2)},
        {
            **USUAL_LAYER,
            **HEAD_NORMS,
            **MIXED,
            **SHARED,
            "post_attention_layernorm": "post_attention_norm",
        },
        MODEL,
        pre="glm4",
    ),
}  # fmt: skip
