"""Choosers that score every token of the Context coarsely, and attend to as many of the best as a budget says."""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from cpu_ops.top_k import top_k_blocks
from hetero_kv.families.token_retrieval.choosers.chooser import Answer, Asked, Attended, Chooser
from hetero_kv.families.token_retrieval.choosers.settings import BudgetedSettings

B = TypeVar("B", bound=BudgetedSettings)


class Coarse(NamedTuple):
    """Coarse scores of a step.

    Attributes:
        scores: of the Context's tokens, [rows, kv_heads, group, tokens] float32, as they go into a softmax.
        beside: log-sum-exp of those of all other tokens, [rows, kv_heads, group].
        read: bytes of a row that were read for them.
    """

    scores: torch.Tensor
    beside: torch.Tensor
    read: float


class BestTokens(Chooser[B], Generic[B]):
    """Each kv head takes the tokens that have most of the softmax over coarse scores, mean over its query heads."""

    choosing = frozenset(("token_budget",))

    @abstractmethod
    def coarse(self, asked: Asked) -> Coarse:
        """Coarse scores of the Context's tokens."""

    def attend(self, asked: Asked) -> Answer:
        coarse, count = self.coarse(asked), self.settings.budget(asked.tokens)
        total = torch.logaddexp(torch.logsumexp(coarse.scores, dim=3), coarse.beside)
        shares = torch.exp(coarse.scores - total[..., None])
        rows, kv_heads, _, tokens = shares.shape
        ranked = shares.mean(dim=2).view(rows * kv_heads, tokens).numpy()
        positions, counts = top_k_blocks(ranked, np.full(rows * kv_heads, tokens, np.int32), count)
        places = positions.reshape(rows, kv_heads, count)
        attended = asked.attend(places, counts.reshape(rows, kv_heads))
        answer = Answer(*attended, count, coarse.read)
        index = torch.from_numpy(places).long()[:, :, None].expand(-1, -1, shares.shape[2], -1)
        return self.completed(asked, coarse, shares.gather(3, index).sum(dim=3), attended, answer)

    def completed(
        self, asked: Asked, coarse: Coarse, chosen: torch.Tensor, attended: Attended, answer: Answer
    ) -> Answer:
        """The answer with what stands for the tokens that were not chosen; nothing does.

        chosen: the share of the softmax over coarse scores that the chosen tokens have, [rows, kv_heads, group].
        """
        return answer

    def attended_tokens(self, tokens: int) -> float:
        return self.settings.budget(tokens)

    def covers(self, tokens: int) -> bool:
        return self.settings.budget(tokens) >= tokens
