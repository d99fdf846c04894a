"""Chunks of the arguments along the sequence, and the reusable buffer of hidden states."""

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


def mark_reusable(hidden_states: torch.Tensor) -> None:
    """Mark this buffer as allocated by an operator, so that the next operator may overwrite it."""
    hidden_states.hetero_kv_buffer = True  # type: ignore[attr-defined]


def claim_reusable(hidden_states: torch.Tensor) -> bool:
    """Whether `mark_reusable` marked this tensor; clears the mark, so that the caller owns the buffer."""
    ours = is_reusable(hidden_states)
    hidden_states.hetero_kv_buffer = False  # type: ignore[attr-defined]
    return ours


def is_reusable(hidden_states: torch.Tensor) -> bool:
    """Whether `mark_reusable` marked this very tensor; other buffers are never overwritten."""
    return getattr(hidden_states, "hetero_kv_buffer", False)


class ChunkedPass(Protocol):
    """One module's forward over a prompt, chunk by chunk."""

    @abstractmethod
    def chunks(self) -> Iterator[tuple[slice, torch.Tensor, dict[str, Any]]]:
        """Per chunk: its tokens, its hidden states [batch, tokens, hidden], and the module's keyword arguments."""

    @abstractmethod
    def place(self, chunk: slice) -> torch.Tensor | None:
        """The buffer for the module's output of a chunk, possibly the chunk itself; None if it may not write to one."""

    @abstractmethod
    def put(self, chunk: slice, result: torch.Tensor) -> None:
        """Store the module's output of a chunk, [batch, tokens, hidden], unless it was written to its `place`."""

    @abstractmethod
    def output(self) -> torch.Tensor:
        """The module's output of all chunks."""


class HiddenStateOffload(Protocol):
    """The forward of a prompt with its hidden states stored elsewhere between modules."""

    @abstractmethod
    def chunked_pass(self, hidden_states: torch.Tensor, kwargs: dict[str, Any], chunk_size: int) -> ChunkedPass:
        """The chunked forward of the next module."""


#: The offload of the forward in progress, if any. It is not in the `ForwardBatch`, because transformers calls the final
#: norm (`ChunkedModule`) without the cache.
OFFLOAD: ContextVar[HiddenStateOffload | None] = ContextVar("OFFLOAD", default=None)


def chunked_pass(hidden_states: torch.Tensor, kwargs: dict[str, Any], chunk_size: int, is_free: bool) -> ChunkedPass:
    """The chunked forward of a module over a prompt; the output overwrites the hidden states if that is allowed.

    Args:
        hidden_states: [batch, tokens, hidden].
        kwargs: of the module; arguments along the sequence are cut into chunks.
        is_free: whether nothing else reads the hidden states any more.
    """
    offload = OFFLOAD.get()
    if offload is not None:
        return offload.chunked_pass(hidden_states, kwargs, chunk_size)
    return _InPlacePass(hidden_states, kwargs, chunk_size, is_free)


def cut(total: int, chunk_size: int) -> list[slice]:
    """The chunks of `total` tokens."""
    return [slice(start, min(start + chunk_size, total)) for start in range(0, total, chunk_size)]


class _InPlacePass:
    """A chunked forward over hidden states on the compute device."""

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
