"""Weights that stay quantized in GPU memory: multiplied directly with few rows, unpacked for many.

Their layout is that of `cpu_ops.weight_formats`, which CPU kernels read too: sixteen rows of four columns are 64 bytes,
so that neighbouring threads read neighbouring words in every format. Each function is one launch of a Triton kernel
where Triton runs, and needs no memory besides its result.
"""

from __future__ import annotations

import torch

from hetero_kv.cpu_ops.weight_formats import FORMATS, GROUP, TILE, VECTORS, WeightFormat, scales_of_bytes
from hetero_kv.gpu_ops.codebook_weights import codebook_factors, codebook_numbers
from hetero_kv.gpu_ops.kernel_choice import runs_triton

# Weights that torch alone unpacks at once; it needs several temporary tensors of this size.
_UNPACKED_AT_ONCE = 4 << 20


def has_kernels(tensor: torch.Tensor, name: str) -> bool:
    """Whether Triton kernels process weights of format `name` on the device of `tensor`; none has a codebook."""
    return not FORMATS[name].codebook and runs_triton(tensor)


def multiply(
    x: torch.Tensor, data: torch.Tensor, name: str, rows: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias for few rows of x, with weights and sums in float32; where `has_kernels`.

    Args:
        x: [n, columns], n above 0.
        data: a packed matrix [rows, columns], uint8 [FORMATS[name].packed_bytes(rows, columns)].
        name: its format, GGML's name.
        bias: [rows], contiguous.

    Returns [n, rows] in x's dtype.
    """
    from hetero_kv.gpu_ops.triton_kernels import packed_weights

    out = torch.empty(len(x), rows, dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device):
        packed_weights.multiply(x if x.stride(1) == 1 else x.contiguous(), data, name, bias, out)
    return out


def multiply_in_torch(
    x: torch.Tensor, data: torch.Tensor, name: str, rows: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """The definition of `multiply`, on any device."""
    product = x.float() @ unpacked_in_torch(data, name, rows, x.shape[1]).T
    return (product if bias is None else product + bias.float()).to(x.dtype)


def multiply_chosen(x: torch.Tensor, data: torch.Tensor, name: str, rows: int, chosen: torch.Tensor) -> torch.Tensor:
    """Multiply each row of x with its own matrix, whose index the host need not know; where `has_kernels`.

    Args:
        x: [n, columns], n above 0.
        data: packed matrices [rows, columns], [matrices, bytes of one] uint8.
        name: their format, GGML's name.
        chosen: [n] int64, contiguous: the matrix of each row. An invalid index gives 0.

    Returns [n, rows] in x's dtype.
    """
    from hetero_kv.gpu_ops.triton_kernels import packed_weights

    out = torch.empty(len(x), rows, dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device):
        packed_weights.multiply_chosen(x if x.stride(1) == 1 else x.contiguous(), data, name, chosen, out)
    return out


def multiply_chosen_in_torch(
    x: torch.Tensor, data: torch.Tensor, name: str, rows: int, chosen: torch.Tensor
) -> torch.Tensor:
    """The definition of `multiply_chosen`, on any device; it unpacks the matrix of every row."""
    is_there = (chosen >= 0) & (chosen < len(data))
    products = [
        multiply_in_torch(row[None], packed, name, rows, None)
        for row, packed in zip(x, data[chosen.where(is_there, 0)], strict=True)
    ]
    return torch.cat(products).where(is_there[:, None], 0)


def unpack_into(out: torch.Tensor, data: torch.Tensor, name: str, first_tile: int = 0) -> None:
    """Write rows of a packed matrix, from tile `first_tile` on, as GGML's numbers, rounded to the dtype of `out`.

    Args:
        out: [rows, columns], contiguous; it may end within a tile.
        data, name: as in `multiply`.
    """
    if has_kernels(out, name):
        from hetero_kv.gpu_ops.triton_kernels import packed_weights

        with torch.cuda.device(out.device):
            packed_weights.unpack(data, name, first_tile, out)
        return
    columns = out.shape[1]
    tiles = data.view(-1, FORMATS[name].packed_bytes(TILE, columns))[first_tile:]
    step = max(1, _UNPACKED_AT_ONCE // (TILE * columns))
    for first, part in zip(range(0, len(tiles), step), out.split(step * TILE), strict=False):
        part.copy_(unpacked_in_torch(tiles[first : first + step].reshape(-1), name, len(part), columns))


def rows_of(
    data: torch.Tensor, name: str, rows: int, columns: int, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Rows `ids` [n] int64 of a packed matrix [rows, columns], as numbers [n, columns] in `dtype`.

    The host need not know the ids. Rows of invalid ids are NaN.
    """
    out = torch.empty(len(ids), columns, dtype=dtype, device=data.device)
    if has_kernels(data, name) and len(ids):
        from hetero_kv.gpu_ops.triton_kernels import packed_weights

        with torch.cuda.device(data.device):
            packed_weights.rows_of(data, name, rows, ids.contiguous(), out)
        return out
    # This also unpacks the other fifteen rows of each tile.
    step = max(1, _UNPACKED_AT_ONCE // (TILE * columns))
    for some, part in zip(ids.split(step), out.split(step), strict=True):
        part.copy_(rows_in_torch(data, name, rows, columns, some))
    return out


def rows_in_torch(data: torch.Tensor, name: str, rows: int, columns: int, ids: torch.Tensor) -> torch.Tensor:
    """The definition of `rows_of`, on any device, in float32."""
    is_there = (ids >= 0) & (ids < rows)
    row = ids.where(is_there, 0)
    tiles = data.view(-1, FORMATS[name].packed_bytes(TILE, columns))[row // TILE]
    numbers = unpacked_in_torch(tiles.reshape(-1), name, TILE * len(ids), columns).view(-1, TILE, columns)
    found = numbers[torch.arange(len(ids), device=ids.device), row % TILE]
    return found.where(is_there[:, None], float("nan"))


def unpacked_in_torch(data: torch.Tensor, name: str, rows: int, columns: int) -> torch.Tensor:
    """A packed matrix as GGML's numbers [rows, columns], bit-identical, in float32; on any device."""
    layout = FORMATS[name]
    records = data.view(-1, columns // layout.columns, layout.record_bytes)
    groups = records[..., layout.head_bytes :].unflatten(-1, (layout.groups, layout.group_bytes))
    if layout.number:
        numbers = groups.contiguous().view(getattr(torch, layout.number)).float().unflatten(-1, (GROUP, TILE))
        weights = numbers.permute(0, 4, 1, 2, 3)
    else:
        scales, minimums = _scales(layout, records, groups)
        weights = _codes(layout, groups) * scales + minimums if layout.has_minimum else _codes(layout, groups) * scales
        # From [tile, block, group, vector, row, column of four].
        weights = weights.permute(0, 4, 1, 2, 3, 5)
    return weights.reshape(-1, columns)[:rows]


def _codes(layout: WeightFormat, groups: torch.Tensor) -> torch.Tensor:
    """Codes minus their zero point, or their table values: [tiles, blocks, groups, vectors, TILE, 4] float32."""
    if layout.codebook:
        return codebook_numbers(layout, layout.codebook, groups)
    planes = groups[..., layout.scale_bytes :].unflatten(-1, (-1, TILE, 4))
    low = planes[..., : layout.low_bits, :, :]
    if layout.low_bits == VECTORS:
        return low.contiguous().view(torch.int8).float()
    codes = _spread(low, layout.low_bits)
    if layout.high_bits:
        codes = codes | _spread(planes[..., layout.low_bits :, :, :], layout.high_bits) << layout.low_bits
    if layout.table:
        return torch.tensor(layout.table, dtype=torch.float32, device=groups.device)[codes.long()]
    return codes.float() - layout.zero


def _spread(plane: torch.Tensor, bits: int) -> torch.Tensor:
    """Separate the vectors that share a plane, `bits` bits of each byte per vector."""
    shares = [plane >> bits * share & (1 << bits) - 1 for share in range(VECTORS // bits)]
    return torch.cat(shares, dim=-3)


def _scales(layout: WeightFormat, records: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minimums (added) of each vector: [tiles, blocks, groups, vectors, TILE, 1] float32."""
    own = groups[..., : layout.scale_bytes]
    if layout.bytes_as:
        of_bytes = torch.from_numpy(scales_of_bytes(layout.bytes_as)).to(own.device)
        scales = of_bytes[own.long()].unflatten(-1, (-1, TILE))
        return _of_vectors(scales), scales
    if not layout.two_levels:
        halves = own.contiguous().view(torch.float16).float().unflatten(-1, (-1, TILE))
        return _of_vectors(halves[..., :1, :]), _of_vectors(halves[..., -1:, :])
    heads = records[..., : layout.head_bytes].contiguous().view(torch.float16).float().unflatten(-1, (-1, TILE))
    if layout.codebook:
        first = heads[..., None, :1, :] * layout.unit
        return _of_vectors(first * codebook_factors(layout.codebook, groups, layout.scales)), first
    if not layout.scales:
        first = heads[..., None, :1, :].expand(*groups.shape[:-1], 1, TILE)
        return _of_vectors(first), first
    parts = own.unflatten(-1, (-1, TILE))
    integers = parts[..., : layout.scales, :]
    integers = integers.contiguous().view(torch.int8) if layout.signed_scales else integers
    first, minimum = heads[..., None, :1, :], -heads[..., None, -1:, :]
    return _of_vectors(first * integers.float()), _of_vectors(minimum * parts[..., -layout.scales :, :].float())


def _of_vectors(parts: torch.Tensor) -> torch.Tensor:
    """Expand [..., parts of a group, TILE] to [..., VECTORS, TILE, 1]."""
    return parts.repeat_interleave(VECTORS // parts.shape[-2], dim=-2)[..., None]
