"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from tests.support.gguf_models.layouts.keys import EXPERT_WIDTH, EXPERTS, USUAL
from tests.support.gguf_models.layouts.layout import Layout, Value, always
from tests.support.gguf_models.layouts.names import ATTENTION, HEAD_NORMS, MIXED, MODEL, NORMS, USUAL_LAYER

AXES: dict[str, Value] = {"rope.dimension_sections": always([4, 2, 2, 0])}
DEEPSTACK: dict[str, Value] = {"rope.dimension_sections": always([6, 5, 5, 0]), "n_deepstack_layers": always(3)}

#: transformers' model type, or the name of a layout -> layout.
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
    "qwen2vl": Layout("qwen2vl", {**USUAL, **AXES}, USUAL_LAYER, MODEL),
    "qwen3vl": Layout("qwen3vl", {**USUAL, **DEEPSTACK}, {**USUAL_LAYER, **HEAD_NORMS}, MODEL),
    "qwen3vlmoe": Layout(
        "qwen3vlmoe",
        {**USUAL, **EXPERTS, **EXPERT_WIDTH, **DEEPSTACK},
        {**NORMS, **ATTENTION, **HEAD_NORMS, **MIXED},
        MODEL,
    ),
}
