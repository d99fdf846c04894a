"""What llama.cpp's converter does to a tensor on its way into a file, undone.

The facts are those of `convert_hf_to_gguf.py` (https://github.com/ggml-org/llama.cpp). A change that only reorders rows
is kept apart from one of numbers, because quantised blocks can be reordered as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Change:
    """One change, undone: `rows` or `numbers`.

    Attributes:
        rows: of (count of rows, text configuration); the file's row for each row of the parameter, [rows] int64.
        numbers: of the file's numbers; the parameter's.
    """

    rows: Callable[[int, Any], np.ndarray] | None = None
    numbers: Callable[[np.ndarray], np.ndarray] | None = None


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
