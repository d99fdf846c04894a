"""How a file says that positions are rotated, as transformers' `rope_parameters`.

Rules for keys that a file leaves out are llama.cpp's (`llama-model.cpp`, `load_hparams`): a factor without a type is a
linear one, a factor of 0 is none, the base is 10,000.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.architectures.declaration import Said, Settings, same, shown

#: Tensors that belong to the rotation and not to a parameter.
ROTATION_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
DEFAULT_BASE = 10_000.0
SCALING = "rope.scaling."
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
_NO_ROOM = "which transformers has no room for"


def put_rotation(
    said: Said, settings: Settings, *, partial: bool = False, yarn: tuple[str, ...] = (), axes: bool = False
) -> None:
    """Put `rope_parameters`; `head_dim` is there, or heads and width.

    Args:
        partial: whether the model can rotate a part of each head.
        yarn: further keys of YaRN that the architecture reads, behind `rope.scaling.`.
        axes: whether positions have several axes, which are the same for text.
    """
    parameters, spoken = rotation(said, head_dim_of(settings), partial=partial, yarn=yarn, axes=axes)
    settings.values["rope_parameters"] = parameters
    settings.said["rope_parameters"] = (said.key("rope.*"), {name: parameters[name] for name in spoken})


def head_dim_of(settings: Settings) -> int:
    """Numbers in a query's head."""
    values = settings.values
    return int(values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"])


def rotation(
    said: Said, head_dim: int, *, partial: bool = False, yarn: tuple[str, ...] = (), axes: bool = False
) -> tuple[dict[str, Any], set[str]]:
    """Transformers' parameters of the rotation, and which of them the file says.

    Raises ModelError where the file says what transformers has no room for.
    """
    parameters: dict[str, Any] = {"rope_theta": float(said.one("rope.freq_base", DEFAULT_BASE))}
    spoken = {"rope_theta"} if said.has("rope.freq_base") else set()
    rotated = said.one("rope.dimension_count", head_dim)
    if rotated != head_dim and not (partial and 0 < rotated < head_dim and rotated % 2 == 0):
        raise said.refused("rope.dimension_count", f"is not the {head_dim} of a head, and this model rotates all of it")
    if rotated % 2:
        raise said.refused("rope.dimension_count", f"or a head, {rotated}, is odd, and numbers are rotated in pairs")
    if partial:
        parameters["partial_rotary_factor"] = _share(rotated, head_dim)
        if said.has("rope.dimension_count"):
            spoken.add("partial_rotary_factor")
    _refuse_other_scalings(said, yarn, axes)
    kind, scaling = _scaling(said, parameters["rope_theta"], rotated)
    attention = said.one(f"{SCALING}attn_factor", 1.0)
    if kind == "yarn":
        scaling |= {name: _yarn(said, key) for key, name in _YARN.items() if said.has(SCALING + key)}
        if attention != 1:
            scaling["attention_factor"] = attention * (0.1 * math.log(scaling["factor"]) + 1)
    elif kind == "longrope":
        if said.has(f"{SCALING}attn_factor"):
            scaling["attention_factor"] = attention
    elif attention != 1:
        raise said.refused(f"{SCALING}attn_factor", f"makes queries and keys larger, {_NO_ROOM}")
    if scaling or said.has(f"{SCALING}type"):
        spoken |= {"rope_type", *scaling}
    return {"rope_type": kind, **parameters, **scaling}, spoken


def _yarn(said: Said, key: str) -> float:
    return float(said.one(SCALING + key))


def _share(rotated: int, head_dim: int) -> float:
    """The factor of which transformers takes the whole number of rotated dimensions."""
    share = rotated / head_dim
    return share if int(head_dim * share) == rotated else math.nextafter(share, 1)


def _refuse_other_scalings(said: Said, yarn: tuple[str, ...], axes: bool) -> None:
    said.get(f"{SCALING}finetuned")
    for key, allowed in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0), ("alpha", 0.0)):
        if key not in yarn:
            said.only(SCALING + key, allowed, f"is a scaling {_NO_ROOM}")
    sections = said.get("rope.dimension_sections")
    if sections is not None and any(sections) and not axes:
        raise said.refused("rope.dimension_sections", "divides a head among kinds of position, and this model does not")


def _scaling(said: Said, base: float, rotated: int) -> tuple[str, dict[str, Any]]:
    """Transformers' type of the scaling, and what belongs to it."""
    original = said.one(f"{SCALING}original_context_length")
    factor = said.one("rope.scale_linear", 0.0)
    factor = said.one(f"{SCALING}factor", factor) or 1.0
    kind = said.one(f"{SCALING}type", "linear")
    factors, long, short = (said.tensor(name) for name in sorted(ROTATION_TENSORS, key=_order))
    if (long is None) != (short is None):
        raise _unfit(said, "one of rope_factors_long.weight and rope_factors_short.weight without the other")
    if factors is not None and long is not None:
        raise _unfit(said, "a tensor rope_freqs.weight beside rope_factors_long.weight, two scalings in one")
    if long is not None and short is not None:
        return "longrope", _long_factors(said, long, short, original, factor, rotated, kind)
    if kind == "longrope":
        raise said.refused(f"{SCALING}type", "is without its tensors rope_factors_long.weight and …_short.weight")
    if factors is not None:
        if (kind, factor) not in (("linear", 1.0), ("none", 1.0)):
            raise said.refused(f"{SCALING}factor", "is beside a tensor rope_freqs.weight, two scalings in one")
        return _frequencies(said, factors, base, rotated)
    if kind == "none" or (kind == "linear" and factor == 1):
        return "default", {}
    if kind == "linear":
        return "linear", {"factor": float(factor)}
    if kind == "yarn":
        length = original or said.require("context_length", "max_position_embeddings")
        return "yarn", {"factor": float(factor), "original_max_position_embeddings": int(length)}
    raise said.refused(f"{SCALING}type", "is a scaling that this version does not know")


def _order(name: str) -> int:
    return ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight").index(name)


def _long_factors(
    said: Said, long: list[float], short: list[float], original: Any, factor: float, rotated: int, kind: str
) -> dict[str, Any]:
    if len(long) != rotated // 2 or len(short) != rotated // 2 or original is None or factor != 1:
        raise _unfit(said, f"factors of a long context ({len(long)} and {len(short)}) that do not fit the rotation")
    if kind not in ("linear", "longrope", "none"):
        raise said.refused(f"{SCALING}type", "is beside tensors of a long context, two scalings in one")
    length = int(original)
    context = said.require("context_length", "max_position_embeddings")
    return {
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": length,
        "factor": max(1.0, context / length),
    }


def _unfit(said: Said, what: str) -> ModelError:
    return ModelError(
        f"{str(said.file.path)!r} has {what}; download the file again, or give the model's directory or hub id in "
        "Hugging Face format"
    )


def _frequencies(said: Said, factors: list[float], base: float, rotated: int) -> tuple[str, dict[str, Any]]:
    """Llama 3.1's scaling, of which a file has the outcome: what each frequency is divided by.

    Between the longest and the shortest wavelength the inverse of a factor is a straight line over the frequency, so
    that two factors say it all; what they say is compared with every factor.
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
    raise _unfit(said, f"a tensor rope_freqs.weight {shown(factors)} that is no scaling which transformers has")


def _candidates(factors: Sequence[float], base: float, rotated: int) -> list[tuple[float, float]]:
    """Pairs (high over low frequency factor, original context) that the factors may come from."""
    waves = _wavelengths(base, rotated)
    factor = max(factors)
    # (1 / wavelength, how much of the frequency is kept), where it is neither all nor as little as can be.
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
        # So steep that no other frequency lies between.
        inverse, kept = middle[0]
        ratio = (waves[1] / waves[0]) ** 0.5 if len(waves) > 1 else 4.0
        found += [(high, (1 + kept * (high - 1)) / inverse) for high in (4.0, ratio)]
    else:
        # Everything between the last wavelength that is kept and the first that is not divides them.
        kept = max(wave for wave, each in zip(waves, factors, strict=True) if each == 1) if 1 in factors else waves[0]
        scaled = min(wave for wave, each in zip(waves, factors, strict=True) if each == factor)
        ratio = (scaled / kept) ** (1 / 3)
        found.append((ratio, kept * ratio * ratio))
    # The published ones first: they make a configuration as the original's.
    return [(4.0, 8192), *((4.0, length) for _, length in found[:2]), *found]


def llama3_factors(parameters: Any, base: float, rotated: int) -> list[float]:
    """What Llama 3.1's scaling divides each frequency by, [rotated / 2]."""
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


def same_rotation(ours: Any, theirs: Any, head_dim: int) -> bool:
    """Whether what a file says of its rotation is what a configuration says.

    Args:
        ours: the part of `rope_parameters` that the file says, by layer type where the model's are.
        theirs: the configuration's.
    """
    if any(isinstance(value, dict) for value in ours.values()):
        return all(same_rotation(value, theirs.get(name, {}), head_dim) for name, value in ours.items())
    if ours.get("rope_type") == theirs.get("rope_type") == "llama3":
        base = theirs["rope_theta"]
        rotated = int(head_dim * theirs.get("partial_rotary_factor", 1.0))
        factors = llama3_factors(ours, base, rotated), llama3_factors(theirs, base, rotated)
        return _equal(*factors) and same(ours.get("rope_theta", base), base)
    defaults = {"rope_type": "default", "partial_rotary_factor": 1.0, "factor": 1.0} | {
        # Left out, these follow from the others, in a file as in a configuration.
        name: ours.get(name)
        for name in ("attention_factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "factor")
        if theirs.get(name) is None and name in ours and ours.get("rope_type") == theirs.get("rope_type")
    }
    known = defaults | {name: value for name, value in theirs.items() if value is not None}
    return all(same(value, known.get(name)) for name, value in ours.items())
