"""Reads a file's rotary position embedding (RoPE) as transformers' `rope_parameters`.

Defaults for missing keys are llama.cpp's (`llama-model.cpp`, `load_hparams`): a factor without a type is linear, a
factor of 0 is no scaling, the base is 10,000.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.architectures.declaration import ConfigSettings, MetadataReader, same, shown

#: Tensors that belong to RoPE and not to a parameter.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
DEFAULT_BASE = 10_000.0
SCALING = "rope.scaling."
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
_NO_ROOM = "which transformers cannot express"


def put_rope(
    metadata: MetadataReader,
    settings: ConfigSettings,
    *,
    partial: bool = False,
    yarn: tuple[str, ...] = (),
    axes: bool = False,
    original: int | None = None,
) -> None:
    """Put `rope_parameters`; `head_dim`, or heads and hidden size, must be put before.

    Args:
        partial: whether the model can rotate a part of each head.
        yarn: further YaRN keys that the architecture reads, without `rope.scaling.`.
        axes: whether positions have several axes (M-RoPE), which are equal for text.
        original: the context for which factors of a long context are made, if the file does not say it.
    """
    parameters, stated = rope_parameters(
        metadata, head_dim_of(settings), partial=partial, yarn=yarn, axes=axes, original=original
    )
    settings.values["rope_parameters"] = parameters
    settings.from_file["rope_parameters"] = (
        metadata.key("rope.*"),
        {name: value for name, value in parameters.items() if name in stated},
    )


def head_dim_of(settings: ConfigSettings) -> int:
    """The dimension of a query head."""
    values = settings.values
    return int(values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"])


def rope_parameters(
    metadata: MetadataReader,
    head_dim: int,
    *,
    partial: bool = False,
    yarn: tuple[str, ...] = (),
    axes: bool = False,
    original: int | None = None,
) -> tuple[dict[str, Any], set[str]]:
    """Transformers' RoPE parameters, and the names of those that the file contains.

    Raises ModelError if transformers cannot express the file's RoPE.
    """
    parameters: dict[str, Any] = {"rope_theta": float(metadata.scalar("rope.freq_base", DEFAULT_BASE))}
    stated = {"rope_theta"} if metadata.has("rope.freq_base") else set()
    rotated = metadata.scalar("rope.dimension_count", head_dim)
    if rotated != head_dim and not (partial and 0 < rotated < head_dim and rotated % 2 == 0):
        raise metadata.unsupported(
            "rope.dimension_count", f"is not the head's {head_dim}, and this model rotates whole heads"
        )
    if rotated % 2:
        raise metadata.unsupported(
            "rope.dimension_count", f"rotates {rotated} dimensions of a head; RoPE needs an even number"
        )
    if partial:
        parameters["partial_rotary_factor"] = partial_factor(rotated, head_dim)
        if metadata.has("rope.dimension_count"):
            stated.add("partial_rotary_factor")
    _refuse_other_scalings(metadata, yarn, axes)
    kind, scaling = _scaling(metadata, parameters["rope_theta"], rotated, original)
    attention = metadata.scalar(f"{SCALING}attn_factor", 1.0)
    if kind == "yarn":
        scaling |= {name: _yarn_value(metadata, key) for key, name in _YARN.items() if metadata.has(SCALING + key)}
        if attention != 1:
            scaling["attention_factor"] = attention * (0.1 * math.log(scaling["factor"]) + 1)
    elif kind == "longrope":
        if metadata.has(f"{SCALING}attn_factor"):
            scaling["attention_factor"] = attention
    elif attention != 1:
        raise metadata.unsupported(f"{SCALING}attn_factor", f"scales queries and keys, {_NO_ROOM}")
    if scaling or metadata.has(f"{SCALING}type"):
        stated |= {"rope_type", *scaling}
    return {"rope_type": kind, **parameters, **scaling}, stated


def _yarn_value(metadata: MetadataReader, key: str) -> float:
    return float(metadata.scalar(SCALING + key))


def partial_factor(rotated: int, head_dim: int) -> float:
    """The `partial_rotary_factor` from which transformers computes exactly `rotated` dimensions."""
    share = rotated / head_dim
    return share if int(head_dim * share) == rotated else math.nextafter(share, 1)


def _refuse_other_scalings(metadata: MetadataReader, yarn: tuple[str, ...], axes: bool) -> None:
    metadata.get(f"{SCALING}finetuned")
    for key, allowed in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0), ("alpha", 0.0)):
        if key not in yarn:
            metadata.expect(SCALING + key, allowed, f"is a scaling {_NO_ROOM}")
    sections = metadata.get("rope.dimension_sections")
    if sections is not None and any(sections) and not axes:
        raise metadata.unsupported(
            "rope.dimension_sections", "divides a head among axes of positions, and this model has one axis"
        )
    if any(tuple(sections or ())[3:]):
        raise metadata.unsupported("rope.dimension_sections", "has a fourth axis, on which text has no positions")


def _scaling(metadata: MetadataReader, base: float, rotated: int, original: int | None) -> tuple[str, dict[str, Any]]:
    """Transformers' type of the scaling, and its parameters."""
    stated = metadata.scalar(f"{SCALING}original_context_length")
    factor = metadata.scalar("rope.scale_linear", 0.0)
    factor = metadata.scalar(f"{SCALING}factor", factor) or 1.0
    kind = metadata.scalar(f"{SCALING}type", "linear")
    factors, long, short = (metadata.tensor(name) for name in ROPE_TENSORS)
    if (long is None) != (short is None):
        raise _invalid_scaling(metadata, "only one of rope_factors_long.weight and rope_factors_short.weight")
    if factors is not None and long is not None:
        raise _invalid_scaling(
            metadata, "two RoPE scalings, the tensors rope_freqs.weight and rope_factors_long.weight"
        )
    if long is not None and short is not None:
        return "longrope", _long_factors(metadata, long, short, stated or original, factor, rotated, kind)
    if kind == "longrope":
        raise metadata.unsupported(
            f"{SCALING}type", "needs the tensors rope_factors_long.weight and rope_factors_short.weight"
        )
    if factors is not None:
        if (kind, factor) not in (("linear", 1.0), ("none", 1.0)):
            raise metadata.unsupported(f"{SCALING}factor", "is a second scaling besides the tensor rope_freqs.weight")
        return _frequencies(metadata, factors, base, rotated)
    if kind == "none" or (kind == "linear" and factor == 1):
        return "default", {}
    if kind == "linear":
        return "linear", {"factor": float(factor)}
    if kind == "yarn":
        length = stated or metadata.require("context_length", "max_position_embeddings")
        return "yarn", {"factor": float(factor), "original_max_position_embeddings": int(length)}
    raise metadata.unsupported(f"{SCALING}type", "is an unknown scaling")


def _long_factors(
    metadata: MetadataReader,
    long: list[float],
    short: list[float],
    original: Any,
    factor: float,
    rotated: int,
    kind: str,
) -> dict[str, Any]:
    if len(long) != rotated // 2 or len(short) != rotated // 2 or original is None or factor != 1:
        raise _invalid_scaling(
            metadata, f"long-context RoPE factors ({len(long)} and {len(short)}) that do not fit the model"
        )
    if kind not in ("linear", "longrope", "none"):
        raise metadata.unsupported(f"{SCALING}type", "is a second scaling besides the long-context tensors")
    length = int(original)
    context = metadata.require("context_length", "max_position_embeddings")
    return {
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": length,
        "factor": max(1.0, context / length),
    }


def _invalid_scaling(metadata: MetadataReader, what: str) -> ModelError:
    return ModelError(
        f"{str(metadata.file.path)!r} has {what}; download the file again, or give the model's directory or hub id in "
        "Hugging Face format"
    )


def _frequencies(
    metadata: MetadataReader, factors: list[float], base: float, rotated: int
) -> tuple[str, dict[str, Any]]:
    """Recovers the parameters of Llama 3.1's scaling from the divisor of each frequency, which a file stores.

    Between the wavelengths that are kept and those that are fully scaled, a divisor's inverse is linear in the
    frequency. So two divisors determine the parameters, which are then checked against all divisors.
    """
    factor = max(factors)
    if len(factors) == rotated // 2 and min(factors) > 0:
        if factor == min(factors):
            return ("default", {}) if factor == 1 else ("linear", {"factor": factor})
        for low, original in _candidates(factors, base, rotated):
            found = {
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": low,
                "original_max_position_embeddings": original,
            }
            if _equal(llama3_factors(found, base, rotated), factors):
                return "llama3", found
    raise _invalid_scaling(metadata, f"a tensor rope_freqs.weight {shown(factors)} that is no scaling of transformers")


def _candidates(factors: Sequence[float], base: float, rotated: int) -> list[tuple[float, float]]:
    """Candidates for (high_freq_factor with a low_freq_factor of 1, original context) that explain the divisors."""
    waves = _wavelengths(base, rotated)
    factor = max(factors)
    # (1 / wavelength, share of the frequency that is kept), for partly scaled frequencies.
    middle = [
        (1 / wave, (1 / each - 1 / factor) / (1 - 1 / factor))
        for wave, each in zip(waves, factors, strict=True)
        if 1 < each < factor
    ]
    found = []
    if len(middle) > 1:
        (first, kept), (last, least) = middle[0], middle[-1]
        slope = (kept - least) / (first - last)
        ratio = slope * first - kept
        if ratio > 0:
            length = slope / ratio
            found += [(1 + 1 / ratio, round(length)), (1 + 1 / ratio, length)]
            found.append((round(1 + 1 / ratio), round(length)))
    elif middle:
        # Only one frequency is partly scaled.
        inverse, kept = middle[0]
        ratio = (waves[1] / waves[0]) ** 0.5 if len(waves) > 1 else 4.0
        found += [(high, (1 + kept * (high - 1)) / inverse) for high in (4.0, ratio)]
    else:
        # Any boundary between the last kept wavelength and the first scaled one explains the divisors.
        kept = max(wave for wave, each in zip(waves, factors, strict=True) if each == 1) if 1 in factors else waves[0]
        scaled = min(wave for wave, each in zip(waves, factors, strict=True) if each == factor)
        ratio = (scaled / kept) ** (1 / 3)
        found.append((ratio, kept * ratio * ratio))
    # Try published values first, which reproduce the original's configuration.
    return [(4.0, 8192), *((4.0, length) for _, length in found[:2]), *found]


def llama3_factors(parameters: Any, base: float, rotated: int) -> list[float]:
    """The divisor of each frequency in Llama 3.1's scaling, [rotated / 2]."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    original, factor = parameters["original_max_position_embeddings"], parameters["factor"]
    factors = []
    for wave in _wavelengths(base, rotated):
        if wave < original / high:
            factors.append(1.0)
        elif wave > original / low:
            factors.append(float(factor))
        else:
            smooth = (original / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _wavelengths(base: float, rotated: int) -> list[float]:
    return [2 * math.pi * base ** (2 * pair / rotated) for pair in range(rotated // 2)]


def _equal(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    return all(abs(mine - other) <= 1e-4 * other for mine, other in zip(ours, theirs, strict=True))


def same_rope(ours: Any, theirs: Any, head_dim: int) -> bool:
    """Whether a file's RoPE agrees with a configuration's.

    Args:
        ours: the part of `rope_parameters` that the file contains; by layer type if the model's are.
        theirs: the configuration's `rope_parameters`.
    """
    if any(isinstance(value, dict) for value in ours.values()):
        return all(same_rope(value, theirs.get(name, {}), head_dim) for name, value in ours.items())
    if ours.get("rope_type") == theirs.get("rope_type") == "llama3":
        base = theirs["rope_theta"]
        rotated = int(head_dim * theirs.get("partial_rotary_factor", 1.0))
        factors = llama3_factors(ours, base, rotated), llama3_factors(theirs, base, rotated)
        return _equal(*factors) and same(ours.get("rope_theta", base), base)
    defaults = {"rope_type": "default", "partial_rotary_factor": 1.0, "factor": 1.0} | {
        # If these are missing, they follow from the others, in a file as in a configuration.
        name: ours.get(name)
        for name in ("attention_factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "factor")
        if theirs.get(name) is None and name in ours and ours.get("rope_type") == theirs.get("rope_type")
    }
    known = defaults | {name: value for name, value in theirs.items() if value is not None}
    rotated = known["partial_rotary_factor"]
    if int(head_dim * ours.get("partial_rotary_factor", rotated)) != int(head_dim * rotated):
        return False
    return all(same(value, known.get(name)) for name, value in ours.items() if name != "partial_rotary_factor")
