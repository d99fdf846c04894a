"""SparQ (Ribar et al. 2023, arXiv:2312.04985): a query's largest components choose the keys to read whole."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.cpu_ops.component_scores import component_scores
from hetero_kv.families.token_retrieval.choosers.best_tokens import BestTokens, CoarseScores
from hetero_kv.families.token_retrieval.choosers.chooser import (
    ContextAttention,
    LearnedState,
    TokenAttention,
    TokenQuery,
    encoded,
    merged,
)
from hetero_kv.families.token_retrieval.choosers.chooser_settings import SparQSettings
from hetero_kv.families.token_retrieval.choosers.settings import (
    part_of,
)
from hetero_kv.store.pool import BlockPool
from hetero_kv.store.pool_arrays import AuxiliaryArray
from hetero_kv.store.storage import FP32

# Blocks transposed at once; this bounds the temporary float32 copy of their keys.
_AT_ONCE = 64


class SparQ(BestTokens[SparQSettings]):
    """Algorithm 1. The pool stores keys a second time, component by component."""

    choosing = BestTokens.choosing | {"query_components", "mean_value"}

    def arrays(self, shape: KVShape) -> Mapping[str, AuxiliaryArray]:
        storage = self.settings.key_storage.for_representatives
        columns = AuxiliaryArray((shape.k_dim,), self.settings.block_size, storage)
        return {"key_columns": columns, "value_means": AuxiliaryArray((), shape.v_dim, FP32)}

    def finalize(self, pool: BlockPool, tables: np.ndarray, first: int, end: int, known: LearnedState) -> LearnedState:
        storage = self.settings.key_storage.for_representatives
        for table in tables:
            for start in range(first, end, _AT_ONCE):
                ids = torch.from_numpy(table[start : min(start + _AT_ONCE, end)].astype(np.int64))
                columns = pool.decoded_keys(ids).float().transpose(2, 3)
                pool.auxiliary["key_columns"][ids] = encoded(storage, columns.contiguous())
                pool.auxiliary["value_means"][ids] = pool.value_storage.decode(pool.values[ids]).float().mean(dim=2)
        return known

    def coarse(self, query: TokenQuery) -> CoarseScores:
        q, columns = torch.from_numpy(query.q), query.pool.auxiliary_kernel_arrays["key_columns"]
        r = part_of(self.settings.query_components, q.shape[3])
        # The query heads of a kv head use the same components, because they read the same keys.
        chosen = q.abs().sum(dim=2).topk(r, dim=2).indices.sort(dim=2).values
        index = chosen[:, :, None].expand(-1, -1, q.shape[2], -1)
        kept = q.gather(3, index)
        # The softmax temperature accounts for the components' share of the query's L1 norm.
        tiny = torch.finfo(torch.float32).tiny
        norms = kept.abs().sum(dim=3, keepdim=True) / q.abs().sum(dim=3, keepdim=True).clamp_min(tiny)
        kept = kept / norms.clamp_min(tiny).sqrt()
        table, components = query.context, chosen.int().contiguous().numpy()
        products = component_scores(kept.contiguous().numpy(), components, columns, table, query.threads)
        masked = torch.zeros_like(q).scatter_(3, index, kept)
        _, outside_lse = query._replace(q=masked.numpy()).attend_blocks(query.other_blocks)
        # For tokens outside the Context whole keys are read.
        whole = query.other_blocks.shape[1] * query.pool.keys[0].nbytes
        read = query.tokens * q.shape[1] * r * columns.itemsize + whole
        return CoarseScores(query.capped(torch.from_numpy(products)), outside_lse, read)

    def completed(
        self,
        query: TokenQuery,
        coarse: CoarseScores,
        chosen: torch.Tensor,
        attended: TokenAttention,
        answer: ContextAttention,
    ) -> ContextAttention:
        total = torch.logaddexp(torch.logsumexp(coarse.scores, dim=3), coarse.outside_lse)
        share = (chosen + torch.exp(coarse.outside_lse - total)).clamp(max=1.0)
        answer = answer._replace(share=float(share.mean()))
        if not self.settings.mean_value:
            return answer
        means = query.pool.auxiliary["value_means"]
        value = torch.stack([means[torch.from_numpy(ids.astype(np.int64))].mean(dim=0) for ids in query.context])
        # If the attended tokens have share s, the rest has (1 - s) / s times their mass.
        rest = torch.logaddexp(attended.lse, query.outside_lse) + torch.log1p(-share) - torch.log(share)
        out, lse = merged((attended.out, attended.lse), (value[:, :, None].expand_as(attended.out), rest))
        return answer._replace(out=out, lse=lse, read=answer.read + (query.end - query.first) * means[0].nbytes)
