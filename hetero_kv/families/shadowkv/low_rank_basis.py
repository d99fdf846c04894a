"""Low-rank factors of a sequence's keys before rotary embedding (ShadowKV, arXiv:2410.21465, section 3.1).

The keys of all heads together, K [tokens, kv_heads · dim], are K ≈ A·B. The rows of B are the r leading right singular
vectors of K, and A = K·Bᵀ. These vectors are the eigenvectors of the Gram matrix Kᵀ·K, which is accumulated over tiles
of tokens, so that nothing of size tokens × tokens is computed and no float32 copy of all keys is stored.
A Gram matrix squares the singular values, so directions below √ε·σ₁ are lost in its rounding. Its tiles are products
in float32, accumulated and decomposed in float64. The loss is below 1e-3 of the optimal error of rank r as long as that
error is above 1e-3 of the keys' norm, far below the resolution of half-precision keys.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def gram_matrix(tiles: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum of tileᵀ·tile over tiles of tokens [batch, tokens, channels] float32.

    Returns [batch, channels, channels] float64. Raises ValueError if there is no tile.
    """
    total: torch.Tensor | None = None
    for tile in tiles:
        part = (tile.transpose(1, 2) @ tile).double()
        total = part if total is None else total.add_(part)
    if total is None:
        raise ValueError("a Gram matrix of no tokens")
    return total


def leading_basis(gram: torch.Tensor, rank: int) -> torch.Tensor:
    """The `rank` leading eigenvectors of a Gram matrix, orthonormal, as rows: [batch, rank, channels] float64.

    They are the leading right singular vectors of the keys. With fewer tokens than `rank` the last ones are arbitrary.

    Args:
        gram: [batch, channels, channels] float64, channels at least `rank`.
    """
    # `eigh` returns ascending eigenvalues.
    _, vectors = torch.linalg.eigh(gram)
    return vectors[..., -rank:].flip(-1).transpose(1, 2).contiguous()


def basis_holding(gram: torch.Tensor, share: float) -> torch.Tensor:
    """The fewest leading eigenvectors that contain a share of the energy: [batch, rank, channels] float64.

    The energy of keys is the sum of their Gram matrix's eigenvalues. All rows of the batch have the largest rank that
    one of them needs; surplus vectors of a row are zeros, so that its keys do not depend on the other rows.

    Args:
        gram: [batch, channels, channels] float64.
        share: above 0 and at most 1.
    """
    values, vectors = torch.linalg.eigh(gram)
    # Rounding can make eigenvalues of a Gram matrix negative.
    contained = values.clamp(min=0).flip(-1).cumsum(dim=-1)
    ranks = (contained < share * contained[:, -1:]).sum(dim=-1) + 1
    most = int(ranks.max())
    basis = vectors[..., -most:].flip(-1).transpose(1, 2)
    needed = torch.arange(most, device=gram.device) < ranks[:, None]
    return (basis * needed[..., None]).contiguous()


def projected(keys: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Coefficients of keys in a basis: [batch, tokens, channels] × [batch, rank, channels] -> [batch, tokens, rank]."""
    return keys @ basis.transpose(1, 2)


def energy_outside(keys: torch.Tensor, coefficients: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """The energy (squared norm) of keys outside the subspace of a basis: [batch] float64.

    Args:
        keys: [batch, tokens, channels] float32.
        coefficients: [batch, tokens, rank], from `projected`, in any precision.
        basis: [batch, rank, channels].
    """
    return energy(torch.baddbmm(keys, coefficients.float(), basis.float(), alpha=-1))


def energy(keys: torch.Tensor) -> torch.Tensor:
    """The squared norm of keys [batch, tokens, channels], per sequence: [batch] float64."""
    return keys.square().sum(dim=(1, 2), dtype=torch.float64)
