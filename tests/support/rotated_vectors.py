"""Rotated vectors at other positions, in plain torch."""

from __future__ import annotations

import torch


def turned(vectors, by, theta=10_000.0):
    """Rotated vectors [batch, heads, n, dim] moved by `by` positions each, as complex numbers of a pair's halves."""
    half = vectors.shape[3] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(vectors[..., :half].double(), vectors[..., half:].double())
    moved = pairs * torch.exp(1j * by[:, None] * frequencies)
    return torch.cat([moved.real, moved.imag], -1)
