"""dots3-note: layers that choose tokens, and layers with a window, whose latent attention has other sizes.

Sources: `conversion/dots3.py` and `src/models/dots3note.cpp` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from typing import Any

from hetero_kv.models.gguf.architectures.common import (
    MODEL,
    RMS_NORM,
    SIGMOID,
    SIZES,
    put_layers_without_predictors,
)
from hetero_kv.models.gguf.architectures.declaration import (
    Architecture,
    ConfigSettings,
    MetadataReader,
    ParameterPlace,
    Places,
)
from hetero_kv.models.gguf.architectures.deepseek import (
    GATING,
    INDEXER,
    INDEXERS,
    LATENT_LAYER,
    put_indexer,
    put_latent_attention,
    put_routed_experts,
)
from hetero_kv.models.gguf.architectures.inverse_transforms import InverseTransform
from hetero_kv.models.gguf.architectures.rope import put_rope
from hetero_kv.models.gguf.architectures.sliding_windows import PATTERN, WINDOW

HEADS, CHOOSES, SLIDES = "attention.head_count", "indexed_attention", "sliding_attention"
#: Settings that differ between kinds of layers, so that a configuration has no common value.
_OF_LAYERS = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim",
)  # fmt: skip


def _dots3_note(metadata: MetadataReader, settings: ConfigSettings) -> None:
    settings.values["model_type"] = "dots3_note_text"
    put_layers_without_predictors(metadata, settings)
    kinds = _kinds(metadata, settings["num_hidden_layers"])
    settings.put("layer_types", kinds, PATTERN)
    settings.copy("sliding_window", WINDOW)
    settings.put("num_attention_heads", _heads(metadata, kinds, CHOOSES))
    put_latent_attention(metadata, settings)
    settings.copy("q_lora_rank", "attention.q_lora_rank")
    # All of a head of this size is rotated.
    settings.values["head_dim"] = settings["qk_rope_head_dim"]
    sliding = _sliding_layer(metadata, settings, kinds)
    own = {layer: sliding for layer, kind in enumerate(kinds) if kind == SLIDES}
    settings.values["per_layer_config"] = own
    for name in _OF_LAYERS:
        settings.from_file.pop(name, None)
    _put_rope(metadata, settings, kinds)
    metadata.expect(GATING, SIGMOID, "is another choice of experts than the model's sigmoid")
    put_routed_experts(metadata, settings)
    width = "expert_feed_forward_length"
    settings.put("shared_experts_intermediate_size", settings["moe_intermediate_size"], width)
    put_indexer(metadata, settings)


def _kinds(metadata: MetadataReader, layers: int) -> list[str]:
    slides, chooses = metadata.get(PATTERN), metadata.get(INDEXERS)
    for suffix, found in ((PATTERN, slides), (INDEXERS, chooses)):
        if not isinstance(found, tuple | list) or len(found) not in (layers, metadata.scalar("block_count", layers)):
            raise metadata.unsupported(suffix, f"has not one value for each of {layers} layers")
    if [bool(each) for each in chooses[:layers]] != [not each for each in slides[:layers]]:
        raise metadata.unsupported(INDEXERS, f"is not true of the layers without a window in {PATTERN}")
    return [SLIDES if each else CHOOSES for each in slides[:layers]]


def _heads(metadata: MetadataReader, kinds: list[str], kind: str) -> int:
    """How many heads the layers of a kind have; 1 if there are none. Raises ModelError if they differ."""
    heads = metadata.get(HEADS)
    per_layer = list(heads) if isinstance(heads, tuple | list) else [heads] * len(kinds)
    found = {count or 0 for count, each in zip(per_layer, kinds, strict=False) if each == kind} or {1}
    if len(found) > 1 or min(found) < 1:
        raise metadata.unsupported(HEADS, f"is not one number of heads in all layers of the kind {kind}")
    return int(found.pop())


def _sliding_layer(metadata: MetadataReader, settings: ConfigSettings, kinds: list[str]) -> dict[str, Any]:
    """The settings of a layer with a window."""
    heads, rotated = _heads(metadata, kinds, SLIDES), settings["qk_rope_head_dim"]
    latent = metadata.require("attention.kv_lora_rank_swa", "swa_kv_lora_rank")
    metadata.expect("attention.key_length_swa", latent + rotated, f"is not {latent + rotated}, a latent and a key")
    metadata.expect("attention.value_length_swa", latent, f"is not the {latent} of attention.kv_lora_rank_swa")
    dim = metadata.require("attention.key_length_mla_swa", "swa_head_dim")
    if dim <= rotated:
        raise metadata.unsupported("attention.key_length_mla_swa", f"is not more than the {rotated} that rotate")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": dim,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": dim - rotated,
        "v_head_dim": metadata.require("attention.value_length_mla_swa", "swa_v_head_dim"),
    }


def _put_rope(metadata: MetadataReader, settings: ConfigSettings, kinds: list[str]) -> None:
    put_rope(metadata, settings)
    full, stated = settings["rope_parameters"], settings.from_file["rope_parameters"][1]
    if full["rope_type"] != "default":
        raise metadata.unsupported("rope.scaling.type", "is a scaling that no published model has")
    window = {"rope_type": "default", "rope_theta": float(metadata.require("rope.freq_base_swa", "swa_rope_theta"))}
    both = {CHOOSES: full, SLIDES: window}
    said = {CHOOSES: stated, SLIDES: {"rope_theta": window["rope_theta"]}}
    there = [kind for kind in both if kind in kinds]
    settings.values["rope_parameters"] = {kind: both[kind] for kind in there}
    settings.from_file["rope_parameters"] = (metadata.key("rope.*"), {kind: said[kind] for kind in there})


#: A norm with the factor by which the model multiplies what it normalizes.
_SCALED_NORM = InverseTransform(factor=lambda count, config: (count / config.hidden_size) ** 0.5)
_LAYER: Places = {
    **LATENT_LAYER,
    **INDEXER,
    "attn_q_a_norm": ParameterPlace("self_attn.q_a_layernorm", _SCALED_NORM),
    "attn_kv_a_norm": ParameterPlace("self_attn.kv_a_layernorm", _SCALED_NORM),
    "attn_k_norm": "self_attn.k_rope_only_layernorm",
    "attn_gate": "self_attn.g_proj",
}

TABLES = (
    Architecture(
        "dots3note",
        ("dots3_note_text",),
        {key: name for key, name in {**SIZES, **RMS_NORM}.items() if key != HEADS},
        MODEL,
        _LAYER,
        _dots3_note,
        predicts=True,
    ),
)
