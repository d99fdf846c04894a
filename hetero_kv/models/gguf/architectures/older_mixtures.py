"""Mixtures of experts of 2024: DBRX and Phi 3.5 MoE.

Sources: `conversion/dbrx.py`, `phi.py` and `src/models/` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import math

from hetero_kv.models.gguf.architectures.common import (
    ATTENTION,
    MODEL,
    RMS_NORM,
    SIZES,
    put_experts,
    put_heads,
)
from hetero_kv.models.gguf.architectures.declaration import (
    Architecture,
    ConfigSettings,
    MetadataReader,
    ParameterPlace,
    Places,
)
from hetero_kv.models.gguf.architectures.inverse_transforms import InverseTransform
from hetero_kv.models.gguf.architectures.rope import put_rope
from hetero_kv.models.gguf.architectures.sliding_windows import WINDOW
from hetero_kv.models.gguf.architectures.ungated import require_same_clamp

ATTENTION_FACTOR = "rope.scaling.attn_factor"
#: The factor of attention of Phi 3.5 MoE, for its context and the one that it was first trained for. Its file has the
#: factor of Phi 3 instead.
FACTOR_OF_PHI_MOE, CONTEXTS_OF_PHI_MOE = 1.243163121016122, (131_072, 4096)


def _dbrx(metadata: MetadataReader, settings: ConfigSettings) -> None:
    heads = settings["n_heads"]
    groups = metadata.scalar("attention.head_count_kv", heads)
    settings.values |= {"num_attention_heads": heads, "hidden_size": settings["d_model"]}
    put_rope(metadata, settings)
    metadata.expect("attention.layer_norm_epsilon", 1e-5, "is not the model's 0.00001")
    clamp = metadata.require("attention.clamp_kqv", "clip_qkv")
    if not clamp:
        raise metadata.unsupported("attention.clamp_kqv", "is no clamp, and the model has one")
    require_same_clamp(metadata, clamp)
    base = settings["rope_parameters"]["rope_theta"]
    settings.put("attn_config", {"kv_n_heads": groups, "clip_qkv": clamp, "rope_theta": base})
    experts = {
        "ffn_hidden_size": metadata.require("feed_forward_length", "ffn_hidden_size"),
        "moe_num_experts": metadata.require("expert_count", "moe_num_experts"),
        "moe_top_k": metadata.require("expert_used_count", "moe_top_k"),
        # llama.cpp divides the weights of chosen experts by their sum.
        "moe_normalize_expert_weights": 1.0,
    }
    settings.put("ffn_config", {"hidden_size": settings["d_model"], **experts})


def _phimoe(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings, head_dim=False)
    put_rope(metadata, settings)
    rope, stated = settings["rope_parameters"], settings.from_file["rope_parameters"][1]
    if rope["rope_type"] == "longrope":
        _put_attention_factors(metadata, settings)
        stated.pop("attention_factor", None)
    put_experts(metadata, settings, "num_local_experts", width=None)
    settings.put("sliding_window", metadata.scalar(WINDOW, 0) or None, WINDOW)
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))
    settings.put("lm_head_bias", "output.bias" in metadata.file.tensor_names)


def _put_attention_factors(metadata: MetadataReader, settings: ConfigSettings) -> None:
    rope = settings["rope_parameters"]
    context, original = settings["max_position_embeddings"], rope["original_max_position_embeddings"]
    known = getattr(metadata.config, "rope_parameters", None) or {}
    if (context, original) == CONTEXTS_OF_PHI_MOE:
        known = dict.fromkeys(("short_mscale", "long_mscale"), FACTOR_OF_PHI_MOE) | known
    if "short_mscale" not in known:
        raise metadata.unsupported(
            "context_length", "is not that of Phi 3.5 MoE, and the file does not say by what the model scales attention"
        )
    times = context / original
    usual = math.sqrt(1 + math.log(times) / math.log(original)) if times > 1 else 1.0
    metadata.expect(ATTENTION_FACTOR, usual, f"is not the {usual:.4g} of its converter")
    rope.pop("attention_factor", None)
    rope |= {name: known[name] for name in ("short_mscale", "long_mscale")}


#: Experts in one matrix, [experts × outputs, inputs]; those that lead back have outputs and inputs exchanged.
_BELOW_EACH_OTHER = InverseTransform(numbers=lambda numbers: numbers.reshape(-1, numbers.shape[2]))
_EXCHANGED = InverseTransform(numbers=lambda numbers: numbers.swapaxes(1, 2).reshape(-1, numbers.shape[1]))
_DBRX: Places = {
    "attn_norm": "norm_attn_norm.norm_1",
    "attn_qkv": "norm_attn_norm.attn.Wqkv",
    "attn_output": "norm_attn_norm.attn.out_proj",
    "attn_output_norm": "norm_attn_norm.norm_2",
    "ffn_gate_inp": "ffn.router.layer",
    "ffn_gate_exps.weight": ParameterPlace("ffn.experts.mlp.w1", _BELOW_EACH_OTHER),
    "ffn_up_exps.weight": ParameterPlace("ffn.experts.mlp.v1", _BELOW_EACH_OTHER),
    "ffn_down_exps.weight": ParameterPlace("ffn.experts.mlp.w2", _EXCHANGED),
}

TABLES = (
    Architecture(
        "dbrx",
        ("dbrx",),
        {
            "block_count": "n_layers",
            "context_length": "max_seq_len",
            "embedding_length": "d_model",
            "attention.head_count": "n_heads",
        },
        {"token_embd": "wte", "output_norm": "norm_f", "output": "/lm_head"},
        _DBRX,
        _dbrx,
    ),
    Architecture(
        "phimoe", ("phimoe",), {**SIZES, **RMS_NORM}, MODEL, {**ATTENTION, "ffn_gate_inp": "mlp.router"}, _phimoe
    ),
)
