"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from tests.support.gguf_models.layouts.keys import EXPERT_WIDTH, EXPERTS, USUAL
from tests.support.gguf_models.layouts.layout import Layout
from tests.support.gguf_models.layouts.names import ATTENTION, HEAD_NORMS, MIXED, MODEL, NORMS, USUAL_LAYER

#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
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
}
