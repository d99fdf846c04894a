"""A decoded token's inputs in a bucket of rows: those of a captured forward, of which a call uses the first rows."""

from __future__ import annotations

import torch

from hetero_kv.engine.row_buckets import bucket_of

# The dimension of the rows, from the end: positions along several axes are [axes, rows, tokens].
_ROW_DIM = {"input_ids": -2, "inputs_embeds": -3, "position_ids": -2}


def padded_rows(inputs: dict[str, torch.Tensor], rows: int) -> int | None:
    """The rows of the bucket that a call of `rows` rows passes in; None if one of its inputs has no row for each."""
    is_by_row = all(
        name in _ROW_DIM and tensor.dim() >= -_ROW_DIM[name] and tensor.shape[_ROW_DIM[name]] == rows
        for name, tensor in inputs.items()
    )
    return bucket_of(rows) if is_by_row else None


def padded_shape(name: str, tensor: torch.Tensor, rows: int | None) -> torch.Size:
    """The shape of an input with so many rows; None for its own."""
    shape = list(tensor.shape)
    if rows is not None:
        shape[_ROW_DIM[name]] = rows
    return torch.Size(shape)


def padded(name: str, tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """An input with so many rows, of which those behind its own are zeros."""
    whole = tensor.new_zeros(padded_shape(name, tensor, rows))
    put(name, tensor, whole)
    return whole


def put(name: str, tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy an input into the first rows of one that has as many or more."""
    if whole.shape == tensor.shape:
        whole.copy_(tensor, non_blocking=True)
        return
    dim = _ROW_DIM[name]
    whole.narrow(dim, 0, tensor.shape[dim]).copy_(tensor, non_blocking=True)
