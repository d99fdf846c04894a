"""Cutting what runs along the sequence into chunks, and the buffer of hidden states that layers hand on."""

from __future__ import annotations

from typing import Any

import torch

#: The sequence dimension of what transformers passes to a decoder layer beside the hidden states.
SEQUENCE_DIM = {"position_ids": -1, "cache_position": -1, "position_embeddings": -2}


def sliced(name: str, value: Any, chunk: slice, total: int) -> Any:
    """The part of a layer's argument that belongs to a chunk of a sequence of `total` tokens."""
    if name not in SEQUENCE_DIM or value is None:
        return value
    if isinstance(value, tuple | list):
        return type(value)(sliced(name, part, chunk, total) for part in value)
    dim = SEQUENCE_DIM[name] % value.dim()
    return value if value.shape[dim] != total else value[(slice(None),) * dim + (chunk,)]


def mark_ours(hidden_states: torch.Tensor) -> None:
    """Remember that an operator made this buffer, so that the next one may write its output over it."""
    hidden_states.hetero_kv_buffer = True  # type: ignore[attr-defined]


def claimed(hidden_states: torch.Tensor) -> bool:
    """Whether this tensor came from `mark_ours`; from now on it is the caller's."""
    ours = is_ours(hidden_states)
    hidden_states.hetero_kv_buffer = False  # type: ignore[attr-defined]
    return ours


def is_ours(hidden_states: torch.Tensor) -> bool:
    """Whether this very tensor came from `mark_ours`: anyone else's is never written to."""
    return getattr(hidden_states, "hetero_kv_buffer", False)
