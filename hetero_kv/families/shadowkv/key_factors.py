"""The keys of a sequence's Context as low-rank factors, and their rotation."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hetero_kv.adapter.rotary_table import RotaryTable
from hetero_kv.families.shadowkv import low_rank_basis
from hetero_kv.gpu_ops.rebuild import rebuilt_chunks, rebuilt_range
from hetero_kv.gpu_ops.rotary import unrotate_into
from hetero_kv.store.growing_tensor import GrowingTensor

# Tokens per tile of float32 keys during factorisation.
TILE = 1024


class KeyFactors:
    """Keys as coefficients in one basis for all kv heads, before rotation; they are rotated when they are read.

    Args:
        rank: of the basis; unused if `energy` is set.
        energy: share of the keys' energy that the basis must contain, with as few vectors as possible; None for `rank`.
        slack: spare tokens of the coefficients' buffer whenever it grows.

    Attributes:
        basis: [batch, kv_heads, rank, k_dim], the leading right singular vectors; None before the first keys.
        coefficients: [batch, tokens, rank].
        rotary: the rotation of every position; the operator sets it before tokens arrive.
    """

    def __init__(self, rank: int, slack: int, energy: float | None = None) -> None:
        self._rank, self._energy = rank, energy
        self.basis: torch.Tensor | None = None
        self.coefficients = GrowingTensor(1, slack)
        self.rotary: RotaryTable | None = None

    @property
    def rank(self) -> int | None:
        """The rank of the basis; None before the first keys."""
        return None if self.basis is None else self.basis.shape[2]

    def __len__(self) -> int:
        return len(self.coefficients)

    def factored(self, parts: Iterable[tuple[int, torch.Tensor]], tokens: int, like: torch.Tensor) -> KeyFactors:
        """Returns factors with the best basis for the keys of `tokens` tokens, with capacity for their coefficients.

        Args:
            parts: first position and keys [batch, kv_heads, any, k_dim] of each part.
            like: any keys, for shapes and dtype.
        """
        gram = low_rank_basis.gram_matrix(tile for start, keys in parts for tile in self._plain_tiles(keys, start))
        if self._energy is None:
            basis = low_rank_basis.leading_basis(gram, self._rank)
        else:
            basis = low_rank_basis.basis_holding(gram, self._energy)
        by_head = basis.unflatten(2, (like.shape[1], like.shape[3]))
        result = copy.copy(self)
        result.basis = by_head.transpose(1, 2).to(like.dtype).contiguous()
        result.coefficients = GrowingTensor(1, self.coefficients.slack)
        result.coefficients.reserve(like.new_empty(like.shape[0], 0, basis.shape[1]), tokens)
        return result

    def append(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the coefficients of the next keys [batch, kv_heads, tokens, k_dim].

        Returns the keys' energy outside the subspace, and their total energy: [batch] float64 each.
        """
        start, flat = len(self), self._flat_basis
        self.coefficients.reserve(keys.new_empty(keys.shape[0], 0, flat.shape[1]), keys.shape[2])
        outside, energy = [], []
        for plain in self._plain_tiles(keys, start):
            coefficients = self.coefficients.room(keys.new_empty(keys.shape[0], 0, flat.shape[1]), plain.shape[1])
            coefficients.copy_(low_rank_basis.projected(plain, flat))
            outside.append(low_rank_basis.energy_outside(plain, coefficients, flat))
            energy.append(low_rank_basis.energy(plain))
        return sum(outside[1:], outside[0]), sum(energy[1:], energy[0])

    @property
    def finds_rank(self) -> bool:
        """Whether the rank is found from the keys, so that a new basis may have another rank."""
        return self._energy is not None

    def energies(self, keys: torch.Tensor, start: int) -> torch.Tensor:
        """The energy outside the subspace, and in total, of keys from position `start` on: [2, batch] float64.

        keys: [batch, kv_heads, tokens, k_dim]; they are not appended.
        """
        flat = self._flat_basis
        outside = energy = torch.zeros(len(keys), dtype=torch.float64, device=keys.device)
        for plain in self._plain_tiles(keys, start):
            outside = outside + low_rank_basis.energy_outside(plain, low_rank_basis.projected(plain, flat), flat)
            energy = energy + low_rank_basis.energy(plain)
        return torch.stack([outside, energy])

    def keys_between(self, start: int, stop: int) -> torch.Tensor:
        """The keys of the positions [start, stop), rotated: [batch, kv_heads, stop - start, k_dim]."""
        assert self.basis is not None
        assert self.rotary is not None
        angles = self.rotary.cos, self.rotary.sin, self.rotary.rotation.layout
        return rebuilt_range(self.coefficients.entries, self.basis, *angles, start, stop)

    def keys_of(self, chunks: torch.Tensor, chunk_size: int) -> torch.Tensor:
        """Rotated keys of each head's chunks [batch, kv_heads, n]: [batch, kv_heads, n, chunk_size, k_dim]."""
        assert self.basis is not None
        assert self.rotary is not None
        angles = self.rotary.cos, self.rotary.sin, self.rotary.rotation.layout
        return rebuilt_chunks(self.coefficients.entries, self.basis, *angles, chunks, chunk_size)

    @property
    def _flat_basis(self) -> torch.Tensor:
        """[batch, rank, kv_heads * k_dim] float32."""
        assert self.basis is not None
        return self.basis.transpose(1, 2).flatten(2).float()

    def _plain_tiles(self, keys: torch.Tensor, start: int) -> Iterator[torch.Tensor]:
        """Yields keys before rotation, heads concatenated, [batch, tokens, kv_heads * k_dim] float32, tile by tile."""
        assert self.rotary is not None
        for offset in range(0, keys.shape[2], TILE):
            tile = keys[:, :, offset : offset + TILE]
            at = slice(start + offset, start + offset + tile.shape[2])
            batch, kv_heads, tokens, k_dim = tile.shape
            plain = torch.empty(batch, tokens, kv_heads, k_dim, dtype=torch.float32, device=tile.device)
            angles = self.rotary.cos[at], self.rotary.sin[at], self.rotary.rotation.layout
            unrotate_into(tile, *angles, plain.transpose(1, 2))
            yield plain.flatten(2)

    def select(self, index: torch.Tensor) -> None:
        """Reorder rows: row i becomes the former row `index[i]`."""
        self.coefficients.select(index)
        self.basis = None if self.basis is None else self.basis[index.to(self.basis.device)]

    def checkpoint(self) -> tuple[Any, ...]:
        """Returns the state that `restore` takes to return to the present."""
        return self.basis, self.rotary, self.coefficients, self.coefficients.checkpoint()

    def restore(self, checkpoint: tuple[Any, ...]) -> None:
        """Return to the state at `checkpoint`."""
        self.basis, self.rotary, self.coefficients, checkpointed = checkpoint
        self.coefficients.restore(checkpointed)

    def park(self) -> None:
        """Move the coefficients off a GPU, because newer factors replace them; `restore` brings them back."""
        self.coefficients.park()

    def fork(self, memo: dict[int, Any]) -> KeyFactors:
        """Returns a second instance with the same keys; `memo` as for copy.deepcopy."""
        forked = copy.copy(self)
        forked.coefficients, forked.rotary = self.coefficients.fork(), copy.deepcopy(self.rotary, memo)
        return forked

    @property
    def nbytes(self) -> int:
        """Memory of basis and coefficients, bytes, without the rotary table, which layers share."""
        return self.coefficients.nbytes + (0 if self.basis is None else self.basis.numel() * self.basis.element_size())
