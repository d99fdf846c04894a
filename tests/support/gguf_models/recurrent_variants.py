"""Variants with recurrent layers or short convolutions."""

from __future__ import annotations

from typing import Any

from tests.support.gguf_models.settings import DELTA, EXPERTS, TIED, rotation

#: As `variants.VARIANTS`.
RECURRENT_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
        },
    ),
    "mamba": ("mamba", {"state_size": 8, "use_mambapy": False, **TIED}),
    "lfm2moe": (
        "lfm2_moe",
        {
            **EXPERTS,
            **TIED,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "conv_L_cache": 3,
        },
    ),
    "qwen3next": (
        "qwen3_next",
        {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64, **rotation(partial_rotary_factor=0.25)},
    ),
    "qwen3next: older converter": (
        "qwen3_next", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64, "is_of_older_converter": True}
    ),
}  # fmt: skip
