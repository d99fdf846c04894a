"""InfiniGen (Lee et al. 2024, arXiv:2406.19707): chooses a layer's tokens from the input of the layer before."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.cpu_ops.sparse_gather import token_scores
from hetero_kv.cpu_ops.top_k import top_k_blocks
from hetero_kv.families.token_retrieval.choosers.chooser import (
    Chooser,
    ChosenTokens,
    ContextAttention,
    LearnedState,
    TokenQuery,
    every_index,
)
from hetero_kv.families.token_retrieval.choosers.chooser_settings import InfiniGenSettings
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

# The weight of keys beside queries that are fewer than their channels: far above what rounding leaves of directions
# that no query has, far below what a query says.
_WEIGHT_OF_KEYS = 1e-6


class InfiniGen(Chooser[InfiniGenSettings]):
    """Section 4. Skewing and components are computed from the Context's first keys, and again after longer prompts."""

    learns = looks_ahead = True
    reads_outside_lse = False
    choosing = frozenset(("token_budget", "alpha"))

    @property
    def observed_queries(self) -> int:
        return self.settings.skew_queries

    def arrays(self, shape: KVShape) -> Mapping[str, AuxiliaryArray]:
        storage = self.settings.key_storage.for_representatives
        return {"partial_keys": AuxiliaryArray((self._components(shape.k_dim),), self.settings.block_size, storage)}

    def known_shapes(self, shape: KVShape) -> Mapping[str, tuple[tuple[int | None, ...], torch.dtype]]:
        return {"basis": ((shape.kv_heads, shape.k_dim, self._components(shape.k_dim)), torch.float32)}

    def learned(self, pool: BlockPool, tables: np.ndarray, first: int, end: int, queries: torch.Tensor) -> LearnedState:
        by_kv_head = queries.unflatten(1, (pool.keys.shape[1], -1)).flatten(2, 3)
        return self._skewed(pool, tables, first, end, by_kv_head)

    def finalize(self, pool: BlockPool, tables: np.ndarray, first: int, end: int, known: LearnedState) -> LearnedState:
        if not known:
            # A Context that grows during an answer has no prompt's queries: its keys replace them.
            keys = torch.stack([pool.decoded_keys(torch.from_numpy(ids[first:end].astype(np.int64))) for ids in tables])
            known = self._skewed(pool, tables, first, end, keys.float().transpose(1, 2).flatten(2, 3))
        storage = self.settings.key_storage.for_representatives
        keep_components(pool, "partial_keys", storage, tables, first, end, known["basis"])
        return known

    def _skewed(self, pool: BlockPool, tables: np.ndarray, first: int, end: int, queries: torch.Tensor) -> LearnedState:
        """The basis of each kv head, from queries [rows, kv_heads, n, k_dim] and the keys of blocks [first, end)."""
        bases = []
        for table, of_row in zip(tables, queries, strict=True):
            products = _mean_products(of_row)
            if of_row.shape[1] < of_row.shape[2]:
                # Rounding would determine the directions that no query has. The keys do instead.
                for ids, keys in keys_in_parts(pool, table, first, end):
                    share = _WEIGHT_OF_KEYS * len(ids) / (end - first)
                    products += share * _mean_products(keys.transpose(0, 1).flatten(1, 2))
            skewing = torch.linalg.eigh(products).eigenvectors.flip(2).float()
            sizes = (of_row @ skewing).abs().mean(dim=1)
            for _, keys in keys_in_parts(pool, table, first, end):
                sizes = sizes + (keys @ skewing).abs().mean(dim=2).sum(dim=0) / (end - first)
            # In component order, so that equal keys have equal bases.
            best = sizes.topk(self._components(skewing.shape[2]), dim=1).indices.sort(dim=1).values
            bases.append(skewing.gather(2, best[:, None].expand(-1, skewing.shape[1], -1)))
        return {"basis": torch.stack(bases)}

    def choose(self, query: TokenQuery) -> ChosenTokens:
        basis = query.known["basis"]
        partial = torch.from_numpy(query.q) @ basis
        scores, read = scores_by_components(query, "partial_keys", partial)
        around, read_around = self._scores_around(query, partial @ basis.transpose(2, 3))
        every = torch.cat([scores, around], dim=3)
        # A kv head takes the union of its query heads' tokens, ranked by the largest attention share of any of them: a
        # head with flat attention has many tokens near its maximum, and needs none of them.
        ranked = (scores - every.logsumexp(dim=3, keepdim=True)).amax(dim=2)
        near = (scores - every.amax(dim=3, keepdim=True)).amax(dim=2) >= -self.settings.alpha
        budget = self.settings.budget(query.tokens)
        # All kv heads of a layer fetch the same number of tokens: the mean of their near-maximum counts.
        average = near.sum(dim=2).float().mean(dim=1).round().int()
        each = average.clamp(min(1, budget), budget).tolist()
        positions = np.zeros((*ranked.shape[:2], max(each)), np.int32)
        for row, count in enumerate(each):
            all_tokens = np.full(ranked.shape[1], query.tokens, np.int32)
            positions[row, :, :count] = top_k_blocks(ranked[row].numpy(), all_tokens, count)[0]
        counts = np.repeat(np.array(each, np.int32)[:, None], ranked.shape[1], axis=1)
        return ChosenTokens(positions, counts, read + read_around)

    def _scores_around(self, query: TokenQuery, q: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Scores of all tokens outside the Context but the newest, [rows, kv_heads, group, tokens], and bytes read."""
        ids, (rows, kv_heads) = query.other_blocks, q.shape[:2]
        tokens = int(query.lengths[ids[0]].sum()) - 1
        positions = every_index(rows, kv_heads, tokens)
        counts, pool = np.full((rows, kv_heads), tokens, np.int32), query.pool
        lists = np.ascontiguousarray(ids), positions, counts
        products = token_scores(q.contiguous().numpy(), pool.key_array, *lists, pool.offset_array, query.threads)
        return query.capped(torch.from_numpy(products)), tokens * pool.keys[0].nbytes / pool.block_size

    def attend(self, query: TokenQuery) -> ContextAttention:
        choice = self.choose(query) if query.ahead is None else query.ahead
        attended = query.attend(choice.positions, choice.counts)
        return ContextAttention(*attended, float(choice.counts.mean()), choice.read)

    def attended_tokens(self, tokens: int) -> float:
        return self.settings.budget(tokens)

    def _components(self, k_dim: int) -> int:
        return part_of(self.settings.partial_components, k_dim)


def _mean_products(vectors: torch.Tensor) -> torch.Tensor:
    """The mean outer product of [kv_heads, n, dim], [kv_heads, dim, dim] float64.

    Its eigenvectors are the right singular vectors of queries. Rotating queries and keys by them preserves their
    products and concentrates these in few components (section 4.3).
    """
    exact = vectors.double()
    return exact.transpose(1, 2) @ exact / vectors.shape[1]
