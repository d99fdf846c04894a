"""Models with Mamba's state-space layers: Mamba 2, Falcon-H1, Jamba, Nemotron-H.

Sources: `conversion/mamba.py`, `falcon_h1.py`, `jamba.py`, `nemotron.py` and their files in `src/models/` of
https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.architectures.common import ATTENTION, GATED, MODEL, RMS_NORM, SIZES, put_heads
from hetero_kv.models.gguf.architectures.declaration import (
    Architecture,
    ConfigSettings,
    MetadataReader,
    ParameterPlace,
    Places,
)
from hetero_kv.models.gguf.architectures.deepseek import put_expert_groups
from hetero_kv.models.gguf.architectures.inverse_transforms import CONVOLUTION, FLAT, FLAT_LOGARITHM, LOGARITHM
from hetero_kv.models.gguf.architectures.rope import put_rope

KV_HEADS, WIDTH = "attention.head_count_kv", "feed_forward_length"


def mamba2_places(module: str) -> Places:
    """The places of a Mamba 2 layer, whose module is `module`."""
    return {
        "ssm_in": f"{module}.in_proj",
        "ssm_conv1d.weight": ParameterPlace(f"{module}.conv1d.weight", CONVOLUTION),
        "ssm_conv1d.bias": f"{module}.conv1d.bias",
        "ssm_dt.bias": f"{module}.dt_bias",
        "ssm_a": ParameterPlace(f"{module}.A_log", FLAT_LOGARITHM),
        "ssm_d": ParameterPlace(f"{module}.D", FLAT),
        "ssm_norm": ParameterPlace(f"{module}.norm", FLAT),
        "ssm_out": f"{module}.out_proj",
    }


def put_inner_size(metadata: MetadataReader, settings: ConfigSettings, expand: str, head_dim: str) -> None:
    """Put how many times wider the state-space layers are than the hidden size, and the dimension of their heads."""
    width, heads = settings["hidden_size"], metadata.require("ssm.time_step_rank", "num_heads")
    groups = metadata.require("ssm.group_count", "n_groups")
    inner = metadata.scalar("ssm.inner_size", 2 * width)
    if inner % width or inner % heads or inner % groups:
        raise metadata.unsupported("ssm.inner_size", f"does not fit {heads} heads and the hidden size {width}")
    settings.put(expand, inner // width, "ssm.inner_size")
    settings.put(head_dim, inner // heads, "ssm.inner_size")


def _mamba2(metadata: MetadataReader, settings: ConfigSettings) -> None:
    settings.copy("conv_kernel", "ssm.conv_kernel")
    settings.copy("state_size", "ssm.state_size")
    settings.copy("n_groups", "ssm.group_count")
    settings.copy("num_heads", "ssm.time_step_rank")
    put_inner_size(metadata, settings, "expand", "head_dim")
    settings.put("use_conv_bias", metadata.has_tensor("ssm_conv1d.bias"))
    settings.put("use_bias", metadata.has_tensor("ssm_in.bias"))


def _per_layer(metadata: MetadataReader, settings: ConfigSettings, suffix: str, default: int) -> list[int]:
    layers = settings["num_hidden_layers"]
    values = metadata.get(suffix, default)
    return list(values)[:layers] if isinstance(values, tuple | list) else [values] * layers


def _put_kv_heads(metadata: MetadataReader, settings: ConfigSettings) -> list[bool]:
    """Put the number of key heads; returns which layers attend: those with key heads."""
    heads = settings["num_attention_heads"]
    per_layer = _per_layer(metadata, settings, KV_HEADS, heads)
    attending = {count for count in per_layer if count}
    if len(attending) > 1 or any(heads % count for count in attending):
        raise metadata.unsupported(KV_HEADS, "differs between attention layers, or does not divide the heads")
    settings.put("num_key_value_heads", min(attending, default=heads), KV_HEADS)
    return [bool(count) for count in per_layer]


def _nemotron_h(metadata: MetadataReader, settings: ConfigSettings) -> None:
    predicting = metadata.scalar("nextn_predict_layers", 0)
    settings.put("num_hidden_layers", settings["num_hidden_layers"] - predicting, "block_count")
    attends = _put_kv_heads(metadata, settings)
    widths = _per_layer(metadata, settings, WIDTH, 0)
    experts = metadata.scalar("expert_count", 0)
    feeds = "moe" if experts else "mlp"
    kinds = [
        "full_attention" if attending else feeds if width else "linear_attention"
        for attending, width in zip(attends, widths, strict=True)
    ]
    settings.put("layer_types", kinds, KV_HEADS)
    found = {width for width in widths if width}
    if len(found) > 1:
        raise metadata.unsupported(
            WIDTH, "differs between layers that have a width, which this version does not compute"
        )
    dim = metadata.scalar("attention.key_length", settings["hidden_size"] // settings["num_attention_heads"])
    settings.put("head_dim", dim, "attention.key_length")
    metadata.expect("attention.value_length", dim, f"differs from the key's {dim}")
    metadata.expect(
        "attention.layer_norm_rms_epsilon", settings["layer_norm_epsilon"], "differs from layer_norm_epsilon"
    )
    _put_nemotron_mamba(metadata, settings)
    settings.put("mlp_bias", metadata.has_tensor("ffn_up.bias"))
    if not experts:
        metadata.expect("expert_used_count", 0, "chooses experts, and the file has none")
        settings.put("intermediate_size", min(found, default=1), WIDTH)
        return
    width = metadata.scalar("expert_feed_forward_length", min(found, default=0))
    settings.put("n_routed_experts", experts, "expert_count")
    settings.copy("num_experts_per_tok", "expert_used_count")
    settings.put("moe_intermediate_size", width, "expert_feed_forward_length")
    settings.copy("moe_shared_expert_intermediate_size", "expert_shared_feed_forward_length")
    settings.put("n_shared_experts", metadata.scalar("expert_shared_count", 1), "expert_shared_count")
    settings.put("norm_topk_prob", metadata.scalar("expert_weights_norm", False), "expert_weights_norm")
    settings.put("routed_scaling_factor", metadata.scalar("expert_weights_scale", 0.0) or 1.0, "expert_weights_scale")
    put_expert_groups(metadata, settings)
    settings.put("moe_latent_size", metadata.scalar("moe_latent_size", 0) or None, "moe_latent_size")


def _put_nemotron_mamba(metadata: MetadataReader, settings: ConfigSettings) -> None:
    settings.copy("conv_kernel", "ssm.conv_kernel")
    settings.copy("ssm_state_size", "ssm.state_size")
    settings.copy("n_groups", "ssm.group_count")
    settings.copy("mamba_num_heads", "ssm.time_step_rank")
    heads = settings["mamba_num_heads"]
    inner = metadata.require("ssm.inner_size", "intermediate_size")
    if inner % heads or inner % settings["n_groups"]:
        raise metadata.unsupported("ssm.inner_size", f"does not fit {heads} heads")
    settings.put("mamba_head_dim", inner // heads, "ssm.inner_size")
    settings.put("use_conv_bias", metadata.has_tensor("ssm_conv1d.bias"))
    settings.put("use_bias", metadata.has_tensor("ssm_in.bias"))


def _jamba(metadata: MetadataReader, settings: ConfigSettings) -> None:
    attends = _put_kv_heads(metadata, settings)
    layers = range(settings["num_hidden_layers"])
    period, offset = _regular(metadata, KV_HEADS, [layer for layer in layers if attends[layer]], len(layers))
    settings.put("attn_layer_period", period, KV_HEADS)
    settings.put("attn_layer_offset", offset, KV_HEADS)
    names = metadata.file.tensor_names
    mixed = [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" in names]
    period, offset = _regular(metadata, "expert_count", mixed, len(layers))
    settings.put("expert_layer_period", period)
    settings.put("expert_layer_offset", offset)
    settings.put("num_experts", metadata.scalar("expert_count", 1) if mixed else 1, "expert_count")
    if mixed:
        settings.copy("num_experts_per_tok", "expert_used_count")
    elif metadata.scalar("expert_count", 0) > 1:
        raise metadata.unsupported("expert_count", "are experts, and no layer of the file has any")
    else:
        metadata.get("expert_used_count")
    settings.copy("mamba_d_conv", "ssm.conv_kernel")
    settings.copy("mamba_d_state", "ssm.state_size")
    settings.copy("mamba_dt_rank", "ssm.time_step_rank")
    inner = metadata.scalar("ssm.inner_size", 2 * settings["hidden_size"])
    if inner % settings["hidden_size"]:
        raise metadata.unsupported("ssm.inner_size", "is not a multiple of the hidden size")
    settings.put("mamba_expand", inner // settings["hidden_size"], "ssm.inner_size")
    settings.put("mamba_conv_bias", metadata.has_tensor("ssm_conv1d.bias"))
    settings.put("mamba_proj_bias", metadata.has_tensor("ssm_in.bias"))


def _regular(metadata: MetadataReader, suffix: str, chosen: list[int], layers: int) -> tuple[int, int]:
    """The period and the offset of the layers `chosen`. Raises ModelError if they are not regular."""
    if not chosen:
        # Beyond the last layer.
        return layers + 1, layers
    period = chosen[1] - chosen[0] if len(chosen) > 1 else layers
    offset = chosen[0]
    if chosen != list(range(offset, layers, period)) or offset >= period:
        raise metadata.unsupported(suffix, f"belongs to the layers {chosen}, which do not repeat, as the model's do")
    return period, offset


def _falcon_h1(metadata: MetadataReader, settings: ConfigSettings) -> None:
    put_heads(metadata, settings)
    put_rope(metadata, settings)
    settings.copy("mamba_d_ssm", "ssm.inner_size")
    settings.copy("mamba_d_conv", "ssm.conv_kernel")
    settings.copy("mamba_d_state", "ssm.state_size")
    settings.copy("mamba_n_groups", "ssm.group_count")
    settings.copy("mamba_n_heads", "ssm.time_step_rank")
    inner, heads = settings["mamba_d_ssm"], settings["mamba_n_heads"]
    if inner % heads or inner % settings["mamba_n_groups"]:
        raise metadata.unsupported("ssm.inner_size", f"does not fit {heads} heads")
    settings.put("mamba_d_head", inner // heads, "ssm.inner_size")
    settings.put("mamba_conv_bias", metadata.has_tensor("ssm_conv1d.bias"))
    settings.put("mamba_proj_bias", metadata.has_tensor("ssm_in.bias"))
    settings.put("projectors_bias", metadata.has_tensor("ssm_out.bias"))
    settings.put("mamba_rms_norm", metadata.has_tensor("ssm_norm.weight"))
    # No key states it: llama.cpp gates before the norm, if there is one.
    settings.put("mamba_norm_before_gate", False)
    settings.put("attention_bias", metadata.has_tensor("attn_q.bias"))
    settings.put("mlp_bias", metadata.has_tensor("ffn_down.bias"))
    if "output.weight" not in metadata.file.tensor_names:
        raise ModelError(
            f"{str(metadata.file.path)!r} has no tensor output.weight: token_embd.weight is multiplied by the model's "
            "factor of embeddings, and that of the output is another, which no key states; give the model's directory "
            "or hub id in Hugging Face format"
        )
    # The converter multiplies the weights by them.
    for name in _FALCON_MULTIPLIERS:
        settings.put(name, 1.0, "block_count")
    for name, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
        settings.put(name, [1.0] * count, "block_count")


_FALCON_MULTIPLIERS = (
    "lm_head_multiplier",
    "embedding_multiplier",
    "key_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)
_MODEL_WITH_FINAL_NORM: Places = {**MODEL, "output_norm": "final_layernorm"}
_NEMOTRON_KEYS = {
    **{name: setting for name, setting in SIZES.items() if name != WIDTH},
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_NEMOTRON_MODEL: Places = {"token_embd": "embeddings", "output_norm": "norm_f", "output": "/lm_head"}
_NEMOTRON_LAYER: Places = {
    **mamba2_places("mixer"),
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_NO_ROTATION = {
    "rope.dimension_count": "the model does not rotate",
    "rope.scaling.finetuned": "the model does not rotate",
}

MAMBA2 = Architecture(
    "mamba2",
    ("mamba2",),
    {
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    },
    {"token_embd": "embeddings", "output_norm": "norm_f", "output": "/lm_head"},
    {"attn_norm": "norm", **mamba2_places("mixer")},
    _mamba2,
    without_effect={
        "context_length": "the model has no limit; llama.cpp writes a constant",
        "feed_forward_length": "the model has no MLP",
        "attention.head_count": "the model has no heads",
    },
)
NEMOTRON_H = Architecture(
    "nemotron_h",
    ("nemotron_h",),
    _NEMOTRON_KEYS,
    _NEMOTRON_MODEL,
    _NEMOTRON_LAYER,
    _nemotron_h,
    without_effect=_NO_ROTATION,
)
NEMOTRON_H_MOE = Architecture(
    "nemotron_h_moe",
    ("nemotron_h",),
    _NEMOTRON_KEYS,
    _NEMOTRON_MODEL,
    _NEMOTRON_LAYER,
    _nemotron_h,
    predicts=True,
    without_effect=_NO_ROTATION,
)
JAMBA = Architecture(
    "jamba",
    ("jamba",),
    {**SIZES, **RMS_NORM},
    _MODEL_WITH_FINAL_NORM,
    {
        **ATTENTION,
        "ffn_norm": "pre_ff_layernorm",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
        "ffn_gate_inp": "feed_forward.router",
        "ssm_in": "mamba.in_proj",
        "ssm_conv1d.weight": ParameterPlace("mamba.conv1d.weight", CONVOLUTION),
        "ssm_conv1d.bias": "mamba.conv1d.bias",
        "ssm_x": "mamba.x_proj",
        "ssm_dt": "mamba.dt_proj",
        "ssm_dt_norm": "mamba.dt_layernorm",
        "ssm_b_norm": "mamba.b_layernorm",
        "ssm_c_norm": "mamba.c_layernorm",
        "ssm_a": ParameterPlace("mamba.A_log", LOGARITHM),
        "ssm_d": "mamba.D",
        "ssm_out": "mamba.out_proj",
    },
    _jamba,
)
FALCON_H1 = Architecture(
    "falcon-h1",
    ("falcon_h1",),
    {**SIZES, **RMS_NORM},
    _MODEL_WITH_FINAL_NORM,
    {
        **ATTENTION,
        **{name: place.replace("mlp", "feed_forward") for name, place in GATED.items() if isinstance(place, str)},
        **mamba2_places("mamba"),
        "ffn_norm": "pre_ff_layernorm.weight",
    },
    _falcon_h1,
)

TABLES = (MAMBA2, NEMOTRON_H, NEMOTRON_H_MOE, JAMBA, FALCON_H1)
