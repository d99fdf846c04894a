"""What llama.cpp's converter does to a tensor on its way into a file, undone.

The facts are those of `convert_hf_to_gguf.py` (https://github.com/ggml-org/llama.cpp). A change that only reorders rows
is kept apart from one of numbers, because quantized blocks can be reordered as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Change:
    """One change, undone: `rows` first, then `columns`, then `numbers`.

    Attributes:
        rows: of (count of rows, text configuration); the file's row for each row of the parameter, [rows] int64.
        columns: likewise, of columns.
        numbers: of the file's numbers; the parameter's.
    """

    rows: Callable[[int, Any], np.ndarray] | None = None
    columns: Callable[[int, Any], np.ndarray] | None = None
    numbers: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def keeps_blocks(self) -> bool:
        """Whether quantized blocks stay as they are."""
        return self.columns is None and self.numbers is None

    def undone(self, numbers: np.ndarray, config: Any) -> np.ndarray:
        """A tensor's numbers as the parameter's; `config` is the model's text configuration."""
        if self.rows is not None:
            numbers = numbers[self.rows(len(numbers), config)]
        if self.columns is not None:
            numbers = numbers[:, self.columns(numbers.shape[1], config)]
        return numbers if self.numbers is None else self.numbers(numbers)


def _halves_of(heads: str) -> Change:
    def rows(count: int, config: Any) -> np.ndarray:
        # The file has both halves of a rotated pair side by side; the parameter has all first halves before the second.
        return np.arange(count).reshape(getattr(config, heads), -1, 2).swapaxes(1, 2).reshape(-1)

    return Change(rows=rows)


def _by_head_rows(count: int, config: Any) -> np.ndarray:
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
    """How many heads of keys and values a Falcon model has, which its configuration says in three ways."""
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


#: Queries and keys of the Llama family, whose rotated pairs lie side by side in a file.
QUERY_ROWS, KEY_ROWS = _halves_of("num_attention_heads"), _halves_of("num_key_value_heads")
#: Queries, keys and values in one: by head in the parameter, one behind the other in a file.
QKV_BY_HEAD, FALCON_QKV = Change(rows=_by_head_rows), Change(rows=_falcon_rows)
#: Norms whose weight is added to one.
NORM_PLUS_ONE = Change(numbers=lambda numbers: numbers - 1)
TRANSPOSED = Change(numbers=lambda numbers: numbers.T)
#: A convolution over one channel at a time, [channels, 1, width].
CONVOLUTION = Change(numbers=lambda numbers: numbers[:, None])
#: A matrix of one row.
ONE_ROW = Change(numbers=lambda numbers: numbers.reshape(1, -1))
#: Mamba's A, of which the parameter is the logarithm.
LOGARITHM = Change(numbers=lambda numbers: np.log(-numbers))


def _value_heads(count: int, config: Any) -> np.ndarray:
    # A file has the first value head of every key head, then the second of each; the parameter has them by key head.
    heads = config.linear_num_key_heads
    return np.arange(count).reshape(config.linear_num_value_heads // heads, heads, -1).swapaxes(0, 1).reshape(-1)


def _values_behind(count: int, config: Any) -> np.ndarray:
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return np.concatenate([np.arange(before), before + _value_heads(count - before, config)])


#: Heads of a gated delta net's values: of the rows, behind queries and keys, of the columns.
VALUE_HEADS, VALUE_HEADS_BEHIND = Change(rows=_value_heads), Change(rows=_values_behind)
VALUE_HEAD_COLUMNS = Change(columns=_value_heads)
VALUE_HEADS_CONVOLUTION = Change(rows=_values_behind, numbers=CONVOLUTION.numbers)
VALUE_HEADS_LOGARITHM = Change(rows=_value_heads, numbers=LOGARITHM.numbers)
