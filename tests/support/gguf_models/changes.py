"""Changes of a model's tensors by the published layout of GGUF files, as functions of (tensor, configuration).

Facts: `convert_hf_to_gguf.py` of llama.cpp (https://github.com/ggml-org/llama.cpp). Tensors are numpy arrays, float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

#: One tensor, or several by the suffix of their names.
Change = Callable[[np.ndarray, Any], "np.ndarray | dict[str, np.ndarray]"]


def interleaved(heads: str) -> Change:
    """Rows of a head: first and second half of the rotated pairs become neighbours."""

    def change(tensor: np.ndarray, config: Any) -> np.ndarray:
        halves = np.stack(np.split(tensor.reshape(getattr(config, heads), -1, *tensor.shape[1:]), 2, axis=1), axis=2)
        return halves.reshape(tensor.shape)

    return change


def plus_one(tensor: np.ndarray, config: Any) -> np.ndarray:
    """Norms whose weight is added to one."""
    return tensor + np.float32(1)


def transposed(tensor: np.ndarray, config: Any) -> np.ndarray:
    """Matrices that multiply from the right; biases stay."""
    return tensor.T


def squeezed(tensor: np.ndarray, config: Any) -> np.ndarray:
    """A convolution over single channels, [channels, 1, width] -> [channels, width]; biases stay."""
    return tensor[:, 0] if tensor.ndim == 3 else tensor


def one_column(tensor: np.ndarray, config: Any) -> np.ndarray:
    """Numbers of heads, [heads] -> [heads, 1]."""
    return tensor[:, None]


def minus_exponential_column(tensor: np.ndarray, config: Any) -> np.ndarray:
    """Both of them."""
    return one_column(minus_exponential(tensor, config), config)


def by_group(groups: str) -> Change:
    """A norm over groups, [inner] -> [groups, inner / groups]."""
    return lambda tensor, config: tensor.reshape(getattr(config, groups), -1)


def multiplied(*names: str, place: int | None = None) -> Change:
    """By the configuration's factors of these names; `place` where each is a list of them."""

    def change(tensor: np.ndarray, config: Any) -> np.ndarray:
        factors = [getattr(config, name) for name in names]
        return tensor * np.float32(np.prod(factors if place is None else [each[place] for each in factors]))

    return change


def multiplied_sections(tensor: np.ndarray, config: Any) -> np.ndarray:
    """Falcon-H1's first projection: rows of the gate, the input, B, C and the time steps by a factor each."""
    state = config.mamba_n_groups * config.mamba_d_state
    sizes = [config.mamba_d_ssm, config.mamba_d_ssm, state, state, config.mamba_n_heads]
    return tensor * (np.repeat(config.ssm_multipliers, sizes) * config.ssm_in_multiplier).astype(np.float32)[:, None]


def minus_exponential(tensor: np.ndarray, config: Any) -> np.ndarray:
    """The logarithm of a decay becomes the decay."""
    return -np.exp(tensor)


def gate_and_up(tensor: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """Experts [experts, gate rows and then up rows, columns]."""
    gate, up = np.split(tensor, 2, axis=1)
    return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}


def shared_gate_and_up(tensor: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """The expert that all tokens have, or the only one: gate rows and then up rows."""
    gate, up = np.split(tensor, 2)
    end = "_shexp" if config.num_local_experts else ""
    return {f"ffn_gate{end}.weight": gate, f"ffn_up{end}.weight": up}


def shared_down(tensor: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """Its other matrix."""
    return {"ffn_down_shexp.weight" if config.num_local_experts else "ffn_down.weight": tensor}


def alternating_gate_and_up(tensor: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """Experts [experts, columns, a gate row and an up row in turn] of gpt-oss, or their biases."""
    kind = "bias" if tensor.ndim == 2 else "weight"
    rows = tensor if tensor.ndim == 2 else tensor.swapaxes(1, 2)
    return {f"ffn_gate_exps.{kind}": rows[:, 0::2], f"ffn_up_exps.{kind}": rows[:, 1::2]}


def gate_and_up_columns(tensor: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """Experts [experts, columns, gate rows and then up rows] of Llama 4."""
    return gate_and_up(tensor.swapaxes(1, 2), config)


def by_expert(tensor: np.ndarray, config: Any) -> np.ndarray:
    """DBRX's experts below each other, [experts × rows, columns] -> [experts, rows, columns]."""
    return tensor.reshape(config.ffn_config.moe_num_experts, -1, tensor.shape[1])


def columns_by_expert(tensor: np.ndarray, config: Any) -> np.ndarray:
    """The same, with rows for columns."""
    return by_expert(tensor, config).swapaxes(1, 2)


def columns_first(tensor: np.ndarray, config: Any) -> np.ndarray:
    """Experts [experts, columns, rows]."""
    return tensor.swapaxes(1, 2)


def latent_keys_and_values(tensor: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """Each head's keys and values -> keys [head, latent, key], values [head, value, latent]; older files have one."""
    if getattr(config, "is_of_older_converter", False):
        return {"attn_kv_b.weight": tensor}
    heads = tensor.reshape(config.num_attention_heads, -1, tensor.shape[1])
    keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
    return {"attn_k_b.weight": keys.swapaxes(1, 2), "attn_v_b.weight": values}


def split_by_key_head(tensor: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """Of Qwen3-Next, queries, keys, values and gates of each key head -> all of each; older files keep the order."""
    if getattr(config, "is_of_older_converter", False):
        return {"ssm_in.weight": tensor}
    heads, key = config.linear_num_key_heads, config.linear_key_head_dim
    value = config.linear_num_value_heads * config.linear_value_head_dim // heads
    parts = np.split(tensor.reshape(heads, -1, tensor.shape[1]), np.cumsum([key, key, value]), axis=1)
    *before, gate = (part.reshape(-1, tensor.shape[1]) for part in parts)
    return {"attn_qkv.weight": np.concatenate(before), "attn_gate.weight": gate}


def queries_before_keys(tensor: np.ndarray, config: Any) -> np.ndarray:
    """Of Bloom and GPT-NeoX, [head, (query, key, value), ...] -> [(query, key, value), head, ...]."""
    parts = tensor.reshape(config.num_attention_heads, 3, -1, *tensor.shape[1:])
    return parts.swapaxes(0, 1).reshape(tensor.shape)


def queries_before_shared_keys(tensor: np.ndarray, config: Any) -> np.ndarray:
    """Of Falcon, each group's queries, key and value -> all queries, all keys, all values."""
    dim = config.hidden_size // config.num_attention_heads
    groups = tensor.reshape(config.num_kv_heads, -1, dim, tensor.shape[1])
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return np.concatenate([part.reshape(-1, tensor.shape[1]) for part in parts])


def by_value_head(tensor: np.ndarray, config: Any) -> np.ndarray:
    """Of Qwen 3.5, rows of value heads, grouped by key head -> the first of every key head, every second, and so on."""
    heads = config.linear_num_key_heads
    parts = tensor.reshape(heads, config.linear_num_value_heads // heads, -1, *tensor.shape[1:])
    return parts.swapaxes(0, 1).reshape(tensor.shape)


def columns_by_value_head(tensor: np.ndarray, config: Any) -> np.ndarray:
    """The same of columns."""
    return by_value_head(tensor.T, config).T


def by_value_head_behind(tensor: np.ndarray, config: Any) -> np.ndarray:
    """The same of the rows behind those of queries and keys."""
    before, values = np.split(tensor, [2 * config.linear_num_key_heads * config.linear_key_head_dim])
    return np.concatenate([before, by_value_head(values, config)])


def squeezed_by_value_head(tensor: np.ndarray, config: Any) -> np.ndarray:
    """The same of a convolution over single channels."""
    return by_value_head_behind(squeezed(tensor, config), config)


def minus_exponential_by_value_head(tensor: np.ndarray, config: Any) -> np.ndarray:
    """Decays of value heads from their logarithms."""
    return by_value_head(minus_exponential(tensor, config), config)


def last_pairs(width: str | None) -> Change:
    """Of heads of `width` rows (None: of one), the last, which rotate: first and second halves become neighbours."""

    def change(tensor: np.ndarray, config: Any) -> np.ndarray:
        heads = tensor.reshape(-1, len(tensor) if width is None else getattr(config, width), *tensor.shape[1:])
        still, first, second = np.split(
            heads, [heads.shape[1] - config.qk_rope_head_dim, heads.shape[1] - config.qk_rope_head_dim // 2], axis=1
        )
        pairs = np.stack([first, second], axis=2).reshape(*first.shape[:1], -1, *tensor.shape[1:])
        return np.concatenate([still, pairs], axis=1).reshape(tensor.shape)

    return change
