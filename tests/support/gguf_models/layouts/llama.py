"""Llama and the architectures with its keys and permuted rows."""

from __future__ import annotations

from typing import Any

from tests.support.gguf_models import changes
from tests.support.gguf_models.layouts.keys import EXPERTS, USUAL, VOCABULARY, window_pattern
from tests.support.gguf_models.layouts.layout import Layout, Place, Value, always
from tests.support.gguf_models.layouts.names import MIXED, MODEL, PERMUTED, USUAL_LAYER
from tests.support.gguf_models.layouts.rotation import ROTATED, llama3_factors, scaled

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
GRANITE_SWA: dict[str, Value] = {
    **GRANITE,
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": window_pattern,
    "attention.rope_pattern": lambda config: [bool(base) for base in config.layer_rope_theta],
}


def llama_like(name: str, **more: Any) -> Layout:
    """An architecture with the keys and the permuted rows of Llama."""
    layer = {**USUAL_LAYER, **PERMUTED, **more.pop("layer", {})}
    keys = {**USUAL, **VOCABULARY, **ROTATED, **more.pop("keys", {})}
    return Layout(name, keys, layer, MODEL, extra=llama3_factors, **more)


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
            "rope.scaling.yarn_log_multiplier": scaled("yarn", "mscale_all_dim"),
            "attention.temperature_scale": scaled("yarn", "llama_4_scaling_beta"),
        },
    ),
    "internlm3": llama_like("llama", pieces=True),
    "internlm2": llama_like("internlm2", pieces=True),
    "xverse": llama_like("xverse", keys={"tensor_data_layout": always("Meta AI original pth")}, pieces=True),
    "exaone": Layout(
        "exaone",
        {**USUAL, **VOCABULARY, **ROTATED, "attention.layer_norm_epsilon": "rms_norm_eps"},
        USUAL_LAYER,
        MODEL,
        pre="exaone",
        extra=llama3_factors,
    ),
    "minicpm": llama_like(
        "minicpm", keys={key: value for key, value in GRANITE.items() if key != "attention.scale"}, pieces=True
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
    "granite_swa": llama_like(
        "granite_swa", pre="refact", keys=GRANITE_SWA, layer={"self_attn.sinks": "attn_sinks.weight"}
    ),
    "granitemoe_swa": llama_like(
        "granite_swa",
        pre="refact",
        keys={**GRANITE_SWA, **EXPERTS, "expert_shared_feed_forward_length": "shared_intermediate_size"},
        layer={
            "self_attn.sinks": "attn_sinks.weight",
            "block_sparse_moe.router": "ffn_gate_inp",
            "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps.weight",
            "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
            "shared_mlp.input_linear": "ffn_up_shexp",
            "shared_mlp.output_linear": "ffn_down_shexp",
        },
    ),
}
