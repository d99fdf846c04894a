"""Cutting what runs along the sequence into chunks, and the buffer of hidden states that layers hand on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Protocol

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


#: How many last tokens the head of a model wants of the present forward; 0 for all.
WANTED: ContextVar[int] = ContextVar("WANTED", default=0)


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


class Passage(Protocol):
    """A prompt's way through one module, chunk by chunk."""

    @abstractmethod
    def chunks(self) -> Iterator[tuple[slice, torch.Tensor, dict[str, Any]]]:
        """Which tokens, their hidden states [batch, tokens, hidden], and the module's keyword arguments for them."""

    @abstractmethod
    def place(self, chunk: slice) -> torch.Tensor | None:
        """Where the module may write by itself what it makes of a chunk, perhaps over the chunk; None: nowhere."""

    @abstractmethod
    def put(self, chunk: slice, result: torch.Tensor) -> None:
        """Keep what the module made of a chunk, [batch, tokens, hidden], unless it lies in its place."""

    @abstractmethod
    def output(self) -> torch.Tensor:
        """What it made of all of them."""


class Walk(Protocol):
    """A prompt's way through all modules, where its hidden states lie elsewhere between them."""

    @abstractmethod
    def passage(self, hidden_states: torch.Tensor, kwargs: dict[str, Any], chunk_size: int) -> Passage:
        """The way through the next module."""


#: The walk that the present forward is, if it is one.
WALK: ContextVar[Walk | None] = ContextVar("WALK", default=None)


def passage(hidden_states: torch.Tensor, kwargs: dict[str, Any], chunk_size: int, is_free: bool) -> Passage:
    """A prompt's way through a module, whose output is written over the hidden states where they may be.

    Args:
        hidden_states: [batch, tokens, hidden].
        kwargs: of the module; what runs along the sequence is cut.
        is_free: whether nobody else reads the hidden states any more.
    """
    walk = WALK.get()
    if walk is not None:
        return walk.passage(hidden_states, kwargs, chunk_size)
    return _InPlace(hidden_states, kwargs, chunk_size, is_free)


def cut(total: int, chunk_size: int) -> list[slice]:
    """The chunks of so many tokens."""
    return [slice(start, min(start + chunk_size, total)) for start in range(0, total, chunk_size)]


class _InPlace:
    """The way through a module of hidden states that lie where the model computes."""

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
