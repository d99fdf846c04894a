"""The entries of a bounded layer: a subset of a sequence's keys and values, and scores of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from hetero_kv.families.bounded.entry_buffer import EntryBuffer


@dataclass(frozen=True, eq=False)
class Entries:
    """Keys and values in the order of their positions, with numbers per entry. Immutable: replaced, never changed.

    Attributes:
        room: the memory whose first entries these are.
        num_entries: number of entries per kv head.
        scores: name -> [batch, kv_heads, cached or fewer], a policy's numbers per entry; `score` gives newer entries 0.
        carried: name -> other state of the policy for this layer. Tensors have the batch as their first dimension;
            other objects have `selected(rows)`, which is called when beams are reordered.
    """

    room: EntryBuffer
    num_entries: int
    scores: Mapping[str, torch.Tensor] = field(default_factory=dict)
    carried: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        scores: Mapping[str, torch.Tensor] | None = None,
        carried: Mapping[str, Any] | None = None,
    ) -> Entries:
        """Entries [batch, kv_heads, cached, dim] at positions [batch, kv_heads, cached], without spare capacity."""
        parts = keys.contiguous(), values.contiguous(), positions.contiguous()
        return cls(EntryBuffer(*parts, keys.shape[2]), keys.shape[2], scores or {}, carried or {})

    @cached_property
    def keys(self) -> torch.Tensor:
        """[batch, kv_heads, cached, k_dim]; as received, or before rotation if the policy re-indexes positions."""
        return self.room.keys[:, :, : self.num_entries]

    @cached_property
    def values(self) -> torch.Tensor:
        """[batch, kv_heads, cached, v_dim]."""
        return self.room.values[:, :, : self.num_entries]

    @cached_property
    def positions(self) -> torch.Tensor:
        """[batch, kv_heads, cached] int64, positions of the tokens in their sequence."""
        return self.room.positions[:, :, : self.num_entries]

    def score(self, name: str) -> torch.Tensor:
        """[batch, kv_heads, cached]; zeros if nothing is recorded under this name."""
        known = self.scores.get(name)
        if known is None:
            return torch.zeros(*self.room.positions.shape[:2], self.num_entries, device=self.room.keys.device)
        newer = self.num_entries - known.shape[2]
        return torch.nn.functional.pad(known, (0, newer)) if newer > 0 else known

    def scored(self, **scores: torch.Tensor) -> Entries:
        """Returns the same entries with these scores, each [batch, kv_heads, cached]."""
        return Entries(self.room, self.num_entries, {**self.scores, **scores}, self.carried)

    def accumulated(self, **more: torch.Tensor) -> Entries:
        """Returns the same entries with these numbers added to their scores.

        more: [batch, kv_heads, cached] each; overwritten with the sums.
        """
        for name, numbers in more.items():
            known = self.scores.get(name)
            if known is not None:
                numbers[..., : known.shape[2]].add_(known)
        return self.scored(**more)

    def without_score(self, name: str) -> Entries:
        """Returns the same entries without the scores of this name."""
        scores = {other: score for other, score in self.scores.items() if other != name}
        return Entries(self.room, self.num_entries, scores, self.carried)

    def carrying(self, **carried: Any) -> Entries:
        """Returns the same entries, carrying these objects too; None removes one."""
        merged = {**self.carried, **carried}
        known = {name: value for name, value in merged.items() if value is not None}
        return Entries(self.room, self.num_entries, self.scores, known)

    def with_vectors(self, keys: torch.Tensor, values: torch.Tensor) -> Entries:
        """Returns the same entries with other keys and values, [batch, kv_heads, cached, dim]."""
        return Entries.of(keys, values, self.positions, self.scores, self.carried)

    def kept(self, index: torch.Tensor) -> Entries:
        """Returns only the entries at `index`, [batch or 1, kv_heads or 1, count] int64; ascending, to preserve their
        order."""
        room, scores = self.room.gathered(index, list(self.scores.values()))
        return Entries(room, index.shape[2], dict(zip(self.scores, scores, strict=True)), self.carried)

    def with_room(self, tokens: int, spare: int = 0) -> Entries:
        """Returns the same entries with capacity for `tokens` more: in place, or moved, then with `spare` more."""
        return self if self.room.is_free_behind(self.num_entries, tokens) else self.moved(tokens + spare)

    def moved(self, tokens: int) -> Entries:
        """Returns the same entries in new memory, with capacity for `tokens` more."""
        return Entries(self.room.moved(self.num_entries, tokens), self.num_entries, self.scores, self.carried)

    def grown(self, keys: torch.Tensor, values: torch.Tensor, first_position: int) -> Entries:
        """Returns the entries with new tokens [batch, kv_heads, new, dim] appended; there must be capacity for them."""
        self.room.append(keys, values, first_position)
        return Entries(self.room, self.num_entries + keys.shape[2], self.scores, self.carried)

    def selected(self, rows: torch.Tensor) -> Entries:
        """Returns the entries whose row i is the former row `rows[i]` (beam search)."""
        rows = rows.to(self.room.keys.device)
        carried = {
            name: value.index_select(0, rows) if isinstance(value, torch.Tensor) else value.selected(rows)
            for name, value in self.carried.items()
        }
        return Entries.of(
            self.keys.index_select(0, rows),
            self.values.index_select(0, rows),
            self.positions.index_select(0, rows),
            {name: score.index_select(0, rows) for name, score in self.scores.items()},
            carried,
        )

    @property
    def nbytes(self) -> int:
        """Memory of keys, values, spare capacity and scores, bytes."""
        return self.room.nbytes + sum(score.numel() * score.element_size() for score in self.scores.values())


def no_entries(keys: torch.Tensor, values: torch.Tensor) -> Entries:
    """Empty entries of the shape and dtype of keys [batch, kv_heads, tokens, k_dim] and values."""
    positions = torch.empty(*keys.shape[:2], 0, dtype=torch.int64, device=keys.device)
    return Entries.of(keys[:, :, :0], values[:, :, :0], positions)
