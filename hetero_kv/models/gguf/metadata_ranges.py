"""The types and ranges of the GGUF metadata keys that affect a model.

Keys are without the architecture's name. The types are llama.cpp's (`src/llama-model.cpp` of
https://github.com/ggml-org/llama.cpp); integers may be of any width, signed or unsigned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from hetero_kv.models.gguf.header import ARRAY, BOOL, FLOATS, INTEGERS, STRING, MalformedHeaderError, MetadataValue


class IntegerRange(NamedTuple):
    """An integer from `minimum` to `maximum`; with `per_block` also an array with one per block."""

    minimum: int
    maximum: int
    per_block: bool = False


INTEGER_RANGES = {
    "block_count": IntegerRange(1, 1024),
    "context_length": IntegerRange(1, 1 << 27),
    "embedding_length": IntegerRange(1, 1 << 17),
    "feed_forward_length": IntegerRange(0, 1 << 20, per_block=True),
    "vocab_size": IntegerRange(1, 1 << 22),
    "pooling_type": IntegerRange(0, 16),
    "leading_dense_block_count": IntegerRange(0, 1024),
    "nextn_predict_layers": IntegerRange(0, 1024),
    "interleave_moe_layer_step": IntegerRange(1, 1024),
    "full_attention_interval": IntegerRange(1, 1024),
    "expert_count": IntegerRange(0, 4096),
    "expert_used_count": IntegerRange(0, 4096),
    "expert_shared_count": IntegerRange(0, 4096),
    "expert_group_count": IntegerRange(0, 4096),
    "expert_group_used_count": IntegerRange(0, 4096),
    "expert_gating_func": IntegerRange(0, 16),
    "expert_feed_forward_length": IntegerRange(0, 1 << 20),
    "expert_shared_feed_forward_length": IntegerRange(0, 1 << 20),
    "moe_latent_size": IntegerRange(0, 1 << 17),
    "rope.dimension_count": IntegerRange(0, 1 << 14),
    "rope.scaling.original_context_length": IntegerRange(0, 1 << 27),
    "attention.head_count": IntegerRange(0, 4096, per_block=True),
    "attention.head_count_kv": IntegerRange(0, 4096, per_block=True),
    "attention.key_length": IntegerRange(1, 1 << 14),
    "attention.value_length": IntegerRange(1, 1 << 14),
    "attention.key_length_swa": IntegerRange(1, 1 << 14),
    "attention.value_length_swa": IntegerRange(1, 1 << 14),
    "attention.shared_kv_layers": IntegerRange(0, 1024),
    "embedding_length_per_layer_input": IntegerRange(0, 1 << 17),
    "altup.active_idx": IntegerRange(0, 15),
    "altup.num_inputs": IntegerRange(1, 16),
    "rope.dimension_count_swa": IntegerRange(0, 1 << 14),
    "attention.key_length_mla": IntegerRange(1, 1 << 14),
    "attention.value_length_mla": IntegerRange(1, 1 << 14),
    "attention.key_length_mla_swa": IntegerRange(1, 1 << 14),
    "attention.value_length_mla_swa": IntegerRange(1, 1 << 14),
    "attention.q_lora_rank": IntegerRange(1, 1 << 17),
    "attention.kv_lora_rank": IntegerRange(1, 1 << 17),
    "attention.kv_lora_rank_swa": IntegerRange(1, 1 << 17),
    "attention.output_group_count": IntegerRange(1, 4096),
    "attention.output_lora_rank": IntegerRange(1, 1 << 17),
    "attention.sliding_window": IntegerRange(0, 1 << 31),
    "attention.temperature_length": IntegerRange(1, 1 << 27),
    "attention.indexer.head_count": IntegerRange(1, 4096),
    "attention.indexer.key_length": IntegerRange(1, 1 << 14),
    "attention.indexer.top_k": IntegerRange(1, 1 << 27),
    "attention.indexer.block_size": IntegerRange(1, 1 << 20),
    "attention.indexer.local_blocks": IntegerRange(0, 1 << 20),
    "hash_layer_count": IntegerRange(0, 1024),
    "hrm.layers_per_stack": IntegerRange(1, 512),
    "hrm.h_cycles": IntegerRange(1, 64),
    "hrm.l_cycles": IntegerRange(1, 64),
    "hyper_connection.count": IntegerRange(2, 64),
    "hyper_connection.low_rank": IntegerRange(1, 1 << 17),
    "hyper_connection.sinkhorn_iterations": IntegerRange(1, 1024),
    "ple.ngram_size": IntegerRange(2, 8),
    "ple.heads_per_ngram": IntegerRange(1, 64),
    "ple.conv_kernel": IntegerRange(1, 1 << 10),
    "ple.eos_token_id": IntegerRange(0, 1 << 22),
    "kda.head_dim": IntegerRange(1, 1 << 14),
    "shortconv.l_cache": IntegerRange(1, 1 << 14),
    "ssm.conv_kernel": IntegerRange(1, 1 << 14),
    "ssm.inner_size": IntegerRange(1, 1 << 20),
    "ssm.state_size": IntegerRange(1, 1 << 14),
    "ssm.group_count": IntegerRange(1, 4096),
    "ssm.time_step_rank": IntegerRange(1, 1 << 14),
}
#: Exclusive bounds.
EXCLUSIVE_RANGES = {
    "attention.layer_norm_rms_epsilon": (0.0, 1.0),
    "attention.layer_norm_epsilon": (0.0, 1.0),
    "hyper_connection.epsilon": (0.0, 1.0),
    "rope.freq_base": (1.0, 1e12),
    "rope.freq_base_swa": (1.0, 1e12),
    "attention.compress_rope_freq_base": (1.0, 1e12),
    "rope.scaling.yarn_beta_fast": (0.0, 1e6),
    "rope.scaling.yarn_beta_slow": (0.0, 1e6),
}
#: The smallest and the largest magnitude of a number in `RANGES` but 0: no more than float32 computes with.
MAGNITUDES = (1e-9, 1e9)
#: Inclusive bounds; 0 often means "none".
RANGES = {
    "attn_logit_softcapping": (0.0, 1e6),
    "final_logit_softcapping": (0.0, 1e6),
    "attention.clamp_kqv": (0.0, math.inf),
    "attention.max_alibi_bias": (0.0, 1e6),
    "attention.value_scale": (-math.inf, math.inf),
    "attention.scale": (0.0, 1e6),
    "attention.temperature_scale": (-math.inf, math.inf),
    "embedding_scale": (-math.inf, math.inf),
    "residual_scale": (-math.inf, math.inf),
    "hyper_connection.magnitude": (-math.inf, math.inf),
    "kda.gate_lower_bound": (-1e6, 0.0),
    "logit_scale": (-math.inf, math.inf),
    "expert_weights_scale": (-math.inf, math.inf),
    "rope.scale_linear": (0.0, 1e6),
    "rope.scaling.factor": (0.0, 1e6),
    "rope.scaling.attn_factor": (-math.inf, math.inf),
    "rope.scaling.alpha": (-math.inf, math.inf),
    "rope.scaling.yarn_ext_factor": (-math.inf, math.inf),
    "rope.scaling.yarn_attn_factor": (0.0, 1e6),
    "rope.scaling.yarn_log_multiplier": (-math.inf, math.inf),
}
BOOLEANS = frozenset({
    "attention.causal",
    "expert_weights_norm",
    "hrm.prefix_lm",
    "kda.safe_gate",
    "rope.scaling.finetuned",
    "ssm.dt_b_c_rms",
    "use_parallel_residual",
})  # fmt: skip
STRINGS = frozenset({"rope.scaling.type", "tensor_data_layout"})
#: Keys of arrays of integers or booleans; the first may also be a single integer.
LISTS = (
    "attention.sliding_window_pattern",
    "attention.recurrent_layers",
    "attention.rope_pattern",
    "attention.indexer.types",
    "attention.compress_ratios",
    "rope.dimension_sections",
    "ple.layers",
    "ple.layer_multipliers",
    "ple.head_offsets",
    "ple.head_vocab_sizes",
)
#: Keys of arrays of numbers.
FLOAT_LISTS = ("activation_sparsity_scale", "swiglu_clamp_exp", "swiglu_clamp_shexp")
#: Beginning of the keys of xIELU, which have no architecture's name.
ACTIVATION = "xielu."
#: Suffix of a key that may be infinite: Gemma 3n writes minus infinity for layers that keep all activations.
MAY_BE_INFINITE = (".activation_sparsity_scale",)


def check_values(metadata: Mapping[str, MetadataValue], architecture: str) -> None:
    """Raise MalformedHeaderError if a key of `architecture` has a value of the wrong type, or out of range."""
    blocks = metadata.get(f"{architecture}.block_count")
    for suffix, allowed in INTEGER_RANGES.items():
        check_integer(metadata, f"{architecture}.{suffix}", allowed, None if blocks is None else blocks.value)
    for key, entry in metadata.items():
        suffix = key.removeprefix(f"{architecture}.")
        if suffix == key:
            continue
        if suffix in EXCLUSIVE_RANGES:
            minimum, maximum = EXCLUSIVE_RANGES[suffix]
            _require(_is_float(entry) and minimum < entry.value < maximum, key, entry, _between(minimum, maximum))
        elif suffix in RANGES:
            minimum, maximum = RANGES[suffix]
            fits = _is_float(entry) and (not math.isfinite(entry.value) or minimum <= entry.value <= maximum)
            _require(fits, key, entry, _between(minimum, maximum))
            least, most = MAGNITUDES
            fits = entry.value == 0 or not math.isfinite(entry.value) or least <= abs(entry.value) <= most
            _require(fits, key, entry, f"0, or of a magnitude from {least:g} to {most:g}")
        elif suffix in BOOLEANS:
            _require(entry.types == (BOOL,), key, entry, "true or false")
        elif suffix in STRINGS:
            _require(entry.types == (STRING,), key, entry, "text")
        elif suffix in FLOAT_LISTS:
            _require(entry.types[0] == ARRAY and entry.types[-1] in FLOATS, key, entry, "an array of numbers")
        elif suffix in LISTS:
            is_one = suffix == LISTS[0] and len(entry.types) == 1 and entry.types[0] in INTEGERS
            is_list = entry.types[0] == ARRAY and entry.types[-1] in INTEGERS | {BOOL}
            _require(is_one or is_list, key, entry, "an array of whole numbers or of true and false")
    check_finite(metadata, f"{architecture}.")
    check_finite(metadata, ACTIVATION)


def check_integer(metadata: Mapping[str, MetadataValue], key: str, allowed: IntegerRange, blocks: Any) -> None:
    """Raise MalformedHeaderError if a key has a value outside `allowed`; `blocks` is the number of blocks."""
    entry = metadata.get(key)
    if entry is None:
        return
    is_array = entry.types[0] == ARRAY
    values = entry.value if is_array else (entry.value,)
    if entry.types[-1] not in INTEGERS or (is_array and not allowed.per_block):
        raise MalformedHeaderError(f"{key} is {shown_entry(entry)}; it must be a whole number")
    if is_array and len(values) != blocks:
        raise MalformedHeaderError(
            f"{key} has {len(values):,} numbers; it must be one, or one for each of {blocks} blocks"
        )
    beyond = [value for value in values if not allowed.minimum <= value <= allowed.maximum]
    if beyond:
        raise MalformedHeaderError(
            f"{key} is {beyond[0]:,}; it must be from {allowed.minimum:,} to {allowed.maximum:,}"
        )


def check_finite(metadata: Mapping[str, MetadataValue], prefix: str) -> None:
    """Raise MalformedHeaderError if a key with this prefix has an infinite number or NaN."""
    for key, entry in metadata.items():
        if key.startswith(prefix) and not key.endswith(MAY_BE_INFINITE) and entry.types[-1] in FLOATS:
            values = entry.value if entry.types[0] == ARRAY else (entry.value,)
            _require(all(map(math.isfinite, values)), key, entry, "finite")


def shown_entry(entry: MetadataValue) -> str:
    """A value as errors show it."""
    if entry.types[0] == ARRAY:
        return f"an array of {len(entry.value):,}"
    text = repr(entry.value.decode(errors="replace") if isinstance(entry.value, bytes) else entry.value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _require(fits: bool, key: str, entry: MetadataValue, what: str) -> None:
    if not fits:
        raise MalformedHeaderError(f"{key} is {shown_entry(entry)}; it must be {what}")


def _is_float(entry: MetadataValue) -> bool:
    return len(entry.types) == 1 and entry.types[0] in FLOATS


def _between(minimum: float, maximum: float) -> str:
    if math.isinf(maximum):
        return "a finite number" if math.isinf(minimum) else f"a finite number from {minimum:g}"
    return f"a number between {minimum:g} and {maximum:g}"
