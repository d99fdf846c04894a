"""MInference (arXiv:2407.02490): a sparse pattern for every head, found once by what it costs and how far it is off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from cpu_ops.key_runs import QUERY_BLOCK
from hetero_kv.families.sparse_prefill.chunk import Chunk
from hetero_kv.families.sparse_prefill.head_views import HeadView, views, with_matched_blocks
from hetero_kv.families.sparse_prefill.lists import Blocks, Lines

Kind = Literal["a_shape", "vertical_slash", "block_sparse"]
KINDS: tuple[Kind, ...] = ("a_shape", "vertical_slash", "block_sparse")

#: Last queries by which patterns are tried.
TRIED_QUERIES = 512
# Shares of the budget that are sinks of an A-shape (the paper's 1,024 of 5,120), and lines of a vertical-slash.
_SINK_SHARE, _LINE_SHARES = 0.2, (1 / 32, 1 / 8, 1 / 2, 7 / 8)
# Budgets that are tried, of the whole.
_BUDGETS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
# Tokens of a context up to which the price is what the settings say, and no blocks are matched.
_PRICED_LENGTH = 16384


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


def keys_of(chunk: Chunk, patterns: Sequence[Pattern], matches: int = 0) -> list[Lines | Blocks]:
    """The keys of all rows and heads under the heads' patterns.

    matches: blocks of keys that a block of queries has besides where its pattern is not of blocks: those that it
    matches best. What some tokens in the middle of a chunk look for by its content, such as a sentence that is nearly
    theirs, the chunk's last queries do not show.
    """
    by_line = {head for head, pattern in enumerate(patterns) if pattern.kind == "vertical_slash"}
    keys = [patterns[view.head].keys(view) for view in views(chunk, by_line)]
    return with_matched_blocks(chunk, keys, matches) if matches else keys


@dataclass(frozen=True)
class Tried:
    """A pattern as the search saw it on one head.

    Attributes:
        pattern: how the head chose keys.
        error: of its output, squared, relative to the mean of its layer's heads.
        tokens: that a block of queries attended to, the mean over blocks.
    """

    pattern: Pattern
    error: float
    tokens: float


def tried_patterns(chunk: Chunk, exact: torch.Tensor, budget: int) -> list[list[Tried]]:
    """What each head's patterns cost, and how far each is off: those that some price prefers, by rising tokens.

    Errors are squared, and relative to the mean of the heads, so that a head that says little may be off by more.

    Args:
        chunk: behind the whole prompt.
        exact: [batch, heads, n, v_dim], its full attention.
        budget: tokens that a block of queries attends to at most.
    """
    n = min(TRIED_QUERIES, chunk.n // QUERY_BLOCK * QUERY_BLOCK or chunk.n)
    tried = chunk.last(n)
    wanted = exact[:, :, -n:].float()
    # Heads that all say nothing are off by nothing.
    mean = (wanted.square().sum() / wanted.shape[1]).clamp(min=torch.finfo(torch.float32).tiny)
    by_row, heads = views(tried), wanted.shape[1]
    found: list[list[Tried]] = [[] for _ in range(heads)]
    for pattern in candidates(budget):
        out, _, attended = tried.attention([pattern.keys(view) for view in by_row])
        errors = ((out.float() - wanted).square().sum(dim=(0, 2, 3)) / mean).tolist()
        for head, error, tokens in zip(range(heads), errors, attended.mean(axis=0).tolist(), strict=True):
            found[head].append(Tried(pattern, error, tokens))
    return [worth_their_tokens(each) for each in found]


def worth_their_tokens(tried: Sequence[Tried]) -> list[Tried]:
    """Those that some price prefers, by rising tokens: the lower convex hull of errors over tokens."""
    kept: list[Tried] = []
    for each in sorted(tried, key=lambda each: (each.tokens, each.error)):
        if kept and not each.error < kept[-1].error:
            continue
        while len(kept) > 1 and _gain(kept[-2], kept[-1]) <= _gain(kept[-2], each):
            kept.pop()
        kept.append(each)
    return kept


def _gain(few: Tried, many: Tried) -> float:
    """What a token more saves of the error."""
    return (few.error - many.error) / (many.tokens - few.tokens)


def preferred(tried: Sequence[Tried], price: float) -> Pattern:
    """The pattern of a head whose error and tokens weigh least together.

    A price that is the same in all layers takes tokens from where they save little to where they save much: the least
    error of the model's layers together that so many tokens can have.

    Args:
        tried: by rising tokens.
        price: the error that 1,024 tokens fewer may cost.
    """
    return min(tried, key=lambda each: each.error + price * each.tokens / 1024).pattern


def matches_at(matches: int, length: int) -> int:
    """How many blocks are matched in a context of `length`: none up to 16,384 tokens.

    There the search for them takes much of what a sparse prefill gains.
    """
    return matches if length > _PRICED_LENGTH else 0


def price_at(price: float, length: int) -> float:
    """What 1,024 tokens weigh in a context of `length`: beyond 16,384 tokens less, by the square of the length.

    There a token is a smaller share of what full attention takes, and what queries leave out adds up over more of them.
    """
    return price * min(1.0, (_PRICED_LENGTH / length) ** 2)
