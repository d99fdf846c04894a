"""The chunks that their landmark stands for worst, chosen anew as a sequence grows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hetero_kv.families.shadowkv.landmarks import least_cosines
from hetero_kv.families.shadowkv.resident_chunks import ResidentChunks


@dataclass(frozen=True)
class Outliers:
    """Each kv head's outlier chunks.

    Attributes:
        ids: [batch, kv_heads, n] int64.
        cosines: [batch, kv_heads, n] float32, their least cosine similarities.
        residents: holds their keys and values, and has slots for other chunks.
    """

    ids: torch.Tensor
    cosines: torch.Tensor
    residents: ResidentChunks

    def before(self, chunk: int) -> Outliers:
        """Those before `chunk`: every head the same number, where one has more left those with the least cosines."""
        stays = self.ids < chunk
        count = int(stays.sum(dim=2).min()) if stays.numel() else 0
        kept = self.cosines.masked_fill(~stays, float("inf")).argsort(dim=2)[:, :, :count]
        keys, values = (_chunks(p, kept) for p in (self.residents.outlier_keys, self.residents.outlier_values))
        return Outliers(self.ids.gather(2, kept), self.cosines.gather(2, kept), ResidentChunks(keys, values))

    def selected(self, index: torch.Tensor) -> Outliers:
        """With row i what row `index[i]` was."""
        index = index.to(self.ids.device)
        keys, values = self.residents.outlier_keys[index], self.residents.outlier_values[index]
        return Outliers(self.ids[index], self.cosines[index], ResidentChunks(keys, values))


def with_new_outliers(
    outliers: Outliers | None, key_chunks: torch.Tensor, value_chunks: torch.Tensor, first: int, count: int
) -> Outliers:
    """The `count` chunks with the least cosines of all so far, each kv head its own (ShadowKV, algorithm 1).

    Of the chunks before `first` only the outliers among them can be outliers still, so that nothing else of them is
    needed.

    Args:
        outliers: of the chunks before `first`; None when there are none.
        key_chunks, value_chunks: the chunks from `first` on, exact: [batch, kv_heads, new, chunk_size, dim].
        count: outliers to keep; fewer while there are fewer chunks.

    Returns `outliers` itself where no new chunk is among them.
    """
    batch, kv_heads, new = key_chunks.shape[:3]
    cosines = least_cosines(key_chunks)
    ids = torch.arange(first, first + new, device=key_chunks.device).expand(batch, kv_heads, new)
    known = 0 if outliers is None else outliers.ids.shape[2]
    if outliers is not None:
        cosines, ids = torch.cat([outliers.cosines, cosines], dim=2), torch.cat([outliers.ids, ids], dim=2)
    picked = cosines.topk(min(count, known + new), dim=2, largest=False).indices
    if outliers is None:
        keys, values = _chunks(key_chunks, picked), _chunks(value_chunks, picked)
    elif picked.shape[2] == known and not bool((picked >= known).any()):
        return outliers
    else:
        keys = _taken(outliers.residents.outlier_keys, key_chunks, picked)
        values = _taken(outliers.residents.outlier_values, value_chunks, picked)
    return Outliers(ids.gather(2, picked), cosines.gather(2, picked), ResidentChunks(keys, values))


def _taken(old: torch.Tensor, new: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    """Chunks by their index in `old` and then `new`, without joining the two."""
    known = old.shape[2]
    if known == 0:
        return _chunks(new, picked)
    from_old, from_new = _chunks(old, picked.clamp(max=known - 1)), _chunks(new, (picked - known).clamp(min=0))
    return torch.where((picked < known)[..., None, None], from_old, from_new)


def _chunks(chunks: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of [batch, kv_heads, chunks, chunk_size, dim] those at `ids` [batch, kv_heads, n]."""
    return chunks.gather(2, ids[..., None, None].expand(-1, -1, -1, *chunks.shape[3:]))
