"""Gemma 4, whose layers differ: wide heads with full attention, and at the end layers with the keys of earlier ones.

Sources: `conversion/gemma.py` and `src/models/gemma4.cpp` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from typing import Any

from hetero_kv.models.gguf.architectures.common import ATTENTION, GATED, MODEL, NORMED_HEADS, RMS_NORM, SIZES
from hetero_kv.models.gguf.architectures.declaration import Architecture, ConfigSettings, MetadataReader
from hetero_kv.models.gguf.architectures.rope import DEFAULT_BASE
from hetero_kv.models.gguf.architectures.sliding_windows import PATTERN, WINDOW

FULL, SLIDING = "full_attention", "sliding_attention"
KEY, VALUE, KV_HEADS = "attention.key_length", "attention.value_length", "attention.head_count_kv"
SHARED = "attention.shared_kv_layers"
WIDTH = "feed_forward_length"
FACTORS = "rope_freqs.weight"
PER_LAYER_EMBEDDING = "per_layer_token_embd.weight"
#: The divisor of the frequency of a pair that is not rotated, as float32.
NOT_ROTATED = 1.0000000150474662e30


def _gemma4(metadata: MetadataReader, settings: ConfigSettings) -> None:
    _put_layers(metadata, settings)
    _put_heads(metadata, settings)
    _put_rope(metadata, settings)
    _put_widths(metadata, settings)
    settings.put(
        "final_logit_softcapping", metadata.scalar("final_logit_softcapping") or None, "final_logit_softcapping"
    )
    settings.copy("hidden_size_per_layer_input", "embedding_length_per_layer_input")
    if settings["num_kv_shared_layers"] and not settings["hidden_size_per_layer_input"]:
        raise metadata.unsupported(SHARED, "needs embeddings of each layer in transformers, and the file has none")
    rows = [tensor.shape[0] for tensor in metadata.file.tensors if tensor.name == PER_LAYER_EMBEDDING]
    if rows:
        settings.put("vocab_size_per_layer_input", rows[0])


def _put_layers(metadata: MetadataReader, settings: ConfigSettings) -> None:
    layers, pattern = settings["num_hidden_layers"], metadata.get(PATTERN)
    if not isinstance(pattern, tuple | list) or len(pattern) != layers:
        raise metadata.unsupported(PATTERN, f"has not one value for each of {layers} layers")
    kinds = [SLIDING if each else FULL for each in pattern]
    if kinds[-1] != FULL:
        raise metadata.unsupported(PATTERN, "has a window in the last layer, which has none in the model")
    settings.put("layer_types", kinds, PATTERN)
    settings.put("sliding_window", metadata.require(WINDOW, "sliding_window"), WINDOW)
    shared = metadata.scalar(SHARED, 0)
    if not 0 <= shared < layers or set(kinds) != set(kinds[: layers - shared]):
        raise metadata.unsupported(SHARED, "leaves a kind of layers without keys of its own")
    settings.put("num_kv_shared_layers", shared, SHARED)


def _put_heads(metadata: MetadataReader, settings: ConfigSettings) -> None:
    for key, name in ((KEY, "global_head_dim"), (f"{KEY}_swa", "head_dim")):
        if not metadata.has(key):
            raise metadata.unsupported(key, "does not say the size of heads")
        dim = metadata.scalar(key)
        # A configuration says it layer by layer, and tensors have its shape.
        settings.put(name, dim)
        metadata.expect(key.replace("key", "value"), dim, f"differs from the key's {dim}")
    layers, kinds = settings["num_hidden_layers"], settings["layer_types"]
    groups = metadata.get(KV_HEADS, settings["num_attention_heads"])
    per_layer = list(groups) if isinstance(groups, tuple | list) else [groups] * layers
    found = {kind: {count for each, count in zip(kinds, per_layer, strict=True) if each == kind} for kind in kinds}
    full = found[FULL]
    if any(len(counts) != 1 or settings["num_attention_heads"] % (min(counts) or 1) for counts in found.values()):
        raise metadata.unsupported(KV_HEADS, "differs between layers of one kind, or does not divide the heads")
    sliding = found.get(SLIDING, full)
    own = range(layers - settings["num_kv_shared_layers"])
    names = metadata.file.tensor_names
    is_key = any(kinds[layer] == FULL and f"blk.{layer}.attn_v.weight" not in names for layer in own)
    if sliding != full and not is_key:
        raise metadata.unsupported(KV_HEADS, "differs between layers that have values of their own")
    settings.put("num_key_value_heads", min(sliding))
    settings.put("attention_k_eq_v", is_key)
    settings.put("num_global_key_value_heads", min(full) if is_key else None)


def _put_rope(metadata: MetadataReader, settings: ConfigSettings) -> None:
    dims = {FULL: settings["global_head_dim"], SLIDING: settings["head_dim"]}
    for suffix, kind in (("rope.dimension_count", FULL), ("rope.dimension_count_swa", SLIDING)):
        metadata.expect(suffix, dims[kind], f"is not the {dims[kind]} of a head")
    factors = metadata.tensor(FACTORS) or [1.0] * (dims[FULL] // 2)
    rotated = factors.count(1.0)
    if factors != [1.0] * rotated + [NOT_ROTATED] * (dims[FULL] // 2 - rotated):
        raise metadata.unsupported("rope.dimension_count", f"has a tensor {FACTORS} that is no share of a head")
    bases = {FULL: "rope.freq_base", SLIDING: "rope.freq_base_swa"}
    base: dict[str, float] = {kind: float(metadata.scalar(key, DEFAULT_BASE)) for kind, key in bases.items()}
    share = 2 * rotated / dims[FULL]
    parameters: dict[str, dict[str, Any]] = {
        FULL: {
            "rope_type": "proportional",
            "rope_theta": base[FULL],
            "partial_rotary_factor": share,
        },
        SLIDING: {"rope_type": "default", "rope_theta": base[SLIDING]},
    }
    settings.values["rope_parameters"] = parameters
    stated = {kind: {"rope_theta": base[kind]} if metadata.has(key) else {} for kind, key in bases.items()}
    stated[FULL]["partial_rotary_factor"] = share
    settings.from_file["rope_parameters"] = (metadata.key("rope.*"), stated)


def _put_widths(metadata: MetadataReader, settings: ConfigSettings) -> None:
    layers, own = settings["num_hidden_layers"], settings["num_hidden_layers"] - settings["num_kv_shared_layers"]
    widths = metadata.get(WIDTH, getattr(metadata.config, "intermediate_size", None))
    if widths is None:
        widths = metadata.require(WIDTH, "intermediate_size")
    per_layer = list(widths) if isinstance(widths, tuple | list) else [widths] * layers
    is_double = len(set(per_layer)) > 1
    settings.put("use_double_wide_mlp", is_double, WIDTH)
    settings.put("intermediate_size", per_layer[0], WIDTH)
    if per_layer != [per_layer[0] * (1 + (is_double and layer >= own)) for layer in range(layers)]:
        raise metadata.unsupported(WIDTH, "is not doubled where layers have the keys of others")
    experts = metadata.scalar("expert_count", 0)
    settings.put("enable_moe_block", bool(experts), "expert_count")
    if experts:
        settings.copy("num_experts", "expert_count")
        settings.copy("top_k_experts", "expert_used_count")
        settings.copy("moe_intermediate_size", "expert_feed_forward_length")
    else:
        metadata.expect("expert_used_count", 0, "chooses experts, and the file has none")


GEMMA4 = Architecture(
    "gemma4",
    ("gemma4_text",),
    {name: setting for name, setting in {**SIZES, **RMS_NORM}.items() if name != WIDTH},
    {
        **MODEL,
        "per_layer_token_embd": "embed_tokens_per_layer",
        "per_layer_model_proj": "per_layer_model_projection",
        "per_layer_proj_norm": "per_layer_projection_norm",
    },
    {
        **ATTENTION,
        **NORMED_HEADS,
        **GATED,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "layer_output_scale.weight": "layer_scalar",
    },
    _gemma4,
    of_own_keys=frozenset({"attn_k.weight", "attn_v.weight", "attn_k_norm.weight"}),
)

TABLES = (GEMMA4,)
