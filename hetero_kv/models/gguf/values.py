"""What values the keys of a GGUF file have that mean something to a model: their types and ranges, in one place.

Keys stand without the architecture's name. Types are those that llama.cpp reads them as (`src/llama-model.cpp` of
https://github.com/ggml-org/llama.cpp); whole numbers may have any size and sign.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from hetero_kv.models.gguf.header import ARRAY, BOOL, FLOATS, INTEGERS, STRING, MetadataValue, UnsoundError


class Whole(NamedTuple):
    """A whole number, or one for each block where `per_block`, from `least` to `most`."""

    least: int
    most: int
    per_block: bool = False


WHOLE = {
    "block_count": Whole(1, 1024),
    "context_length": Whole(1, 1 << 27),
    "embedding_length": Whole(1, 1 << 17),
    "feed_forward_length": Whole(0, 1 << 20, per_block=True),
    "vocab_size": Whole(1, 1 << 22),
    "pooling_type": Whole(0, 16),
    "leading_dense_block_count": Whole(0, 1024),
    "nextn_predict_layers": Whole(0, 1024),
    "interleave_moe_layer_step": Whole(1, 1024),
    "full_attention_interval": Whole(1, 1024),
    "expert_count": Whole(0, 4096),
    "expert_used_count": Whole(0, 4096),
    "expert_shared_count": Whole(0, 4096),
    "expert_group_count": Whole(0, 4096),
    "expert_group_used_count": Whole(0, 4096),
    "expert_gating_func": Whole(0, 16),
    "expert_feed_forward_length": Whole(0, 1 << 20),
    "expert_shared_feed_forward_length": Whole(0, 1 << 20),
    "rope.dimension_count": Whole(0, 1 << 14),
    "rope.scaling.original_context_length": Whole(0, 1 << 27),
    "attention.head_count": Whole(0, 4096, per_block=True),
    "attention.head_count_kv": Whole(0, 4096, per_block=True),
    "attention.key_length": Whole(1, 1 << 14),
    "attention.value_length": Whole(1, 1 << 14),
    "attention.sliding_window": Whole(0, 1 << 31),
    "shortconv.l_cache": Whole(1, 1 << 14),
    "ssm.conv_kernel": Whole(1, 1 << 14),
    "ssm.inner_size": Whole(1, 1 << 20),
    "ssm.state_size": Whole(1, 1 << 14),
    "ssm.group_count": Whole(1, 4096),
    "ssm.time_step_rank": Whole(1, 1 << 14),
}
#: From and to, both left out.
OPEN_RANGES = {
    "attention.layer_norm_rms_epsilon": (0.0, 1.0),
    "attention.layer_norm_epsilon": (0.0, 1.0),
    "rope.freq_base": (0.0, 1e12),
    "rope.freq_base_swa": (0.0, 1e12),
}
#: From and to; 0 mostly stands for none.
RANGES = {
    "attn_logit_softcapping": (0.0, 1e6),
    "final_logit_softcapping": (0.0, 1e6),
    "attention.clamp_kqv": (0.0, math.inf),
    "attention.scale": (-math.inf, math.inf),
    "attention.temperature_scale": (-math.inf, math.inf),
    "embedding_scale": (-math.inf, math.inf),
    "residual_scale": (-math.inf, math.inf),
    "logit_scale": (-math.inf, math.inf),
    "expert_weights_scale": (-math.inf, math.inf),
    "rope.scale_linear": (0.0, 1e6),
    "rope.scaling.factor": (0.0, 1e6),
    "rope.scaling.attn_factor": (-math.inf, math.inf),
    "rope.scaling.alpha": (-math.inf, math.inf),
    "rope.scaling.yarn_ext_factor": (-math.inf, math.inf),
    "rope.scaling.yarn_attn_factor": (0.0, 1e6),
    "rope.scaling.yarn_beta_fast": (0.0, 1e6),
    "rope.scaling.yarn_beta_slow": (0.0, 1e6),
    "rope.scaling.yarn_log_multiplier": (-math.inf, math.inf),
}
TRUTH = frozenset({
    "attention.causal",
    "expert_weights_norm",
    "rope.scaling.finetuned",
    "ssm.dt_b_c_rms",
    "use_parallel_residual",
})  # fmt: skip
TEXT = frozenset({"rope.scaling.type", "tensor_data_layout"})
#: Arrays of whole numbers or truth values; the first of these may be one whole number as well.
LISTS = ("attention.sliding_window_pattern", "attention.recurrent_layers", "rope.dimension_sections")
#: What may be infinite: where Gemma 3n keeps all activations, their least is minus infinity.
MAY_BE_INFINITE = (".activation_sparsity_scale",)


def check_values(metadata: Mapping[str, MetadataValue], architecture: str) -> None:
    """Raise UnsoundError where a key behind `architecture` has a value of another type, or beyond what it can be."""
    blocks = metadata.get(f"{architecture}.block_count")
    for suffix, whole in WHOLE.items():
        check_whole(metadata, f"{architecture}.{suffix}", whole, None if blocks is None else blocks.value)
    for key, entry in metadata.items():
        suffix = key.removeprefix(f"{architecture}.")
        if suffix == key:
            continue
        if suffix in OPEN_RANGES:
            least, most = OPEN_RANGES[suffix]
            _require(_is_float(entry) and least < entry.value < most, key, entry, _between(least, most))
        elif suffix in RANGES:
            least, most = RANGES[suffix]
            fits = _is_float(entry) and (not math.isfinite(entry.value) or least <= entry.value <= most)
            _require(fits, key, entry, _between(least, most))
        elif suffix in TRUTH:
            _require(entry.types == (BOOL,), key, entry, "true or false")
        elif suffix in TEXT:
            _require(entry.types == (STRING,), key, entry, "a text")
        elif suffix in LISTS:
            is_one = suffix == LISTS[0] and len(entry.types) == 1 and entry.types[0] in INTEGERS
            is_list = entry.types[0] == ARRAY and entry.types[-1] in INTEGERS | {BOOL}
            _require(is_one or is_list, key, entry, "an array of whole numbers or of true and false")
    check_finite(metadata, f"{architecture}.")


def check_whole(metadata: Mapping[str, MetadataValue], key: str, whole: Whole, blocks: Any) -> None:
    """Raise UnsoundError where a key is there and no such whole number; `blocks`: how many blocks there are."""
    entry = metadata.get(key)
    if entry is None:
        return
    is_array = entry.types[0] == ARRAY
    values = entry.value if is_array else (entry.value,)
    if entry.types[-1] not in INTEGERS or (is_array and not whole.per_block):
        raise UnsoundError(f"{key} is {shown_entry(entry)}; it is a whole number")
    if is_array and len(values) != blocks:
        raise UnsoundError(f"{key} has {len(values):,} numbers; it is one, or one for each of {blocks} blocks")
    beyond = [value for value in values if not whole.least <= value <= whole.most]
    if beyond:
        raise UnsoundError(f"{key} is {beyond[0]:,}; it is from {whole.least:,} to {whole.most:,}")


def check_finite(metadata: Mapping[str, MetadataValue], prefix: str) -> None:
    """Raise UnsoundError where a number of a key with this beginning is infinite or NaN."""
    for key, entry in metadata.items():
        if key.startswith(prefix) and not key.endswith(MAY_BE_INFINITE) and entry.types[-1] in FLOATS:
            values = entry.value if entry.types[0] == ARRAY else (entry.value,)
            _require(all(map(math.isfinite, values)), key, entry, "finite")


def shown_entry(entry: MetadataValue) -> str:
    """A value as it stands in an error."""
    if entry.types[0] == ARRAY:
        return f"an array of {len(entry.value):,}"
    text = repr(entry.value.decode(errors="replace") if isinstance(entry.value, bytes) else entry.value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _require(fits: bool, key: str, entry: MetadataValue, what: str) -> None:
    if not fits:
        raise UnsoundError(f"{key} is {shown_entry(entry)}; it is {what}")


def _is_float(entry: MetadataValue) -> bool:
    return len(entry.types) == 1 and entry.types[0] in FLOATS


def _between(least: float, most: float) -> str:
    if math.isinf(most):
        return "a finite number" if math.isinf(least) else f"a finite number from {least:g}"
    return f"a number between {least:g} and {most:g}"
