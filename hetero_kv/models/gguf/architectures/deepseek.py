"""DeepSeek V2 and V3, and models with their multi-head latent attention.

These are Kimi K2, GLM 4.7 Flash, GigaChat 3, Youtu, Mistral Large 3 and Small 4, and DeepSeek V3.2 and GLM 5, which
choose the tokens that they attend to.

Sources: `conversion/deepseek.py`, `conversion/glm.py` and `src/models/deepseek2.cpp` of
https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from hetero_kv.models.gguf.architectures.common import (
    ATTENTION,
    GATED,
    MODEL,
    RMS_NORM,
    SIGMOID,
    SIZES,
    SOFTMAX,
    put_layers_without_predictors,
)
from hetero_kv.models.gguf.architectures.declaration import (
    Architecture,
    ConfigSettings,
    MetadataReader,
    ParameterPlace,
    Places,
)
from hetero_kv.models.gguf.architectures.inverse_transforms import (
    LATENT_KEY_ROWS,
    LATENT_KEYS,
    LATENT_VALUE_ROWS,
    LATENT_VALUES,
)
from hetero_kv.models.gguf.architectures.mixtures import SHARED_EXPERTS
from hetero_kv.models.gguf.architectures.rope import put_rope

GATING = "expert_gating_func"
#: The vocabulary and blocks of GLM 4.7 Flash, whose first files do not say how experts are chosen.
ROWS_OF_GLM_FLASH, BLOCKS_OF_GLM_FLASH = 154_880, (47, 48)
MULTIPLIER = "rope.scaling.yarn_log_multiplier"
TEMPERATURE = "attention.temperature_scale"
#: By how much Mistral Small 4 scales attention by position; no converted file says it.
TEMPERATURE_OF_MISTRAL_4 = 0.1
INDEXERS = "attention.indexer.types"
#: The context of GLM 5.2, the first whose layers share what they choose.
CONTEXT_OF_GLM_52 = 1 << 20
#: The converter multiplies the model's `mscale_all_dim` by this.
MULTIPLIER_UNIT = 0.1


def _deepseek2(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_layers_without_predictors(metadata, settings)
    known = getattr(metadata.config, "model_type", None)
    if metadata.scalar(TEMPERATURE, 0.0) or known == "mistral4":
        # From the format of Mistral's own, the converter writes Mistral's mixtures under this name.
        _mistral4(metadata, settings)
        return
    put_latent_attention(metadata, settings)
    _put_rope(metadata, settings)
    gating = _gating(metadata, settings)
    if known is not None and (known == "deepseek_v2") != (gating == SOFTMAX):
        raise metadata.unsupported(GATING, f"is another choice of experts than that of {known}")
    settings.values["model_type"] = known or ("deepseek_v2" if gating == SOFTMAX else "deepseek_v3")
    put_routed_experts(metadata, settings)


def put_latent_attention(metadata: MetadataReader, settings: ConfigSettings) -> None:
    """Put the sizes of multi-head latent attention, of files in which it is one kv head or as many as query heads.

    Raises ModelError if they contradict each other.
    """
    heads, rotated = settings["num_attention_heads"], metadata.require("rope.dimension_count", "qk_rope_head_dim")
    latent = metadata.require("attention.kv_lora_rank", "kv_lora_rank")
    key, value, groups = "attention.key_length", "attention.value_length", heads
    if metadata.has(f"{key}_mla"):
        # These say the sizes of keys and values in llama.cpp's cache: latent, and in one head.
        metadata.expect(key, latent + rotated, f"is not the {latent + rotated} of a latent and a rotated key")
        metadata.expect(value, latent, f"is not the {latent} of attention.kv_lora_rank")
        key, value, groups = f"{key}_mla", f"{value}_mla", 1
    metadata.expect("attention.head_count_kv", groups, f"is not {groups}, the number that such a file has")
    put_latent_sizes(metadata, settings, key, value)


def put_latent_sizes(metadata: MetadataReader, settings: ConfigSettings, key: str, value: str | None) -> None:
    """Put the ranks of latents, and the sizes of keys and values.

    Args:
        key, value: the metadata keys of the sizes; None for values whose size is known.
    """
    heads, rotated = settings["num_attention_heads"], metadata.require("rope.dimension_count", "qk_rope_head_dim")
    settings.put("qk_rope_head_dim", rotated, "rope.dimension_count")
    settings.copy("kv_lora_rank", "attention.kv_lora_rank")
    dim = metadata.require(key, "qk_head_dim")
    if dim <= rotated:
        raise metadata.unsupported(key, f"is not more than the {rotated} of rope.dimension_count")
    settings.put("qk_nope_head_dim", dim - rotated, key)
    if value is not None:
        settings.copy("v_head_dim", value)
    settings.put("num_key_value_heads", heads)
    settings.put("q_lora_rank", metadata.scalar("attention.q_lora_rank"), "attention.q_lora_rank")


def put_indexer(metadata: MetadataReader, settings: ConfigSettings) -> None:
    """Put what chooses the tokens that a layer attends to (DeepSeek sparse attention).

    Raises ModelError if its heads are smaller than what of a head is rotated.
    """
    settings.copy("index_n_heads", "attention.indexer.head_count")
    settings.copy("index_head_dim", "attention.indexer.key_length")
    settings.copy("index_topk", "attention.indexer.top_k")
    require_rotated(metadata, settings["index_head_dim"])


def require_rotated(metadata: MetadataReader, dim: int) -> None:
    """Raise ModelError if the indexer's heads of `dim` numbers are smaller than what of a head is rotated."""
    rotated = metadata.scalar("rope.dimension_count", metadata.scalar("attention.key_length"))
    if rotated is not None and rotated > dim:
        raise metadata.unsupported("attention.indexer.key_length", f"is less than the {rotated} that rotate of a head")


def _deepseek32(metadata: MetadataReader, settings: ConfigSettings) -> None:
    settings.values["model_type"] = "deepseek_v32"
    _put_sparse(metadata, settings)


def _glm_dsa(metadata: MetadataReader, settings: ConfigSettings) -> None:
    settings.values["model_type"] = "glm_moe_dsa"
    _put_sparse(metadata, settings)
    layers = settings["num_hidden_layers"]
    chosen = metadata.get(INDEXERS)
    if chosen is None:
        if settings["max_position_embeddings"] >= CONTEXT_OF_GLM_52:
            raise metadata.unsupported(INDEXERS, "is missing, and the layers of GLM 5.2 differ in it")
        chosen = [True] * layers
    if not isinstance(chosen, tuple | list) or len(chosen) < layers or not chosen[0]:
        raise metadata.unsupported(INDEXERS, f"has not one value for each of {layers} layers, true in the first")
    settings.put("indexer_types", ["full" if each else "shared" for each in chosen[:layers]], INDEXERS)


def _put_sparse(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_layers_without_predictors(metadata, settings)
    put_latent_attention(metadata, settings)
    _put_rope(metadata, settings)
    metadata.expect(GATING, SIGMOID, "is another choice of experts than the model's sigmoid")
    put_routed_experts(metadata, settings)
    put_indexer(metadata, settings)


def _mistral4(metadata: MetadataReader, settings: ConfigSettings) -> None:
    settings.values["model_type"] = "mistral4"
    put_latent_attention(metadata, settings)
    _put_rope(metadata, settings)
    rope = settings["rope_parameters"]
    if rope["rope_type"] != "yarn":
        raise metadata.unsupported("rope.scaling.type", "is not YaRN, which the model has")
    # llama.cpp's converter leaves it out.
    rope["llama_4_scaling_beta"] = metadata.scalar(TEMPERATURE, 0.0) or TEMPERATURE_OF_MISTRAL_4
    if metadata.has(TEMPERATURE):
        settings.from_file["rope_parameters"][1]["llama_4_scaling_beta"] = rope["llama_4_scaling_beta"]
    length = rope["original_max_position_embeddings"]
    metadata.expect("attention.temperature_length", length, f"is not the {length} of rope.scaling")
    rotated, dim = settings["qk_rope_head_dim"], settings["qk_nope_head_dim"] + settings["qk_rope_head_dim"]
    rope["partial_rotary_factor"] = rotated / dim
    settings.values.pop("head_dim")
    metadata.expect(GATING, SOFTMAX, "is another choice of experts than the model's softmax")
    put_routed_experts(metadata, settings)


def _put_rope(metadata: MetadataReader, settings: ConfigSettings) -> None:
    settings.values["head_dim"] = settings["qk_rope_head_dim"]
    put_rope(metadata, settings, yarn=("yarn_log_multiplier",))
    metadata.expect("rope.scaling.attn_factor", 1.0, "scales queries and keys, which transformers cannot express")
    rope, multiplier = settings["rope_parameters"], metadata.scalar(MULTIPLIER, 0.0)
    if rope["rope_type"] not in ("default", "yarn"):
        raise metadata.unsupported("rope.scaling.type", "scales attention in llama.cpp, and not in the model")
    if (rope["rope_type"] == "yarn") != bool(multiplier):
        raise metadata.unsupported(MULTIPLIER, "belongs to YaRN, and YaRN of these models to it")
    if multiplier:
        # llama.cpp takes the same multiplier for rotations, so that both cancel out there.
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), multiplier / MULTIPLIER_UNIT)
        settings.from_file["rope_parameters"][1]["mscale_all_dim"] = rope["mscale_all_dim"]


def _gating(metadata: MetadataReader, settings: ConfigSettings) -> int:
    """How experts are chosen; llama.cpp's default where the file does not state it."""
    rows = {tensor.name: tensor.shape[0] for tensor in metadata.file.tensors}["token_embd.weight"]
    is_flash = rows == ROWS_OF_GLM_FLASH and settings["num_hidden_layers"] in BLOCKS_OF_GLM_FLASH
    gating = int(metadata.scalar(GATING, 0) or (SIGMOID if is_flash else SOFTMAX))
    if gating not in (SOFTMAX, SIGMOID):
        raise metadata.unsupported(GATING, "is no choice of experts of these models; they have softmax and sigmoid")
    return gating if metadata.scalar("expert_count", 0) else SIGMOID


def put_routed_experts(metadata: MetadataReader, settings: ConfigSettings) -> None:
    """Put the experts of DeepSeek's mixtures, their router's settings, and which layers have none.

    Raises ModelError if they contradict each other.
    """
    layers, dense = settings["num_hidden_layers"], metadata.scalar("leading_dense_block_count", 0)
    if settings["model_type"] in ("glm4_moe_lite", "hy_v4", "dots3_note_text"):
        kinds = ["dense" if layer < dense else "sparse" for layer in range(layers)]
        settings.put("mlp_layer_types", kinds, "leading_dense_block_count")
    elif settings["model_type"] != "youtu":
        settings.put("first_k_dense_replace", dense, "leading_dense_block_count")
    experts = metadata.scalar("expert_count", 0)
    if not experts:
        # Youtu: every layer is dense, and its file has values for experts without effect.
        for suffix in ("expert_feed_forward_length", "expert_weights_scale", "expert_weights_norm"):
            metadata.get(suffix)
        for suffix in ("expert_used_count", "expert_shared_count", "expert_group_count", "expert_group_used_count"):
            metadata.expect(suffix, 0, "is of experts, and the file has none")
        if dense < layers:
            raise metadata.unsupported("leading_dense_block_count", f"is not all {layers} layers, without experts")
        return
    settings.copy("n_routed_experts", "expert_count")
    settings.copy("n_shared_experts", "expert_shared_count")
    settings.copy("num_experts_per_tok", "expert_used_count")
    settings.copy("moe_intermediate_size", "expert_feed_forward_length")
    settings.put("routed_scaling_factor", metadata.scalar("expert_weights_scale", 0.0) or 1.0, "expert_weights_scale")
    settings.put("norm_topk_prob", metadata.scalar("expert_weights_norm", False), "expert_weights_norm")
    put_expert_groups(metadata, settings)


def put_expert_groups(metadata: MetadataReader, settings: ConfigSettings) -> None:
    """Put how many groups of experts there are, and how many are chosen.

    Raises ModelError if they do not fit the experts.
    """
    groups, experts = metadata.scalar("expert_group_count", 0) or 1, settings["n_routed_experts"]
    # V3 adds up the two best of a group.
    least = 1 if settings["model_type"] == "deepseek_v2" else 2
    if experts % groups or experts // groups < least:
        raise metadata.unsupported("expert_group_count", f"does not divide {experts} experts into groups")
    chosen = metadata.scalar("expert_group_used_count", 0)
    if groups == 1 and chosen in (0, 1):
        chosen = 1
    elif not 1 <= chosen <= groups:
        raise metadata.unsupported("expert_group_used_count", f"is not from 1 to the {groups} of expert_group_count")
    if chosen * (experts // groups) < settings["num_experts_per_tok"]:
        raise metadata.unsupported("expert_used_count", "is more than the experts of the chosen groups")
    settings.put("n_group", groups, "expert_group_count")
    settings.put("topk_group", chosen, "expert_group_used_count")
    if settings["model_type"] == "deepseek_v2":
        settings.put("topk_method", "greedy" if groups == 1 else "group_limited_greedy")
        metadata.expect("expert_weights_norm", False, "normalizes weights of experts, which DeepSeek V2 does not")


LATENT_LAYER: Places = {
    **{name: place for name, place in ATTENTION.items() if name not in ("attn_k", "attn_v")},
    **GATED,
    **SHARED_EXPERTS,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    # Older files have one matrix, newer ones two.
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": ParameterPlace("self_attn.kv_b_proj", LATENT_KEYS, LATENT_KEY_ROWS),
    "attn_v_b": ParameterPlace("self_attn.kv_b_proj", LATENT_VALUES, LATENT_VALUE_ROWS),
}

INDEXER: Places = {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
_SPARSE_LAYER: Places = {**LATENT_LAYER, **INDEXER}

TABLES = (
    Architecture(
        "deepseek2",
        ("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "youtu", "mistral4"),
        {**SIZES, **RMS_NORM},
        MODEL,
        LATENT_LAYER,
        _deepseek2,
        predicts=True,
    ),
    Architecture(
        "deepseek32", ("deepseek_v32",), {**SIZES, **RMS_NORM}, MODEL, _SPARSE_LAYER, _deepseek32, predicts=True
    ),
    Architecture("glm-dsa", ("glm_moe_dsa",), {**SIZES, **RMS_NORM}, MODEL, _SPARSE_LAYER, _glm_dsa, predicts=True),
    Architecture("mistral4", ("mistral4",), {**SIZES, **RMS_NORM}, MODEL, LATENT_LAYER, _mistral4),
)
