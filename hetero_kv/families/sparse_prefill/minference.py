"""MInference (arXiv:2407.02490): a sparse pattern for every head, found once by what it costs and how far it is off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from cpu_ops.key_runs import QUERY_BLOCK
from hetero_kv.families.sparse_prefill.chunk import Chunk
from hetero_kv.families.sparse_prefill.head_views import HeadView, views
from hetero_kv.families.sparse_prefill.lists import Blocks, Lines

Kind = Literal["a_shape", "vertical_slash", "block_sparse"]
KINDS: tuple[Kind, ...] = ("a_shape", "vertical_slash", "block_sparse")

#: Last queries by which patterns are tried.
_TRIED_QUERIES = 512
# Shares of the budget that are sinks of an A-shape (the paper's 1,024 of 5,120), and lines of a vertical-slash.
_SINK_SHARE, _LINE_SHARES = 0.2, (1 / 32, 1 / 8, 1 / 2, 7 / 8)
# Budgets that are tried, of the whole.
_BUDGETS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)


@dataclass(frozen=True)
class Pattern:
    """How one head chooses keys.

    Attributes:
        kind: which pattern.
        first: sinks of an A-shape, lines of a vertical-slash; tokens.
        rest: its window, its slashes' tokens, or the tokens of chosen blocks.
    """

    kind: Kind
    first: int
    rest: int

    def keys(self, view: HeadView) -> Lines | Blocks:
        """The keys of one row and head."""
        if self.kind == "a_shape":
            return Lines.of(np.arange(self.first), np.arange(self.rest))
        if self.kind == "vertical_slash":
            return view.lines_within(self.first, self.rest)
        scores = view.block_scores()
        count = min(scores.shape[1], self.rest // QUERY_BLOCK)
        best = scores.topk(count, dim=1).indices
        chosen = torch.zeros(scores.shape, dtype=torch.bool).scatter_(1, best, value=True)
        chosen[:, 0] = True
        return Blocks(chosen.numpy())


def candidates(budget: int) -> list[Pattern]:
    """What the search tries, patterns of so many tokens at most."""
    found = []
    for share in _BUDGETS:
        tokens = int(budget * share)
        sink = int(tokens * _SINK_SHARE)
        found.append(Pattern("a_shape", sink, tokens - sink))
        for line_share in _LINE_SHARES:
            lines = int(tokens * line_share)
            found.append(Pattern("vertical_slash", lines, tokens - lines))
        found.append(Pattern("block_sparse", 0, tokens))
    return found


def keys_of(chunk: Chunk, patterns: Sequence[Pattern]) -> list[Lines | Blocks]:
    """The keys of all rows and heads under the heads' patterns."""
    by_line = {head for head, pattern in enumerate(patterns) if pattern.kind == "vertical_slash"}
    return [patterns[view.head].keys(view) for view in views(chunk, by_line)]


def found_patterns(chunk: Chunk, exact: torch.Tensor, budget: int, price: float) -> list[Pattern]:
    """The pattern of each head: of all that are tried, the one whose error and tokens weigh least together.

    Errors are squared, and relative to the mean of the heads, so that a head that says little may be off by more. A
    price that is the same in all layers takes tokens from where they save little to where they save much: the least
    error of the model's layers together that so many tokens can have.

    Args:
        chunk: behind the whole prompt.
        exact: [batch, heads, n, v_dim], its full attention.
        budget: tokens that a block of queries attends to at most.
        price: the error that 1,024 tokens fewer may cost.
    """
    n = min(_TRIED_QUERIES, chunk.n // QUERY_BLOCK * QUERY_BLOCK or chunk.n)
    tried = chunk.last(n)
    wanted = exact[:, :, -n:].float()
    mean = wanted.square().sum() / wanted.shape[1]
    heads = views(tried)
    patterns = candidates(budget)
    errors, tokens = [], []
    for pattern in patterns:
        out, _, attended = tried.attention([pattern.keys(view) for view in heads])
        errors.append(((out.float() - wanted).square().sum(dim=(0, 2, 3)) / mean).double().numpy())
        tokens.append(attended.mean(axis=0))
    return [patterns[index] for index in preferred(np.stack(errors), np.stack(tokens), price)]


def preferred(errors: np.ndarray, tokens: np.ndarray, price: float) -> np.ndarray:
    """The index of the pattern of each head, [heads], from [patterns, heads] errors and tokens each."""
    weights = errors + price * tokens / 1024
    return np.lexsort((tokens, weights), axis=0)[0]
