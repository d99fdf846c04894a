"""Joins tensors of a GGUF file that are parts of one parameter: each fills some of the parameter's rows.

llama.cpp's converter splits some of a model's matrices, for example keys and values of multi-head latent attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

#: The text configuration -> the parameter's row for each row of the tensor, [rows] int64.
PartRows = Callable[[Any], np.ndarray]


def are_whole(rows: Sequence[np.ndarray], count: int) -> bool:
    """Whether parts fill each of a parameter's `count` rows once."""
    return np.array_equal(np.sort(np.concatenate(rows)), np.arange(count))


def joined(rows: Sequence[np.ndarray], parts: Sequence[np.ndarray]) -> np.ndarray:
    """The parameter's rows, each of which is in one of `parts`; `rows` has the places of a part's rows."""
    return np.ascontiguousarray(np.concatenate(parts)[np.argsort(np.concatenate(rows))])


def common_types(types: Mapping[str, Sequence[str | None]]) -> dict[str, str]:
    """Parameter -> the type of its parts' blocks, if it is the same; a part without blocks has None."""
    return {path: found[0] for path, found in types.items() if found[0] is not None and len(set(found)) == 1}
