"""Outlier chunks, which their landmarks represent worst, updated as a sequence grows."""

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
        residents: their keys and values, and slots for other chunks.
    """

    ids: torch.Tensor
    cosines: torch.Tensor
    residents: ResidentChunks

    def before(self, chunk: int) -> Outliers:
        """The outliers before `chunk`. All heads keep the same number; heads with more keep those of least cosine."""
        stays = self.ids < chunk
        count = int(stays.sum(dim=2).min()) if stays.numel() else 0
        kept = self.cosines.masked_fill(~stays, float("inf")).argsort(dim=2)[:, :, :count]
        keys, values = (_chunks(p, kept) for p in (self.residents.outlier_keys, self.residents.outlier_values))
        return Outliers(self.ids.gather(2, kept), self.cosines.gather(2, kept), ResidentChunks(keys, values))

    def selected(self, index: torch.Tensor) -> Outliers:
        """The outliers whose row i is the former row `index[i]`."""
        index = index.to(self.ids.device)
        keys, values = self.residents.outlier_keys[index], self.residents.outlier_values[index]
        return Outliers(self.ids[index], self.cosines[index], ResidentChunks(keys, values))


class OutlierChoice:
    """Chooses each kv head's `count` chunks of least cosine (ShadowKV, algorithm 1).

    Of the chunks before `first` only their outliers can still be outliers, so nothing else of them is needed.

    Args:
        before: the outliers among the chunks before `first`; None if there are none.
        key_chunks, value_chunks: the exact chunks from `first` on, [batch, kv_heads, new, chunk_size, dim].
        count: outliers to keep; fewer while there are fewer chunks.
    """

    def __init__(
        self, before: Outliers | None, key_chunks: torch.Tensor, value_chunks: torch.Tensor, first: int, count: int
    ) -> None:
        self._known = 0 if before is None else before.ids.shape[2]
        self._first, self._count = first, min(count, self._known + key_chunks.shape[2])
        self._before, self._chunks, self._cosines = before, (key_chunks, value_chunks), least_cosines(key_chunks)

    @property
    def is_another(self) -> torch.Tensor | None:
        """Whether a new chunk is an outlier, a bool tensor on their device; None if one must be."""
        if self._before is None or self._count != self._known:
            return None
        if not self._known:
            return torch.zeros((), dtype=torch.bool, device=self._cosines.device)
        return (self._cosines < self._before.cosines.amax(dim=2, keepdim=True)).any()

    def outliers(self) -> Outliers:
        """Returns the chosen outliers, with copies of their exact keys and values, and without slots."""
        cosines, (batch, kv_heads, new) = self._cosines, self._cosines.shape
        ids = torch.arange(self._first, self._first + new, device=cosines.device).expand(batch, kv_heads, new)
        if self._before is not None:
            cosines = torch.cat([self._before.cosines, cosines], dim=2)
            ids = torch.cat([self._before.ids, ids], dim=2)
        picked = cosines.topk(self._count, dim=2, largest=False).indices
        if self._before is None:
            keys, values = (_chunks(part, picked) for part in self._chunks)
        else:
            residents = self._before.residents
            present = residents.outlier_keys, residents.outlier_values
            keys, values = (_chunks_of(old, new, picked) for old, new in zip(present, self._chunks, strict=True))
        return Outliers(ids.gather(2, picked), cosines.gather(2, picked), ResidentChunks(keys, values))


def _chunks_of(old: torch.Tensor, new: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    """Chunks by their index in `old` followed by `new`, without concatenating the two."""
    known = old.shape[2]
    if known == 0:
        return _chunks(new, picked)
    from_old, from_new = _chunks(old, picked.clamp(max=known - 1)), _chunks(new, (picked - known).clamp(min=0))
    return torch.where((picked < known)[..., None, None], from_old, from_new)


def _chunks(chunks: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The chunks at `ids` [batch, kv_heads, n] of [batch, kv_heads, chunks, chunk_size, dim]."""
    return chunks.gather(2, ids[..., None, None].expand(-1, -1, -1, *chunks.shape[3:]))
