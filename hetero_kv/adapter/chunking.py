"""Chunks of the arguments along the sequence, and the buffer of hidden states that layers pass on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import torch

#: The sequence dimension of the arguments that transformers passes to a decoder layer with the hidden states.
SEQUENCE_DIM = {"position_ids": -1, "cache_position": -1, "position_embeddings": -2}


def sliced(name: str, value: Any, chunk: slice, total: int) -> Any:
    """The part of a layer's argument for one chunk of a sequence of `total` tokens."""
    if name not in SEQUENCE_DIM or value is None:
        return value
    if isinstance(value, tuple | list):
        return type(value)(sliced(name, part, chunk, total) for part in value)
    dim = SEQUENCE_DIM[name] % value.dim()
    return value if value.shape[dim] != total else value[(slice(None),) * dim + (chunk,)]


#: Number of last tokens that the model's head reads of the present forward; 0 for all.
LOGITS_TO_KEEP: ContextVar[int] = ContextVar("LOGITS_TO_KEEP", default=0)


def mark_reusable(hidden_states: torch.Tensor) -> None:
    """Mark this buffer as made by an operator, so that the next operator may overwrite it."""
    hidden_states.hetero_kv_buffer = True  # type: ignore[attr-defined]


def claim_reusable(hidden_states: torch.Tensor) -> bool:
    """Whether `mark_reusable` marked this tensor; clears the mark, so that the caller owns the buffer."""
    ours = is_reusable(hidden_states)
    hidden_states.hetero_kv_buffer = False  # type: ignore[attr-defined]
    return ours


def is_reusable(hidden_states: torch.Tensor) -> bool:
    """Whether `mark_reusable` marked this very tensor: buffers of others are never overwritten."""
    return getattr(hidden_states, "hetero_kv_buffer", False)


class ChunkedPass(Protocol):
    """A prompt's way through one module, chunk by chunk."""

    @abstractmethod
    def chunks(self) -> Iterator[tuple[slice, torch.Tensor, dict[str, Any]]]:
        """Per chunk: its tokens, its hidden states [batch, tokens, hidden], and the module's keyword arguments."""

    @abstractmethod
    def place(self, chunk: slice) -> torch.Tensor | None:
        """The buffer in which the module may write its output of a chunk, possibly the chunk itself; or None."""

    @abstractmethod
    def put(self, chunk: slice, result: torch.Tensor) -> None:
        """Keep the module's output of a chunk, [batch, tokens, hidden], unless it is in its place already."""

    @abstractmethod
    def output(self) -> torch.Tensor:
        """The module's output of all chunks."""


class HiddenStateOffload(Protocol):
    """A prompt's way through all modules, with its hidden states stored elsewhere between them."""

    @abstractmethod
    def chunked_pass(self, hidden_states: torch.Tensor, kwargs: dict[str, Any], chunk_size: int) -> ChunkedPass:
        """The way through the next module."""


#: The walk of the present forward, if any.
OFFLOAD: ContextVar[HiddenStateOffload | None] = ContextVar("OFFLOAD", default=None)


def chunked_pass(hidden_states: torch.Tensor, kwargs: dict[str, Any], chunk_size: int, is_free: bool) -> ChunkedPass:
    """A prompt's way through a module; the output overwrites the hidden states where that is allowed.

    Args:
        hidden_states: [batch, tokens, hidden].
        kwargs: of the module; arguments along the sequence are cut into chunks.
        is_free: whether no one else reads the hidden states any more.
    """
    offload = OFFLOAD.get()
    if offload is not None:
        return offload.chunked_pass(hidden_states, kwargs, chunk_size)
    return _InPlacePass(hidden_states, kwargs, chunk_size, is_free)


def cut(total: int, chunk_size: int) -> list[slice]:
    """The chunks of `total` tokens."""
    return [slice(start, min(start + chunk_size, total)) for start in range(0, total, chunk_size)]


class _InPlacePass:
    """The way through a module of hidden states on the compute device."""

    def __init__(self, hidden_states: torch.Tensor, kwargs: dict[str, Any], chunk_size: int, is_free: bool) -> None:
        self._states, self._kwargs, self._chunk_size = hidden_states, kwargs, chunk_size
        self._output = hidden_states if is_free else torch.empty_like(hidden_states)

    def chunks(self) -> Iterator[tuple[slice, torch.Tensor, dict[str, Any]]]:
        total = self._states.shape[1]
        for chunk in cut(total, self._chunk_size):
            kwargs = {name: sliced(name, value, chunk, total) for name, value in self._kwargs.items()}
            yield chunk, self._states[:, chunk], kwargs

    def place(self, chunk: slice) -> torch.Tensor:
        return self._output[:, chunk]

    def put(self, chunk: slice, result: torch.Tensor) -> None:
        place = self.place(chunk)
        if (result.data_ptr(), result.stride()) != (place.data_ptr(), place.stride()):
            place.copy_(result)

    def output(self) -> torch.Tensor:
        return self._output
