"""RetroInfer (Chen et al. 2025, arXiv:2505.02922): clusters keys, reads the best clusters and estimates the next."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.cpu_ops.component_scores import component_scores
from hetero_kv.families.token_retrieval.choosers.chooser import (
    Chooser,
    ContextAttention,
    LearnedState,
    TokenAttention,
    TokenQuery,
    encoded,
    every_index,
    merged,
)
from hetero_kv.families.token_retrieval.choosers.chooser_settings import RetroInferSettings
from hetero_kv.families.token_retrieval.choosers.settings import part_of
from hetero_kv.families.token_retrieval.clustered_context import ClusterChoice
from hetero_kv.gpu_ops.cluster_choice import ClusterBudget
from hetero_kv.store.pool import BlockPool
from hetero_kv.store.pool_arrays import AuxiliaryArray
from hetero_kv.store.storage import FP32, StorageType

#: Cluster indices.
_NUMBERS = StorageType("numbers", "float32", "int32", 4, "whole numbers: 4 bytes each")
# The paper's value.
_ITERATIONS = 10


class RetroInfer(Chooser[RetroInferSettings]):
    """Section 4. A segment's clusters are stored evenly with its blocks, and numbered through the sequence."""

    learns = True
    choosing = frozenset(("exact_clusters", "estimated_clusters"))

    @classmethod
    def gpu_obstacle(cls, settings: RetroInferSettings) -> str | None:
        if settings.offset_keys:
            return "single tokens are attended to of keys that are stored as differences (key_offset)"
        if not settings.key_storage.is_plain:
            return f"single tokens are attended to of keys in {settings.key_storage.name} (key_type)"
        return None

    def on_gpu(self, sink_blocks: int) -> ClusterChoice:
        budget = ClusterBudget(self.settings.exact_clusters, self.settings.estimated_clusters)
        return ClusterChoice(budget, self._of_block, self.settings.block_size, sink_blocks)

    def arrays(self, shape: KVShape) -> Mapping[str, AuxiliaryArray]:
        each, storage = self._of_block, self.settings.key_storage.for_representatives
        return {
            "cluster_keys": AuxiliaryArray((shape.k_dim,), each, storage),
            "cluster_values": AuxiliaryArray((each,), shape.v_dim, FP32),
            "cluster_sizes": AuxiliaryArray((), each, FP32),
            "clusters": AuxiliaryArray((), self.settings.block_size, _NUMBERS),
        }

    @property
    def segment_tokens(self) -> int:
        return self.settings.segment_tokens

    def known_shapes(self, shape: KVShape) -> Mapping[str, tuple[tuple[int | None, ...], torch.dtype]]:
        return {"segment_ends": ((None,), torch.int64)}

    def is_outgrown(self, learned: int, tokens: int) -> bool:
        # New tokens form new clusters; earlier ones stay.
        return False

    def kept_until(self, known: LearnedState, learned: int, full: int, context_end: int) -> int:
        # A cluster has tokens from all blocks of its segment, so only whole segments within the Context stay valid.
        return max((end for end in known["segment_ends"][0].tolist() if 0 < end <= context_end), default=0)

    def finalize(self, pool: BlockPool, tables: np.ndarray, first: int, end: int, known: LearnedState) -> LearnedState:
        size = max(1, self.settings.segment_tokens // self.settings.block_size)
        ends = [*range(first + size, end, size), end]
        for table in tables:
            for start, stop in zip([first, *ends], ends, strict=False):
                self._cluster(pool, table[start:stop], start)
        before = [each for each in known["segment_ends"][0].tolist() if each <= first] if known else []
        return {"segment_ends": torch.tensor([before + ends] * len(tables))}

    def _cluster(self, pool: BlockPool, ids: np.ndarray, start: int) -> None:
        """Cluster the tokens of a row's blocks `ids`; the first is block `start` of the sequence."""
        index, each = torch.from_numpy(ids.astype(np.int64)), self._of_block
        keys = pool.decoded_keys(index).float().transpose(0, 1).flatten(1, 2)
        values = pool.value_storage.decode(pool.values[index]).float().transpose(0, 1).flatten(1, 2)
        count = len(ids) * each
        nearest = spherical_clusters(keys, count)
        sizes = torch.zeros(len(keys), count).scatter_add_(1, nearest, torch.ones(nearest.shape))
        means = _sums(keys, nearest, count) / sizes.clamp(min=1)[..., None]
        by_block = (
            part.unflatten(1, (len(ids), each)).transpose(0, 1) for part in (means, _sums(values, nearest, count))
        )
        cluster_keys, cluster_values = by_block
        storage = self.settings.key_storage.for_representatives
        pool.auxiliary["cluster_keys"][index] = encoded(storage, cluster_keys.transpose(2, 3).contiguous())
        pool.auxiliary["cluster_values"][index] = cluster_values
        pool.auxiliary["cluster_sizes"][index] = sizes.unflatten(1, (len(ids), each)).transpose(0, 1)
        numbered = (nearest + start * each).to(torch.int32)
        pool.auxiliary["clusters"][index] = numbered.unflatten(1, (len(ids), -1)).transpose(0, 1)

    def attend(self, query: TokenQuery) -> ContextAttention:
        rows, kv_heads, _, k_dim = query.q.shape
        sizes = _of_context(query, "cluster_sizes").flatten(2)
        every = every_index(rows, kv_heads, k_dim)
        columns = query.pool.auxiliary_kernel_arrays["cluster_keys"]
        products = component_scores(query.q, every, columns, query.context, query.threads)
        # Weighted by the cluster's size; empty clusters get weight 0.
        scores = query.capped(torch.from_numpy(products)) + sizes.log()[:, :, None]
        best = scores.softmax(dim=3).mean(dim=2).argsort(dim=2, descending=True, stable=True)
        total = best.shape[2]
        exact = part_of(self.settings.exact_clusters, total)
        estimated = best[:, :, exact : exact + self._estimated(total, exact)]
        attended, tokens = self._attend_exactly(query, best[:, :, :exact], total)
        out, lse = self._attend_to_means(query, scores, sizes, estimated)
        share = torch.sigmoid(torch.logaddexp(attended.mass, query.outside_lse) - lse)
        of_cluster, of_token = k_dim * columns.itemsize + sizes.itemsize, query.pool.auxiliary["clusters"].itemsize
        read = total * of_cluster + query.tokens * of_token + estimated.shape[2] * out.shape[3] * out.itemsize
        both = merged((attended.out, attended.lse), (out, lse))
        return ContextAttention(*both, attended.mass, tokens, kv_heads * read, float(share.mean()))

    def _attend_exactly(self, query: TokenQuery, chosen: torch.Tensor, total: int) -> tuple[TokenAttention, float]:
        """Attention to the tokens of `chosen` [rows, kv_heads, n] of `total` clusters, and the mean number per head."""
        numbers = _of_context(query, "clusters").flatten(2).long() - query.first * self._of_block
        is_chosen = torch.zeros(*chosen.shape[:2], total, dtype=torch.bool).scatter_(2, chosen, True)
        is_read = is_chosen.gather(2, numbers).numpy()
        counts = is_read.sum(axis=2, dtype=np.int32)
        positions = np.zeros((*counts.shape, max(1, int(counts.max()))), np.int32)
        for row, head in np.ndindex(*counts.shape):
            positions[row, head, : counts[row, head]] = np.flatnonzero(is_read[row, head])
        return query.attend(positions, counts), float(counts.mean())

    def _attend_to_means(
        self, query: TokenQuery, scores: torch.Tensor, sizes: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention to the `chosen` [rows, kv_heads, n] clusters, as if their tokens had mean keys and values.

        scores: [rows, kv_heads, group, clusters], weighted by cluster size.

        Returns out [rows, kv_heads, group, v_dim] and lse.
        """
        each, context = self._of_block, torch.from_numpy(query.context.astype(np.int64))
        ids = context.gather(1, chosen.div(each, rounding_mode="floor").flatten(1)).view_as(chosen)
        heads = torch.arange(chosen.shape[1])[None, :, None]
        sums = query.pool.auxiliary["cluster_values"][ids, heads, chosen % each]
        taken = scores.gather(3, chosen[:, :, None].expand(-1, -1, scores.shape[2], -1))
        lse = torch.logsumexp(taken, dim=3)
        weights = torch.exp(taken - lse.masked_fill(torch.isneginf(lse), 0)[..., None])
        return weights @ (sums / sizes.gather(2, chosen).clamp(min=1)[..., None]), lse

    def attended_tokens(self, tokens: int) -> float:
        total = tokens // self.settings.cluster_tokens
        return tokens * part_of(self.settings.exact_clusters, total) / total if total else 0

    def covers(self, tokens: int) -> bool:
        total = tokens // self.settings.cluster_tokens
        return part_of(self.settings.exact_clusters, total) >= total if total else True

    @property
    def _of_block(self) -> int:
        return self.settings.block_size // self.settings.cluster_tokens

    def _estimated(self, total: int, exact: int) -> int:
        estimated = self.settings.estimated_clusters
        return min(part_of(estimated, total) if estimated else 0, total - exact)


def spherical_clusters(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Assign keys [heads, n, dim] to `count` clusters by direction (spherical k-means): cluster indices [heads, n].

    Directions are relative to the mean key, because keys share a large common part. Initial centres are keys at equal
    steps. Ties go to the first centre; clusters may be empty.
    """
    directions = torch.nn.functional.normalize(keys - keys.mean(dim=1, keepdim=True), dim=2)
    centres = directions[:, (2 * torch.arange(count) + 1) * keys.shape[1] // (2 * count)]
    for _ in range(_ITERATIONS):
        sums = _sums(directions, _nearest(directions, centres), count)
        is_empty = sums.abs().sum(dim=2, keepdim=True) == 0
        centres = torch.where(is_empty, centres, torch.nn.functional.normalize(sums, dim=2))
    return _nearest(directions, centres)


def _nearest(directions: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    # Per head, because a segment has many inner products. NumPy's argmax over rows takes a fifth of torch's time.
    pairs = zip(directions, centres, strict=True)
    return torch.stack([torch.from_numpy((of_head @ to.T).numpy().argmax(axis=1)) for of_head, to in pairs])


def _sums(vectors: torch.Tensor, which: torch.Tensor, count: int) -> torch.Tensor:
    """Sums of vectors [heads, n, dim] per group, for `count` groups: [heads, count, dim]."""
    sums = vectors.new_zeros(len(vectors), count, vectors.shape[2])
    return sums.scatter_add_(1, which[..., None].expand_as(vectors), vectors)


def _of_context(query: TokenQuery, name: str) -> torch.Tensor:
    """An array of the Context's blocks, by name: [rows, kv_heads, blocks, ...]."""
    return query.pool.auxiliary[name][torch.from_numpy(query.context.astype(np.int64))].transpose(1, 2)
