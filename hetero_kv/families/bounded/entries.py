"""What a bounded layer holds: some of the keys and values of a sequence, and what is known of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hetero_kv.families.bounded.entry_room import EntryRoom


@dataclass(frozen=True)
class Entries:
    """Keys and values in the order of their positions, with numbers per entry. Never changed, only replaced.

    Attributes:
        keys: [batch, kv_heads, held, k_dim]; as received, or before rotation where a policy re-indexes positions.
        values: [batch, kv_heads, held, v_dim].
        positions: [batch, kv_heads, held] int64, of the tokens in their sequence.
        scores: name -> [batch, kv_heads, held], a policy's numbers per entry; new entries start with 0.
        carried: name -> what a policy remembers of the layer besides; tensors have the batch as their first dimension,
            everything else has `selected(rows)` where beams are reordered.
        room: the memory that keys and values are the beginning of; None with other keys or values than it has.
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    scores: Mapping[str, torch.Tensor] = field(default_factory=dict)
    carried: Mapping[str, Any] = field(default_factory=dict)
    room: EntryRoom | None = None

    @property
    def held(self) -> int:
        """Entries per kv head."""
        return self.keys.shape[2]

    def score(self, name: str) -> torch.Tensor:
        """[batch, kv_heads, held]; zeros where nothing was noted under this name yet."""
        known = self.scores.get(name)
        return torch.zeros(self.positions.shape, device=self.keys.device) if known is None else known

    def scored(self, **scores: torch.Tensor) -> Entries:
        """The same entries with these scores, each [batch, kv_heads, held]."""
        return replace(self, scores={**self.scores, **scores})

    def carrying(self, **carried: Any) -> Entries:
        """The same entries, remembering these too; None forgets."""
        merged = {**self.carried, **carried}
        return replace(self, carried={name: value for name, value in merged.items() if value is not None})

    def kept(self, index: torch.Tensor) -> Entries:
        """Only the entries at `index`, [batch, kv_heads or 1, count] int64; ascending, so that they stay in order."""
        index = index.expand(*self.positions.shape[:2], -1)
        positions = self.positions.gather(2, index)
        scores = {name: score.gather(2, index) for name, score in self.scores.items()}
        room = EntryRoom.gathered(self.keys, self.values, index)
        return replace(self, positions=positions, scores=scores).stored_in(room)

    def with_room(self, tokens: int, spare: int = 0) -> Entries:
        """The same entries where `tokens` more can be written behind them: here, or moved, with `spare` besides."""
        if self.room is not None and self.room.is_free_behind(self.keys, self.values, tokens):
            return self
        return self.stored_in(EntryRoom.around(self.keys, self.values, tokens + spare))

    def stored_in(self, room: EntryRoom) -> Entries:
        """The same entries with the keys and values of `room`, as many."""
        return replace(self, keys=room.keys[:, :, : room.taken], values=room.values[:, :, : room.taken], room=room)

    def grown(self, keys: torch.Tensor, values: torch.Tensor, first_position: int) -> Entries:
        """With the entries of new tokens behind, [batch, kv_heads, new, dim], for which there is room."""
        assert self.room is not None
        batch, kv_heads, new, _ = keys.shape
        self.room.append(keys, values)
        positions = torch.arange(first_position, first_position + new, device=keys.device)
        return replace(
            self,
            keys=self.room.keys[:, :, : self.held + new],
            values=self.room.values[:, :, : self.held + new],
            positions=torch.cat([self.positions, positions.expand(batch, kv_heads, new)], dim=2),
            scores={name: torch.nn.functional.pad(score, (0, new)) for name, score in self.scores.items()},
        )

    def selected(self, rows: torch.Tensor) -> Entries:
        """Row i is what row `rows[i]` was (beam search)."""
        rows = rows.to(self.keys.device)
        return Entries(
            self.keys.index_select(0, rows),
            self.values.index_select(0, rows),
            self.positions.index_select(0, rows),
            {name: score.index_select(0, rows) for name, score in self.scores.items()},
            {
                name: value.index_select(0, rows) if isinstance(value, torch.Tensor) else value.selected(rows)
                for name, value in self.carried.items()
            },
        )

    @property
    def nbytes(self) -> int:
        """Memory of keys, values, the room behind them and what is noted of each entry, bytes."""
        tensors = [self.positions, *self.scores.values()]
        room = 0 if self.room is None else self.room.nbytes
        if self.room is None or not self.room.has(self.keys, self.values):
            tensors += [self.keys, self.values]
        return room + sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def no_entries(keys: torch.Tensor, values: torch.Tensor) -> Entries:
    """None yet, of the shape and type of keys [batch, kv_heads, tokens, k_dim] and values."""
    positions = torch.empty(*keys.shape[:2], 0, dtype=torch.int64, device=keys.device)
    return Entries(keys[:, :, :0], values[:, :, :0], positions)
