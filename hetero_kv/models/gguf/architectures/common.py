"""Keys, places and settings that most architectures share."""

from __future__ import annotations

from collections.abc import Mapping

from hetero_kv.models.gguf.architectures.declaration import ConfigSettings, MetadataReader, Places
from hetero_kv.models.gguf.architectures.rope import put_rope

SIZES: Mapping[str, str] = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
RMS_NORM: Mapping[str, str] = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}

#: Values of `expert_gating_func`.
SOFTMAX, SIGMOID = 1, 2

MODEL: Places = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "/lm_head"}
ATTENTION: Places = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
NORMED_HEADS: Places = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GATED: Places = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
#: The router; `models/gguf/experts.py` finds the places of the experts.
ROUTER: Places = {"ffn_gate_inp": "mlp.gate"}


def put_heads(metadata: MetadataReader, settings: ConfigSettings, *, head_dim: bool = True) -> None:
    """Put `num_key_value_heads` and `head_dim`.

    head_dim: False for models without this setting, which read it only from configurations that have it; they get it
    where it is not the hidden size divided by the heads.

    Raises ModelError if keys and values have different head sizes.
    """
    heads = settings["num_attention_heads"]
    if heads < 1:
        raise metadata.unsupported("attention.head_count", "is less than one head")
    settings.put("num_key_value_heads", metadata.scalar("attention.head_count_kv", heads), "attention.head_count_kv")
    usual = getattr(metadata.config, "head_dim", None) or settings["hidden_size"] // heads
    dim = metadata.scalar("attention.key_length", usual)
    if metadata.scalar("attention.value_length", dim if metadata.has("attention.key_length") else usual) != dim:
        raise metadata.unsupported("attention.value_length", f"differs from the key's {dim}")
    if head_dim or dim != settings["hidden_size"] // heads:
        settings.put("head_dim", dim, "attention.key_length")


def put_heads_and_rope(metadata: MetadataReader, settings: ConfigSettings) -> None:
    """Put heads of any size, and RoPE over the whole head."""
    put_heads(metadata, settings)
    put_rope(metadata, settings)


def put_heads_by_rope_dimension(metadata: MetadataReader, settings: ConfigSettings) -> None:
    """As `put_heads`, for files that give the head size as the number of rotated dimensions."""
    put_heads(metadata, settings)
    if not metadata.has("attention.key_length") and metadata.has("rope.dimension_count"):
        settings.put("head_dim", metadata.scalar("rope.dimension_count"), "rope.dimension_count")


def put_layers_without_predictors(metadata: MetadataReader, settings: ConfigSettings) -> None:
    """Put `num_hidden_layers` without the last blocks, which predict further tokens; the model has none of these."""
    predicting = metadata.scalar("nextn_predict_layers", 0)
    settings.put("num_hidden_layers", settings["num_hidden_layers"] - predicting, "block_count")


def put_experts(
    metadata: MetadataReader, settings: ConfigSettings, count: str, *, width: str | None = "moe_intermediate_size"
) -> None:
    """Put how many experts there are, by the model's own name of the setting, how many are chosen, and their width."""
    settings.copy(count, "expert_count")
    settings.copy("num_experts_per_tok", "expert_used_count")
    if width is not None:
        settings.copy(width, "expert_feed_forward_length")
    for suffix in ("expert_group_count", "expert_group_used_count"):
        if metadata.scalar(suffix, 1) > 1:
            raise metadata.unsupported(suffix, "divides the experts into groups, which this model does not have")
