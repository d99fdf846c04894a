"""Granite 4."""

from __future__ import annotations

from typing import Any

from tests.support.gguf_models import changes
from tests.support.gguf_models.layouts.keys import RMS, SIZES, VOCABULARY
from tests.support.gguf_models.layouts.layout import Layout
from tests.support.gguf_models.layouts.llama import GRANITE, GRANITE_EXPERTS
from tests.support.gguf_models.layouts.names import MODEL, NORMS, PERMUTED, USUAL_LAYER
from tests.support.gguf_models.layouts.rotation import BASE, ROTATED


def _kv_heads(config: Any) -> list[int]:
    return [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]


def _context(config: Any) -> int:
    return int(config.max_position_embeddings if config.position_embedding_type else 1 << 20)


#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
    "granitemoehybrid": Layout(
        "granitehybrid",
        {
            **SIZES,
            **RMS,
            **BASE,
            **ROTATED,
            **VOCABULARY,
            **GRANITE,
            "context_length": _context,
            "attention.head_count_kv": _kv_heads,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
            "rope.scaling.finetuned": lambda config: config.position_embedding_type == "rope",
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.group_count": "mamba_n_groups",
            "ssm.inner_size": lambda config: config.mamba_expand * config.hidden_size,
            "ssm.time_step_rank": "mamba_n_heads",
        },
        {
            **NORMS,
            **USUAL_LAYER,
            **PERMUTED,
            **GRANITE_EXPERTS,
            "shared_mlp.input_linear.weight": ("", changes.shared_gate_and_up),
            "shared_mlp.output_linear.weight": ("", changes.shared_down),
            "mamba.in_proj": "ssm_in",
            "mamba.conv1d": ("ssm_conv1d", changes.squeezed),
            "mamba.A_log": ("ssm_a", changes.minus_exponential_column),
            "mamba.D": ("ssm_d", changes.one_column),
            "mamba.dt_bias": "ssm_dt.bias",
            "mamba.norm": ("ssm_norm", changes.by_group("mamba_n_groups")),
            "mamba.out_proj": "ssm_out",
        },
        MODEL,
        pre="refact",
    ),
}
