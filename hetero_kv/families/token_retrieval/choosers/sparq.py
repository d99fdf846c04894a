"""SparQ (Ribar et al. 2023, arXiv:2312.04985): a query's largest components tell which keys are worth reading whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from cpu_ops.component_scores import component_scores
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.families.token_retrieval.choosers.best_tokens import BestTokens, Coarse
from hetero_kv.families.token_retrieval.choosers.chooser import Answer, Asked, Attended, Known, encoded, merged
from hetero_kv.families.token_retrieval.choosers.registry import register
from hetero_kv.families.token_retrieval.choosers.settings import (
    BudgetedSettings,
    chooser_setting,
    part_of,
    require_share,
)
from hetero_kv.settings.setting import setting
from hetero_kv.store.pool import Beside, BlockPool
from hetero_kv.store.storage import FP32

# Blocks that are turned at once: bounds the float32 copy of their keys.
_AT_ONCE = 64


@dataclass(frozen=True)
class SparQSettings(BudgetedSettings):
    """SparQ: the query's largest components score all keys; the mean value stands for what is not read."""

    chooser: str = chooser_setting("sparq")
    query_components: int | float = setting(
        0.25,
        "components of a query by which all keys are scored, its largest: a whole number, or a number up to 1.0 as the "
        "share of its dimension",
        minimum=0,
    )
    mean_value: bool = setting(
        True, "the mean value of the Context stands for the tokens that are not attended to, with their estimated share"
    )

    def validate(self) -> None:
        """Check settings against each other. Raises SettingError."""
        super().validate()
        require_share("query_components", self.query_components, "components")


@register(
    "sparq",
    meaning="scores keys by the query's largest components; the mean value stands for what is not attended to (SparQ)",
    settings=SparQSettings,
)
class SparQ(BestTokens[SparQSettings]):
    """Algorithm 1. Keys lie a second time in the pool, component by component."""

    choosing = BestTokens.choosing | {"query_components", "mean_value"}

    def arrays(self, shape: KVShape) -> Mapping[str, Beside]:
        storage = self.settings.key_storage.for_representatives
        columns = Beside((shape.k_dim,), self.settings.block_size, storage)
        return {"key_columns": columns, "value_means": Beside((), shape.v_dim, FP32)}

    def close(self, pool: BlockPool, tables: np.ndarray, first: int, end: int, known: Known) -> Known:
        storage = self.settings.key_storage.for_representatives
        for table in tables:
            for start in range(first, end, _AT_ONCE):
                ids = torch.from_numpy(table[start : min(start + _AT_ONCE, end)].astype(np.int64))
                columns = pool.decoded_keys(ids).float().transpose(2, 3)
                pool.beside["key_columns"][ids] = encoded(storage, columns.contiguous())
                pool.beside["value_means"][ids] = pool.value_storage.decode(pool.values[ids]).float().mean(dim=2)
        return known

    def coarse(self, asked: Asked) -> Coarse:
        q, columns = torch.from_numpy(asked.q), asked.pool.beside_arrays["key_columns"]
        r = part_of(self.settings.query_components, q.shape[3])
        # One choice of components for the query heads of a kv head, which read the same keys.
        chosen = q.abs().sum(dim=2).topk(r, dim=2).indices.sort(dim=2).values
        index = chosen[:, :, None].expand(-1, -1, q.shape[2], -1)
        kept = q.gather(3, index)
        # The temperature: as much as the components are of the query's L1 norm.
        tiny = torch.finfo(torch.float32).tiny
        norms = kept.abs().sum(dim=3, keepdim=True) / q.abs().sum(dim=3, keepdim=True).clamp_min(tiny)
        kept = kept / norms.clamp_min(tiny).sqrt()
        table, given = asked.context, chosen.int().contiguous().numpy()
        products = component_scores(kept.contiguous().numpy(), given, columns, table, asked.threads)
        masked = torch.zeros_like(q).scatter_(3, index, kept)
        _, beside = asked._replace(q=masked.numpy()).attend_blocks(asked.elsewhere)
        # Of the others, components are read out of whole keys.
        whole = asked.elsewhere.shape[1] * asked.pool.keys[0].nbytes
        read = asked.tokens * q.shape[1] * r * columns.itemsize + whole
        return Coarse(asked.capped(torch.from_numpy(products)), beside, read)

    def completed(
        self, asked: Asked, coarse: Coarse, chosen: torch.Tensor, attended: Attended, answer: Answer
    ) -> Answer:
        total = torch.logaddexp(torch.logsumexp(coarse.scores, dim=3), coarse.beside)
        share = (chosen + torch.exp(coarse.beside - total)).clamp(max=1.0)
        answer = answer._replace(share=float(share.mean()))
        if not self.settings.mean_value:
            return answer
        means = asked.pool.beside["value_means"]
        value = torch.stack([means[torch.from_numpy(ids.astype(np.int64))].mean(dim=0) for ids in asked.context])
        # What has a share of s makes all of s + (1 - s): the rest stands in that proportion to what was attended to.
        rest = torch.logaddexp(attended.lse, asked.beside) + torch.log1p(-share) - torch.log(share)
        out, lse = merged((attended.out, attended.lse), (value[:, :, None].expand_as(attended.out), rest))
        return answer._replace(out=out, lse=lse, read=answer.read + (asked.end - asked.first) * means[0].nbytes)
