"""Weights of a format with a codebook as numbers, by torch on any device (`cpu_ops.codebooks` has the layout)."""

from __future__ import annotations

import torch

from hetero_kv.cpu_ops.codebooks import NEGATIVE, Bits, Codebook, grid_codes
from hetero_kv.cpu_ops.weight_formats import GROUP, TILE, VECTORS, WeightFormat

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def codebook_numbers(layout: WeightFormat, codebook: Codebook, groups: torch.Tensor) -> torch.Tensor:
    """The numbers of the codes of groups [.., bytes of a group] uint8: [.., VECTORS, TILE, 4] float32."""
    device = groups.device
    index = _fields(codebook, groups, codebook.low, GROUP // codebook.width)
    if codebook.high is not None:
        index = index | _fields(codebook, groups, codebook.high, GROUP // codebook.width) << codebook.low.count
    # [.., entries, TILE, columns of an entry], then [.., TILE, GROUP].
    codes = torch.from_numpy(grid_codes(codebook.grid)).to(device)[index].transpose(-2, -3).flatten(-2).long()
    signs = _fields(codebook, groups, codebook.signs, GROUP // 8).transpose(-1, -2)[..., None]
    if codebook.signs.count == 1:
        signs = signs.expand(*signs.shape[:-1], 8)
    else:
        signs = signs >> torch.arange(8, device=device) & 1
        if codebook.signs.count == 7:
            signs[..., 7] = signs.sum(-1) & 1
    table = torch.tensor(layout.table, dtype=torch.float32, device=device)
    numbers = table[codes + NEGATIVE * signs.flatten(-2)]
    return numbers.unflatten(-1, (VECTORS, 4)).transpose(-2, -3)


def codebook_factors(codebook: Codebook, groups: torch.Tensor, parts: int) -> torch.Tensor:
    """The integers by which a block's scale is multiplied, for each part of a group: [.., parts, TILE] float32."""
    return (2 * _fields(codebook, groups, codebook.scale, parts) + 1).float()


def _fields(codebook: Codebook, groups: torch.Tensor, field: Bits, count: int) -> torch.Tensor:
    """The first `count` elements of a field, for every row of a tile: [.., count, TILE] int64."""
    found = []
    for index in range(count):
        plane, bit = codebook.place(field, index)
        size = codebook.planes[plane][0]
        start = TILE * sum(size for size, _, _ in codebook.planes[:plane])
        words = groups[..., start : start + TILE * size].contiguous().view(_WORDS[size]).long()
        found.append(words >> bit & (1 << field.count) - 1)
    return torch.stack(found, -2)
