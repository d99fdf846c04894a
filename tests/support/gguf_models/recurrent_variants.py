"""Variants with recurrent layers or short convolutions."""

from __future__ import annotations

from typing import Any

from tests.support.gguf_models.settings import EXPERTS, TIED

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
}  # fmt: skip
