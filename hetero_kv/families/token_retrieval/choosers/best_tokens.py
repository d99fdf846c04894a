"""Choosers that score every Context token approximately and attend to the best ones, within a budget."""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from hetero_kv.cpu_ops.top_k import top_k_blocks
from hetero_kv.families.token_retrieval.choosers.chooser import Chooser, ContextAttention, TokenAttention, TokenQuery
from hetero_kv.families.token_retrieval.choosers.settings import BudgetedSettings

B = TypeVar("B", bound=BudgetedSettings)


class CoarseScores(NamedTuple):
    """Approximate scores of a step.

    Attributes:
        scores: of the Context's tokens, [rows, kv_heads, group, tokens] float32, scaled and capped for the softmax.
        outside_lse: log-sum-exp of the scores of all other tokens, [rows, kv_heads, group].
        read: bytes read to compute them, per row.
    """

    scores: torch.Tensor
    outside_lse: torch.Tensor
    read: float


class BestTokens(Chooser[B], Generic[B]):
    """Each kv head takes the tokens with the largest softmax of approximate scores, averaged over its query heads."""

    choosing = frozenset(("token_budget",))

    @abstractmethod
    def coarse(self, query: TokenQuery) -> CoarseScores:
        """Returns approximate scores of the Context's tokens."""

    def attend(self, query: TokenQuery) -> ContextAttention:
        coarse, count = self.coarse(query), self.settings.budget(query.tokens)
        total = torch.logaddexp(torch.logsumexp(coarse.scores, dim=3), coarse.outside_lse)
        shares = torch.exp(coarse.scores - total[..., None])
        rows, kv_heads, _, tokens = shares.shape
        ranked = shares.mean(dim=2).view(rows * kv_heads, tokens).numpy()
        positions, counts = top_k_blocks(ranked, np.full(rows * kv_heads, tokens, np.int32), count)
        places = positions.reshape(rows, kv_heads, count)
        attended = query.attend(places, counts.reshape(rows, kv_heads))
        answer = ContextAttention(*attended, count, coarse.read)
        index = torch.from_numpy(places).long()[:, :, None].expand(-1, -1, shares.shape[2], -1)
        return self.completed(query, coarse, shares.gather(3, index).sum(dim=3), attended, answer)

    def completed(
        self,
        query: TokenQuery,
        coarse: CoarseScores,
        chosen: torch.Tensor,
        attended: TokenAttention,
        answer: ContextAttention,
    ) -> ContextAttention:
        """Returns the answer with an estimate for the tokens that were not chosen. The default adds none.

        chosen: the chosen tokens' share of the softmax over approximate scores, [rows, kv_heads, group].
        """
        return answer

    def attended_tokens(self, tokens: int) -> float:
        return self.settings.budget(tokens)

    def covers(self, tokens: int) -> bool:
        return self.settings.budget(tokens) >= tokens
