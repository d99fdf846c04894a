"""Gemma: the weights of norms are added to one."""

from __future__ import annotations

from tests.support.gguf_models import changes
from tests.support.gguf_models.layouts.keys import HEAD, RMS, SIZES, USUAL
from tests.support.gguf_models.layouts.layout import Layout, Place
from tests.support.gguf_models.layouts.names import ATTENTION, GATED, MODEL, NORMS, USUAL_LAYER
from tests.support.gguf_models.layouts.rotation import rotation_of

PLUS_ONE_MODEL: dict[str, Place] = {**MODEL, "model.norm": ("output_norm", changes.plus_one)}
GEMMA_NORMS: dict[str, Place] = {
    "input_layernorm": ("attn_norm", changes.plus_one),
    "post_attention_layernorm": ("post_attention_norm", changes.plus_one),
    "pre_feedforward_layernorm": ("ffn_norm", changes.plus_one),
    "post_feedforward_layernorm": ("post_ffw_norm", changes.plus_one),
}

#: transformers' model type -> layout.
LAYOUTS: dict[str, Layout] = {
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
}
