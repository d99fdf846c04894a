"""Names of tensors that several architectures share."""

from __future__ import annotations

from tests.support.gguf_models import changes
from tests.support.gguf_models.changes import interleaved
from tests.support.gguf_models.layouts.layout import Place

MODEL: dict[str, Place] = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip
NORMS: dict[str, Place] = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
ATTENTION: dict[str, Place] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
HEAD_NORMS: dict[str, Place] = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
GATED: dict[str, Place] = {
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
MIXED: dict[str, Place] = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_up_proj": ("", changes.gate_and_up),
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
SHARED: dict[str, Place] = {
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}
USUAL_LAYER = {**NORMS, **ATTENTION, **GATED}
PERMUTED: dict[str, Place] = {
    "self_attn.q_proj": ("attn_q", interleaved("num_attention_heads")),
    "self_attn.k_proj": ("attn_k", interleaved("num_key_value_heads")),
}
AFTER_NORMS: dict[str, Place] = {
    "post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
HUNYUAN_NORMS: dict[str, Place] = {
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
}
