"""Gemma 3n, with several streams of hidden states (AltUp), embeddings of each layer, and layers with others' keys.

Sources: `conversion/gemma.py` and `src/models/gemma3n.cpp` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from hetero_kv.models.gguf.architectures.common import (
    ATTENTION,
    GATED,
    MODEL,
    NORMED_HEADS,
    RMS_NORM,
    SIZES,
    put_heads,
)
from hetero_kv.models.gguf.architectures.declaration import Architecture, ConfigSettings, MetadataReader
from hetero_kv.models.gguf.architectures.gemma import put_rope_of_windows
from hetero_kv.models.gguf.architectures.sliding_windows import put_windows

WIDTH = "feed_forward_length"
SHARED = "attention.shared_kv_layers"
SPARSITY = "activation_sparsity_scale"
PER_LAYER_EMBEDDING = "per_layer_token_embd.weight"


def _gemma3n(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings)
    put_windows(metadata, settings, usual=5)
    put_rope_of_windows(metadata, settings)
    layers = settings["num_hidden_layers"]
    widths = metadata.get(WIDTH, getattr(metadata.config, "intermediate_size", None))
    if widths is None:
        widths = metadata.require(WIDTH, "intermediate_size")
    settings.put("intermediate_size", list(widths) if isinstance(widths, tuple | list) else [widths] * layers, WIDTH)
    shared, kinds = metadata.scalar(SHARED, 0), settings["layer_types"]
    if not 0 <= shared < layers or set(kinds) != set(kinds[: layers - shared]):
        raise metadata.unsupported(SHARED, "leaves a kind of layers without keys of its own")
    settings.put("num_kv_shared_layers", shared, SHARED)
    settings.put("final_logit_softcapping", metadata.scalar("final_logit_softcapping", 30.0), "final_logit_softcapping")
    settings.copy("hidden_size_per_layer_input", "embedding_length_per_layer_input")
    settings.copy("altup_active_idx", "altup.active_idx")
    settings.copy("altup_num_inputs", "altup.num_inputs")
    if not 0 <= settings["altup_active_idx"] < settings["altup_num_inputs"]:
        raise metadata.unsupported("altup.active_idx", f"is none of the {settings['altup_num_inputs']} streams")
    _put_sparsity(metadata, settings)
    for tensor in metadata.file.tensors:
        if tensor.name == PER_LAYER_EMBEDDING:
            settings.put("vocab_size_per_layer_input", tensor.shape[0])
        elif tensor.name == "blk.0.laurel_l.weight":
            settings.put("laurel_rank", tensor.shape[0])


def _put_sparsity(metadata: MetadataReader, settings: ConfigSettings) -> None:
    """Put the share of activations that each layer drops; a file has it as deviations from the mean."""
    scales = metadata.get(SPARSITY)
    if not isinstance(scales, tuple | list) or len(scales) != settings["num_hidden_layers"]:
        raise metadata.unsupported(SPARSITY, "has not one number for each layer")
    if any(scale == math.inf or math.isnan(scale) or -math.inf < scale <= 0 for scale in scales):
        raise metadata.unsupported(SPARSITY, "drops less than a half of a layer's activations, or all of them")
    shares = [0.0 if scale == -math.inf else round(NormalDist().cdf(scale), 7) for scale in scales]
    settings.put("activation_sparsity_pattern", shares, SPARSITY)


GEMMA3N = Architecture(
    "gemma3n",
    ("gemma3n_text",),
    {name: setting for name, setting in {**SIZES, **RMS_NORM}.items() if name != WIDTH},
    {
        **MODEL,
        "per_layer_token_embd": "embed_tokens_per_layer",
        "per_layer_model_proj": "per_layer_model_projection",
        "per_layer_proj_norm": "per_layer_projection_norm",
        "altup_proj": "altup_projections.{row}",
        "altup_unembd_proj": "altup_unembed_projections.{row}",
    },
    {
        **ATTENTION,
        **NORMED_HEADS,
        **GATED,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "altup_correct_scale.weight": "altup.correct_output_scale",
        "altup_correct_coef": "altup.correction_coefs",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    _gemma3n,
    of_own_keys=frozenset({"attn_k.weight", "attn_v.weight", "attn_k_norm.weight"}),
)

TABLES = (GEMMA3N,)
