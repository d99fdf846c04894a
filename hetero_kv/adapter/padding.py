"""The padding mask of a call: how many tokens each row has after its left padding."""

from __future__ import annotations

import torch

from hetero_kv.adapter.model_call import ModelCall
from hetero_kv.engine.padding_mask import PaddingMask
from hetero_kv.errors import UnsupportedModelError


def tokens_per_row(call: ModelCall, past: PaddingMask) -> list[int]:
    """The number of tokens of each row in the columns of a call.

    Args:
        past: the columns before the call.

    Raises UnsupportedModelError for a mask that is no left padding, or contradicts earlier calls.
    """
    rows, width = call.shape
    mask = call.arguments.get("attention_mask")
    every = [width] * rows
    # Masks of other shapes are refused by the attention function.
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return every
    if mask.shape != (rows, past.count + width):
        raise UnsupportedModelError(
            f"the attention mask has the shape {list(mask.shape)}, but the batch has {rows} rows, {past.count} past "
            f"columns and {width} new ones; pass one of shape [{rows}, {past.count + width}]"
        )
    if not past.is_ragged and bool(mask.all()):
        return every
    mask = mask.bool().cpu()
    before, new = mask[:, : past.count], mask[:, past.count :]
    different = (before != past.mask(rows).bool()).any(dim=1)
    if different.any():
        row = int(different.nonzero()[0])
        raise UnsupportedModelError(
            f"the attention mask of row {row} hides past columns that were not padding, or shows padding; begin the "
            "mask with cache.attention_mask"
        )
    counts = new.sum(dim=1)
    expected = torch.arange(width) >= width - counts[:, None]
    if not torch.equal(new, expected):
        row = int((new != expected).any(dim=1).nonzero()[0])
        where = "between other tokens" if new[row, -1] else "on the right"
        raise UnsupportedModelError(
            f"the attention mask of row {row} hides columns {where}; hetero_kv computes causal attention over "
            'left-padded rows: tokenize with padding_side="left"'
        )
    if not counts.any():
        raise UnsupportedModelError("the attention mask hides every token of the call; show at least one")
    return counts.tolist()
