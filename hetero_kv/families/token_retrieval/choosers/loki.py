"""Loki (Singhania et al. 2024, arXiv:2406.02542): scores all keys by a few principal components."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.families.token_retrieval.choosers.best_tokens import BestTokens, CoarseScores
from hetero_kv.families.token_retrieval.choosers.chooser import LearnedState, TokenQuery
from hetero_kv.families.token_retrieval.choosers.chooser_settings import LokiSettings
from hetero_kv.families.token_retrieval.choosers.key_components import (
    keep_components,
    keys_in_parts,
    scores_by_components,
)
from hetero_kv.families.token_retrieval.choosers.settings import (
    part_of,
)
from hetero_kv.store.pool import BlockPool
from hetero_kv.store.pool_arrays import AuxiliaryArray


class Loki(BestTokens[LokiSettings]):
    """Algorithm 1. The components are those of the Context's first keys, recomputed after longer prompts."""

    learns = True
    reads_outside_lse = False

    def arrays(self, shape: KVShape) -> Mapping[str, AuxiliaryArray]:
        storage = self.settings.key_storage.for_representatives
        return {"key_components": AuxiliaryArray((self._components(shape.k_dim),), self.settings.block_size, storage)}

    def known_shapes(self, shape: KVShape) -> Mapping[str, tuple[tuple[int | None, ...], torch.dtype]]:
        return {"basis": ((shape.kv_heads, shape.k_dim, self._components(shape.k_dim)), torch.float32)}

    def finalize(self, pool: BlockPool, tables: np.ndarray, first: int, end: int, known: LearnedState) -> LearnedState:
        if not known:
            bases = [principal_components(keys_in_parts(pool, table, first, end)) for table in tables]
            known = {"basis": torch.stack(bases)[..., : self._components(bases[0].shape[2])].contiguous()}
        storage = self.settings.key_storage.for_representatives
        keep_components(pool, "key_components", storage, tables, first, end, known["basis"])
        return known

    def coarse(self, query: TokenQuery) -> CoarseScores:
        q = torch.from_numpy(query.q) @ query.known["basis"]
        scores, read = scores_by_components(query, "key_components", q)
        # Scores from a part of the components lack what all keys have in common. They are comparable only among
        # themselves.
        return CoarseScores(scores, torch.full(q.shape[:3], -torch.inf), read)

    def _components(self, k_dim: int) -> int:
        return part_of(self.settings.key_components, k_dim)


def principal_components(parts: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Directions of largest variance, in descending order, of keys [blocks, kv_heads, n, dim] that come in parts.

    Returns [kv_heads, dim, dim] float32, one direction per column.
    """
    count, total, products = 0, torch.zeros(()), torch.zeros(())
    for _, keys in parts:
        by_head = keys.transpose(0, 1).flatten(1, 2).double()
        count, total = count + by_head.shape[1], total + by_head.sum(dim=1)
        products = products + by_head.transpose(1, 2) @ by_head
    mean = total / count
    covariance = products / count - mean[:, :, None] * mean[:, None]
    return torch.linalg.eigh(covariance).eigenvectors.flip(2).float()
