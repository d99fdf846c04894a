"""What most architectures have in common: keys, places, heads and experts."""

from __future__ import annotations

from collections.abc import Mapping

from hetero_kv.models.gguf.architectures.declaration import Places, Said, Settings
from hetero_kv.models.gguf.architectures.rotation import put_rotation

SIZES: Mapping[str, str] = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
RMS_NORM: Mapping[str, str] = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}

#: A value of `expert_gating_func`.
SIGMOID = 2

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
#: The experts themselves lie where `models/gguf/experts.py` finds their module.
ROUTER: Places = {"ffn_gate_inp": "mlp.gate"}


def put_heads(said: Said, settings: Settings, *, head_dim: bool = True) -> None:
    """Put `num_key_value_heads`, and `head_dim` where the model has the setting.

    Raises ModelError where keys and values have heads of different sizes, or sizes that the model has no setting for.
    """
    heads = settings["num_attention_heads"]
    if heads < 1:
        raise said.refused("attention.head_count", "is no number of heads")
    settings.put("num_key_value_heads", said.one("attention.head_count_kv", heads), "attention.head_count_kv")
    usual = getattr(said.given, "head_dim", None) or settings["hidden_size"] // heads
    dim = said.one("attention.key_length", usual)
    if said.one("attention.value_length", dim if said.has("attention.key_length") else usual) != dim:
        raise said.refused("attention.value_length", f"is not the {dim} of a key")
    if head_dim:
        settings.put("head_dim", dim, "attention.key_length")
    elif dim != usual:
        raise said.refused("attention.key_length", f"is not the model's width over its heads, {usual}")


def put_usual(said: Said, settings: Settings) -> None:
    """Heads of any size, all of them rotated."""
    put_heads(said, settings)
    put_rotation(said, settings)


def put_heads_as_rotated(said: Said, settings: Settings) -> None:
    """As `put_heads`, for files that say a head's size by how much of it is rotated."""
    put_heads(said, settings)
    if not said.has("attention.key_length") and said.has("rope.dimension_count"):
        settings.put("head_dim", said.one("rope.dimension_count"), "rope.dimension_count")


def put_layers_that_compute(said: Said, settings: Settings) -> None:
    """Leave blocks that predict further tokens out: they lie behind those that compute, and the model has none."""
    predicting = said.one("nextn_predict_layers", 0)
    settings.put("num_hidden_layers", settings["num_hidden_layers"] - predicting, "block_count")


def put_experts(said: Said, settings: Settings, count: str, *, width: str | None = "moe_intermediate_size") -> None:
    """Put how many experts there are, by the model's own name of the setting, how many are chosen, and their width."""
    settings.copy(count, "expert_count")
    settings.copy("num_experts_per_tok", "expert_used_count")
    if width is not None:
        settings.copy(width, "expert_feed_forward_length")
    for suffix in ("expert_group_count", "expert_group_used_count"):
        if said.one(suffix, 1) > 1:
            raise said.refused(suffix, "divides the experts into groups, and this model's are not")
