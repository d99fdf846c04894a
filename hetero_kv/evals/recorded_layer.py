"""The recorded full-attention prefill of one layer, from which many caches can start."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from hetero_kv.engine.buffered_layer import BufferedLayer, PrefillBuffer
from hetero_kv.engine.step import Step
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.retrieval.observation import Observation


@dataclass(frozen=True)
class RecordedLayer:
    """One layer's keys and values of a prompt, and its last queries.

    Attributes:
        keys: [1, kv_heads, stored, k_dim] in the model's dtype, as the attention receives them; `stored` is `length`,
            or in a layer with the model's sliding window at most that window less one: the newest tokens.
        values: [1, kv_heads, stored, v_dim].
        length: tokens of the prompt.
        observation: the last queries and the log-sum-exp of their attention; None in a sliding-window layer.
        cached: the tensors that the model writes to a transformers cache, if its attention receives others: the latents
            of multi-head latent attention.
        rotation: (cos, sin) of all positions, [1, length, width], as the model passes them to its attention; None if it
            passes none.
    """

    keys: torch.Tensor
    values: torch.Tensor
    length: int
    observation: Observation | None = None
    cached: tuple[torch.Tensor, torch.Tensor] | None = None
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    # Observation window -> the attention of its queries: methods that share a recording often share a window length.
    _received: dict[int, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def to(self, device: torch.device) -> RecordedLayer:
        """The same on `device`, without a copy if it is there already."""
        cached = self.cached and (self.cached[0].to(device), self.cached[1].to(device))
        observation = self.observation and self.observation.to(device)
        rotation = self.rotation and (self.rotation[0].to(device), self.rotation[1].to(device))
        keys, values = self.keys.to(device), self.values.to(device)
        return RecordedLayer(keys, values, self.length, observation, cached, rotation, self._received)

    def observed_by(self, observation: Observation) -> Observation:
        """An empty observation window after the last queries, as if the prompt had just been prefilled.

        Raises HeteroKVError if the recording has fewer queries than the window.
        """
        recorded = self.observation
        if recorded is None or recorded.q is None or recorded.lse is None:
            raise HeteroKVError(
                "no queries of this layer were recorded: it has a sliding window of the model's own; use "
                "SlidingWindowAttention there"
            )
        if recorded.q.shape[2] < min(observation.window, self.length):
            raise HeteroKVError(
                f"observation_len is {observation.window}, but the prefill was recorded with its last "
                f"{recorded.q.shape[2]} queries; record it with observation_len={observation.window}"
            )
        window, seen = observation.window, _grown(observation, recorded)
        if window not in self._received:
            self._received[window] = seen.accumulated_attention(self.keys).cpu()
        seen.known = self._received[window]
        return seen

    def fill(self, layer: Any) -> None:
        """Bring an empty transformers dynamic cache layer into the state after the prompt."""
        if not isinstance(layer, DynamicLayer):
            raise HeteroKVError(
                f"a cache layer of kind {type(layer).__name__} cannot be filled from a recorded prefill; hetero_kv "
                "knows transformers' dynamic layers and those of its own operators"
            )
        layer.update(*(self.cached or (self.keys, self.values)))
        if layer.is_sliding:
            layer.cumulative_length = self.length


class RecordingLayer(BufferedLayer):
    """Prefills like a retrieval layer, and keeps a RecordedLayer in DRAM instead of storing blocks.

    Attributes:
        recorded: the prefill so far; None before the first prompt.
        observation: the window of last queries of the current prompt.
        rotations: (cos, sin) of the prompt's parts in order, as views of the tensors that all layers share.
    """

    recorded: RecordedLayer | None = None
    observation: Observation | None = None
    rotations: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    _updates: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    def note_rotation(self, position_embeddings: Any) -> None:
        """Keep (cos, sin) of a chunk, [1, tokens, width]; ignore other forms."""
        if isinstance(position_embeddings, tuple | list) and len(position_embeddings) == 2:
            self.rotations = (*self.rotations, (position_embeddings[0], position_embeddings[1]))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See FamilyLayer. Keeps the cached tensors of a model whose attention receives others."""
        self._updates = (*self._updates, (key_states, value_states))
        return key_states, value_states

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._updates and self._updates[-1][0] is keys and self._updates[-1][1] is values:
            self._updates = self._updates[:-1]
        return super().extend(keys, values)

    def load(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        assert self.recorded is not None
        keys.copy_(self.recorded.keys)
        values.copy_(self.recorded.values)

    def store(self, step: Step, keys: torch.Tensor, values: torch.Tensor, buffer: PrefillBuffer | None = None) -> None:
        """Record the sequence in `buffer`."""
        assert buffer is not None
        assert self.observation is not None
        before, observation = self.recorded, Observation(self.observation.window)
        if before is not None and before.observation is not None:
            observation = _grown(observation, before.observation.to(keys.device))
        observation = _grown(observation, self.observation)
        if before is not None and before.rotation is not None:
            self.rotations = (before.rotation, *self.rotations)
        updates = self._updates
        if before is not None and before.cached is not None:
            updates = ((before.cached[0].to(keys.device), before.cached[1].to(keys.device)), *updates)
        cached = None
        if updates:
            latents = [torch.cat(parts, dim=2) for parts in zip(*updates, strict=True)]
            cached = latents[0], latents[1]
        recorded = RecordedLayer(buffer.keys, buffer.values, buffer.length, observation, cached)
        self.recorded, self._updates, self.observation = recorded.to(torch.device("cpu")), (), None

    def select(self, rows: Rows[int]) -> None:
        """Always raises HeteroKVError: a recording has one prompt."""
        raise HeteroKVError("a prefill is recorded of one prompt; its cache has no other rows")


def _grown(observation: Observation, other: Observation) -> Observation:
    """`observation` after the queries of `other`."""
    assert other.q is not None
    assert other.lse is not None
    return observation.grown(other.q, other.lse, other.scale, other.softcap)
