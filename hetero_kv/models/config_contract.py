"""Checks that the numbers of a `config.json` are possible for a model, before anything is allocated."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils import cached_file

from hetero_kv.errors import shown
from hetero_kv.models.errors import ModelError

#: Limit on a configuration's size; the largest in use have some 100 KiB, mostly labels.
MOST_BYTES = 16 << 20
_MOST_DEPTH = 16
#: The most weights per byte of a checkpoint: one bit each.
_MOST_IN_A_BYTE = 8

#: Inclusive bounds by key, with its names in architectures; a number, or a list with one per layer, which may have 0.
INTEGER_BOUNDS = {
    ("num_hidden_layers", "n_layer", "num_layers", "n_layers"): (1, 1024),
    ("num_attention_heads", "n_head", "n_heads"): (1, 4096),
    ("num_key_value_heads", "num_kv_heads", "n_head_kv"): (1, 4096),
    ("hidden_size", "n_embd", "d_model"): (1, 1 << 17),
    ("head_dim", "v_head_dim", "qk_nope_head_dim"): (1, 1 << 14),
    ("qk_rope_head_dim", "kv_lora_rank", "q_lora_rank"): (0, 1 << 14),
    ("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner"): (0, 1 << 20),
    ("vocab_size",): (1, 1 << 22),
    ("max_position_embeddings", "n_positions", "max_sequence_length"): (1, 1 << 27),
    ("sliding_window",): (0, 1 << 31),
    ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"): (0, 4096),
}
_INTEGER_BOUNDS = {name: bounds for names, bounds in INTEGER_BOUNDS.items() for name in names}
#: Exclusive bounds by key.
FLOAT_BOUNDS = {
    ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"): (0.0, 1.0),
    ("rope_theta", "rope_local_base_freq", "rotary_emb_base"): (0.0, 1e12),
    ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"): (0.0, 1e6),
}
#: Exclusive bounds for RoPE parameters (`rope_parameters`, `rope_scaling`, or one of them per kind of layer).
ROPE_BOUNDS = {
    ("rope_theta",): (0.0, 1e12),
    ("factor", "short_mscale", "long_mscale", "mscale", "mscale_all_dim", "attention_factor"): (0.0, 1e6),
    ("original_max_position_embeddings",): (0.0, float(1 << 27)),
    ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"): (0.0, 1e6),
    ("partial_rotary_factor",): (0.0, 1.0000001),
    ("short_factor", "long_factor"): (0.0, 1e6),
}
_FLOAT_BOUNDS, _ROPE_BOUNDS = (
    {name: bounds for names, bounds in table.items() for name in names} for table in (FLOAT_BOUNDS, ROPE_BOUNDS)
)
#: Keys that may be zero, which means unused.
_MAY_BE_ZERO = frozenset({"mscale", "mscale_all_dim", "beta_slow"})
#: Keys that may be infinite: limits of time steps in state-space models.
_MAY_BE_INFINITE = frozenset({"time_step_limit"})


def require_possible_config(origin: str | os.PathLike[str], *, local_files_only: bool = False) -> None:
    """Check the `config.json` of a directory or hub id, or a file with such content.

    Raises ModelError, which names the file, the key and the value, for a number that no model has. If the file cannot
    be read, the exceptions of transformers pass through.
    """
    path = origin if os.path.isfile(origin) else cached_file(origin, "config.json", local_files_only=local_files_only)
    size = os.path.getsize(path)
    if size > MOST_BYTES:
        raise ModelError(
            f"{str(path)!r} has {size:,} bytes, and a configuration may have {MOST_BYTES:,}; give the one that "
            "belongs to the weights"
        )
    content, _ = PretrainedConfig.get_config_dict(origin, local_files_only=local_files_only)
    for problem in _problems(content, "", _MOST_DEPTH):
        raise ModelError(f"{str(path)!r}: {problem}; give the configuration that belongs to the weights")


def require_weights(folder: str | os.PathLike[str], config: Any, trust_remote_code: bool) -> None:
    """Raise ModelError for a configuration with far more parameters than the weights in its folder.

    Loading would allocate the missing parameters.
    """
    files = [path for kind in ("*.safetensors", "*.bin", "*.pt") for path in Path(folder).glob(kind)]
    stored = sum(path.stat().st_size for path in files)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    most = stored * (_MOST_IN_A_BYTE if getattr(config, "quantization_config", None) else 1)
    if stored and parameters > most:
        raise ModelError(
            f"{str(Path(folder) / 'config.json')!r} describes a model with {parameters:,} parameters, and the weights "
            f"in its folder have {stored:,} bytes; give the configuration that belongs to the weights"
        )


def _problems(part: Mapping[str, Any], where: str, levels: int) -> Iterator[str]:
    """Describes the faults of a configuration and of its nested ones (`text_config`)."""
    for key, value in part.items():
        name = f"{where}{key}"
        if key in _INTEGER_BOUNDS:
            yield from _integer_problems(name, value, *_INTEGER_BOUNDS[key])
        elif key in _FLOAT_BOUNDS:
            yield from _float_problems(name, value, *_FLOAT_BOUNDS[key])
        elif key in ("rope_parameters", "rope_scaling"):
            yield from _rope_problems(name, value)
        elif key not in _MAY_BE_INFINITE:
            yield from _finite_problems(name, value, levels)
        if isinstance(value, dict) and key.endswith("_config"):
            if not levels:
                yield f"{name} is nested more than {_MOST_DEPTH} deep"
                return
            yield from _problems(value, f"{name}.", levels - 1)
    heads, kv_heads = part.get("num_attention_heads"), part.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        yield f"{where}num_attention_heads is {heads}, which {where}num_key_value_heads, {kv_heads}, does not divide"


def _integer_problems(name: str, value: Any, least: int, most: int) -> Iterator[str]:
    for each in value if isinstance(value, list) else [value]:
        lowest = 0 if isinstance(value, list) else least
        if each is not None and (type(each) is not int or not lowest <= each <= most):
            yield f"{name} is {shown(each, 80)}; it must be a whole number from {lowest:,} to {most:,}"


def _float_problems(name: str, value: Any, least: float, most: float) -> Iterator[str]:
    if value is not None and not (_is_number(value) and least < value < most):
        yield f"{name} is {shown(value, 80)}; it must be a number between {least:g} and {most:g}"


def _rope_problems(name: str, value: Any) -> Iterator[str]:
    if value is None:
        return
    if not isinstance(value, dict):
        yield f"{name} is {shown(value, 80)}; it must map names to RoPE parameters"
        return
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _rope_problems(f"{name}.{key}", inner)
        elif key in ("rope_type", "type") and not isinstance(inner, str):
            yield f"{name}.{key} is {shown(inner, 80)}; it must be text"
        elif key in _ROPE_BOUNDS and not (key in _MAY_BE_ZERO and inner == 0):
            for each in inner if isinstance(inner, list) else [inner]:
                yield from _float_problems(f"{name}.{key}", each, *_ROPE_BOUNDS[key])
        else:
            yield from _finite_problems(f"{name}.{key}", inner, _MOST_DEPTH)


def _finite_problems(name: str, value: Any, levels: int) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{name} is {value}; it must be finite"
    elif isinstance(value, list) and levels:
        for each in value:
            yield from _finite_problems(name, each, levels - 1)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 63
