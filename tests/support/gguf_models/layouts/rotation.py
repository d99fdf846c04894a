"""Metadata and tensors of rotary embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.gguf_models.layouts.layout import Value


def rotation_of(config: Any, layers: str = "full_attention") -> Mapping[str, Any]:
    parameters = config.rope_parameters
    return parameters.get(layers, parameters)


def scaled(kind: str, name: str) -> Value:
    def value(config: Any) -> Any:
        parameters = rotation_of(config)
        return parameters.get(name) if parameters["rope_type"] in kind.split() else None

    return value


def rotated(config: Any) -> int:
    """How many numbers of a head are rotated."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(dim * rotation_of(config).get("partial_rotary_factor", 1.0))


def llama3_factors(config: Any) -> dict[str, np.ndarray]:
    """What Llama 3.1's scaling divides each frequency by."""
    said = rotation_of(config)
    if said["rope_type"] != "llama3":
        return {}
    dim = rotated(config)
    lengths = 2 * math.pi * said["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    turns = said["original_max_position_embeddings"] / lengths
    with np.errstate(divide="ignore"):  # Llama 4 has one factor for both
        share = (turns - said["low_freq_factor"]) / (said["high_freq_factor"] - said["low_freq_factor"])
    share = np.clip(share, 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - share) / said["factor"] + share)).astype(np.float32)}


def longrope_factors(config: Any) -> dict[str, np.ndarray]:
    said = rotation_of(config)
    names = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
    return {name: np.array(said[key], np.float32) for name, key in names.items() if said.get(key)}


def longrope_attention(config: Any) -> float | None:
    said = rotation_of(config)
    if not said.get("long_factor"):
        return None
    times = config.max_position_embeddings / said["original_max_position_embeddings"]
    return math.sqrt(1 + math.log(times) / math.log(said["original_max_position_embeddings"])) if times > 1 else 1.0


BASE: dict[str, Value] = {"rope.freq_base": lambda config: rotation_of(config)["rope_theta"]}
ROTATION: dict[str, Value] = {
    **BASE,
    "rope.scaling.type": lambda config: {"linear": "linear", "yarn": "yarn"}.get(rotation_of(config)["rope_type"]),
    "rope.scaling.factor": scaled("linear yarn", "factor"),
    "rope.scaling.original_context_length": scaled("yarn", "original_max_position_embeddings"),
    "rope.scaling.yarn_attn_factor": scaled("yarn", "attention_factor"),
    "rope.scaling.yarn_beta_fast": scaled("yarn", "beta_fast"),
    "rope.scaling.yarn_beta_slow": scaled("yarn", "beta_slow"),
}
ROTATED: dict[str, Value] = {"rope.dimension_count": rotated}
