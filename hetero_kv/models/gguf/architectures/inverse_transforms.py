"""Transforms that undo what llama.cpp's converter does to tensors.

The converter is `convert_hf_to_gguf.py` (https://github.com/ggml-org/llama.cpp). Reordering rows is separate from
changing numbers, because rows of quantized blocks can be reordered without unpacking them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class InverseTransform:
    """An inverse transform: it reorders rows, then columns, multiplies numbers, then changes them.

    Attributes:
        rows: (number of rows, text configuration) -> the file's row for each row of the parameter, [rows] int64.
        columns: the same for columns.
        factor: (number of rows, text configuration) -> what the file's numbers are multiplied by.
        numbers: the file's numbers -> the parameter's.

    The configuration is that of the tensor's layer, where layers have their own.
    """

    rows: Callable[[int, Any], np.ndarray] | None = None
    columns: Callable[[int, Any], np.ndarray] | None = None
    factor: Callable[[int, Any], float] | None = None
    numbers: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def keeps_blocks(self) -> bool:
        """Whether quantized blocks stay whole: rows of blocks are reordered, and inputs instead of columns."""
        return self.numbers is None and self.factor is None

    def apply(self, numbers: np.ndarray, config: Any) -> np.ndarray:
        """The parameter's numbers from a tensor's; `config` is the model's text configuration."""
        if self.rows is not None:
            numbers = numbers[self.rows(len(numbers), config)]
        if self.columns is not None:
            numbers = numbers[:, self.columns(numbers.shape[1], config)]
        if self.factor is not None:
            numbers = numbers * np.float32(self.factor(len(numbers), config))
        return numbers if self.numbers is None else self.numbers(numbers)


def _halves_of(heads: str) -> InverseTransform:
    def rows(count: int, config: Any) -> np.ndarray:
        # The file interleaves the halves of rotated pairs; the parameter has all first halves, then all second ones.
        return np.arange(count).reshape(getattr(config, heads), -1, 2).swapaxes(1, 2).reshape(-1)

    return InverseTransform(rows=rows)


def _qkv_rows_by_head(count: int, config: Any) -> np.ndarray:
    return np.arange(count).reshape(3, config.num_attention_heads, -1).swapaxes(0, 1).reshape(-1)


def _falcon_rows(count: int, config: Any) -> np.ndarray:
    heads, groups = config.num_attention_heads, falcon_kv_heads(config)
    dim = count // (heads + 2 * groups)
    numbers = np.arange(count)
    queries = numbers[: heads * dim].reshape(groups, -1)
    keys = numbers[heads * dim : (heads + groups) * dim].reshape(groups, -1)
    values = numbers[(heads + groups) * dim :].reshape(groups, -1)
    return np.concatenate([queries, keys, values], axis=1).reshape(-1)


def falcon_kv_heads(config: Any) -> int:
    """The number of kv heads of a Falcon model, which its configuration expresses in three ways."""
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


#: Queries and keys of the Llama family, whose rotated pairs are interleaved in a file.
QUERY_ROWS, KEY_ROWS = _halves_of("num_attention_heads"), _halves_of("num_key_value_heads")
#: Merged queries, keys and values: grouped by head in the parameter, concatenated in a file.
QKV_BY_HEAD, FALCON_QKV = InverseTransform(rows=_qkv_rows_by_head), InverseTransform(rows=_falcon_rows)
#: Norms that compute with 1 + weight; a file stores the sum.
NORM_PLUS_ONE = InverseTransform(numbers=lambda numbers: numbers - 1)
TRANSPOSED = InverseTransform(numbers=lambda numbers: numbers.T)
#: A depthwise convolution, [channels, 1, width].
CONVOLUTION = InverseTransform(numbers=lambda numbers: numbers[:, None])
#: A matrix of one row.
ONE_ROW = InverseTransform(numbers=lambda numbers: numbers.reshape(1, -1))
#: Mamba's A; the parameter is log(-A).
LOGARITHM = InverseTransform(numbers=lambda numbers: np.log(-numbers))

#: A tensor of one dimension that a file has with two.
FLAT = InverseTransform(numbers=lambda numbers: numbers.reshape(-1))
FLAT_LOGARITHM = InverseTransform(numbers=lambda numbers: np.log(-numbers.reshape(-1)))


def _value_heads(count: int, config: Any) -> np.ndarray:
    # A file has the first value head of every key head, then the second ones; the parameter groups them by key head.
    heads = config.linear_num_key_heads
    return np.arange(count).reshape(config.linear_num_value_heads // heads, heads, -1).swapaxes(0, 1).reshape(-1)


def _values_behind(count: int, config: Any) -> np.ndarray:
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return np.concatenate([np.arange(before), before + _value_heads(count - before, config)])


#: Value heads of a gated delta net: in all rows, in the rows after queries and keys, in columns.
VALUE_HEADS, VALUE_HEADS_BEHIND = InverseTransform(rows=_value_heads), InverseTransform(rows=_values_behind)
VALUE_HEAD_COLUMNS = InverseTransform(columns=_value_heads)
VALUE_HEADS_CONVOLUTION = InverseTransform(rows=_values_behind, numbers=CONVOLUTION.numbers)
VALUE_HEADS_LOGARITHM = InverseTransform(rows=_value_heads, numbers=LOGARITHM.numbers)


def _by_key_head(config: Any) -> list[np.ndarray]:
    """Of Qwen3-Next's merged projection, the rows of queries, keys, values and gates, each [key heads, rows]."""
    heads, key = config.linear_num_key_heads, config.linear_key_head_dim
    value = config.linear_num_value_heads // heads * config.linear_value_head_dim
    rows = np.arange(heads * 2 * (key + value)).reshape(heads, -1)
    return np.split(rows, np.cumsum([key, key, value]), axis=1)


def _qkv_by_key_head(config: Any) -> np.ndarray:
    return np.concatenate([part.reshape(-1) for part in _by_key_head(config)[:3]])


def _gate_by_key_head(config: Any) -> np.ndarray:
    return _by_key_head(config)[3].reshape(-1)


#: Parts of Qwen3-Next's merged projection, whose rows are grouped by key head.
DELTA_QKV_ROWS, DELTA_GATE_ROWS = _qkv_by_key_head, _gate_by_key_head


def _key_rows(config: Any) -> np.ndarray:
    starts = np.arange(config.num_attention_heads) * (config.qk_nope_head_dim + config.v_head_dim)
    return (starts[:, None] + np.arange(config.qk_nope_head_dim)).reshape(-1)


def _value_rows(config: Any) -> np.ndarray:
    starts = np.arange(config.num_attention_heads) * (config.qk_nope_head_dim + config.v_head_dim)
    return (starts[:, None] + config.qk_nope_head_dim + np.arange(config.v_head_dim)).reshape(-1)


#: Multi-head latent attention: a file has matrices by head, [heads, latent, key] and [heads, value, latent]; in the
#: parameter, the rows of each head's keys and values follow each other.
LATENT_KEYS = InverseTransform(numbers=lambda numbers: numbers.swapaxes(1, 2).reshape(-1, numbers.shape[1]))
LATENT_VALUES = InverseTransform(numbers=lambda numbers: numbers.reshape(-1, numbers.shape[2]))
LATENT_KEY_ROWS, LATENT_VALUE_ROWS = _key_rows, _value_rows


def _shared_gate_rows(config: Any) -> np.ndarray:
    return np.arange(config.shared_intermediate_size)


def _shared_up_rows(config: Any) -> np.ndarray:
    return config.shared_intermediate_size + np.arange(config.shared_intermediate_size)


#: Gate and up of Granite's shared expert, which are one matrix.
SHARED_GATE_ROWS, SHARED_UP_ROWS = _shared_gate_rows, _shared_up_rows
