"""MInference (arXiv:2407.02490): a sparse pattern per head, found once by its cost in tokens and its error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK
from hetero_kv.families.sparse_prefill.chunk import Chunk
from hetero_kv.families.sparse_prefill.head_views import HeadView, views, with_matched_blocks
from hetero_kv.families.sparse_prefill.key_lists import KeyBlocks, KeyLines
from hetero_kv.gpu_ops.host_copies import on_host

Kind = Literal["a_shape", "vertical_slash", "block_sparse"]
KINDS: tuple[Kind, ...] = ("a_shape", "vertical_slash", "block_sparse")

#: Number of last queries on which patterns are measured.
TRIED_QUERIES = 512
# Shares of the budget that are sinks of an A-shape (the paper's 1,024 of 5,120), and lines of a vertical-slash.
_SINK_SHARE, _LINE_SHARES = 0.2, (1 / 32, 1 / 8, 1 / 2, 7 / 8)
# Shares of the budget that are tried.
_BUDGETS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
# Up to this many tokens of context the price is the setting's, and no blocks are matched.
_PRICED_LENGTH = 16384


@dataclass(frozen=True)
class Pattern:
    """How one head chooses keys.

    Attributes:
        kind: the kind of pattern.
        first: tokens of the sink (A-shape) or of the vertical lines (vertical-slash).
        rest: tokens of the window (A-shape), of the slashes (vertical-slash) or of the chosen blocks (block-sparse).
    """

    kind: Kind
    first: int
    rest: int

    def keys(self, view: HeadView) -> KeyLines | KeyBlocks:
        """The keys of one row and head."""
        if self.kind == "a_shape":
            return KeyLines.of(np.arange(self.first), np.arange(self.rest))
        if self.kind == "vertical_slash":
            return view.lines_within(self.first, self.rest)
        scores = view.block_scores()
        count = min(scores.shape[1], self.rest // QUERY_BLOCK)
        best = scores.topk(count, dim=1).indices
        chosen = torch.zeros(scores.shape, dtype=torch.bool).scatter_(1, best, value=True)
        chosen[:, 0] = True
        return KeyBlocks(chosen.numpy())


def candidates(budget: int) -> list[Pattern]:
    """The patterns that the search tries, each with at most `budget` tokens."""
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


def keys_of(chunk: Chunk, patterns: Sequence[Pattern], matches: int = 0) -> list[KeyLines | KeyBlocks]:
    """The keys of all rows and heads under the heads' patterns.

    matches: key blocks that a query block gets in addition, if its pattern is not block-sparse: those that it matches
    best. Tokens in the middle of a chunk may need keys of similar content, such as a nearly equal sentence, that the
    chunk's last queries do not attend to.
    """
    by_line = {head for head, pattern in enumerate(patterns) if pattern.kind == "vertical_slash"}
    keys = [patterns[view.head].keys(view) for view in views(chunk, by_line)]
    return with_matched_blocks(chunk, keys, matches) if matches else keys


@dataclass(frozen=True)
class MeasuredPattern:
    """A pattern's result on one head.

    Attributes:
        pattern: how the head chose keys.
        error: squared error of its output, relative to the mean square of its layer's heads.
        tokens: tokens that a query block attended to, the mean over blocks.
    """

    pattern: Pattern
    error: float
    tokens: float


def measured_patterns(chunk: Chunk, exact: torch.Tensor, budget: int) -> list[list[MeasuredPattern]]:
    """Cost and error of each head's patterns: those that are best at some price, by rising tokens.

    Errors are squared, and relative to the mean over heads, so that a head with small outputs may have a larger error
    relative to its own.

    Args:
        chunk: the prompt's last tokens.
        exact: [batch, heads, n, v_dim], the chunk's dense attention.
        budget: the most tokens that a query block attends to.
    """
    tried = chunk.last(tried_queries(chunk.n))
    by_row = views(tried)

    def attend(pattern: Pattern) -> tuple[torch.Tensor, torch.Tensor]:
        out, _, attended = tried.attention([pattern.keys(view) for view in by_row])
        return out, torch.from_numpy(attended.mean(axis=0))

    return best_at_some_price(attend, exact[:, :, -tried.n :].float(), budget)


def tried_queries(n: int) -> int:
    """The number of a chunk's last queries on which patterns are measured: whole query blocks, if there is one."""
    return min(TRIED_QUERIES, n // QUERY_BLOCK * QUERY_BLOCK or n)


def best_at_some_price(
    attend: Callable[[Pattern], tuple[torch.Tensor, torch.Tensor]], expected: torch.Tensor, budget: int
) -> list[list[MeasuredPattern]]:
    """As `measured_patterns`, with one wait of the host for the device of `expected`.

    Args:
        attend: a pattern of all heads -> out [batch, heads, n, v_dim], and the tokens that a query block of each head
            attended to, [heads].
        expected: [batch, heads, n, v_dim] float32, the dense attention.
        budget: as for `measured_patterns`.
    """
    # If all outputs are zero, the errors are zero too: the smallest positive mean avoids 0 / 0.
    mean = (expected.square().sum() / expected.shape[1]).clamp(min=torch.finfo(torch.float32).tiny)
    tried, results = candidates(budget), []
    for pattern in tried:
        out, tokens = attend(pattern)
        errors = (out.float() - expected).square().sum(dim=(0, 2, 3)) / mean
        results.append(torch.stack([errors.double(), tokens.double()]))
    (numbers,) = on_host(torch.stack(results, dim=2))
    measured = (zip(tried, *each, strict=True) for each in numbers.transpose(0, 1).tolist())
    return [lower_convex_hull([MeasuredPattern(*each) for each in of_head]) for of_head in measured]


def lower_convex_hull(tried: Sequence[MeasuredPattern]) -> list[MeasuredPattern]:
    """The results that are best at some price, by rising tokens: the lower convex hull of error over tokens."""
    kept: list[MeasuredPattern] = []
    for each in sorted(tried, key=lambda each: (each.tokens, each.error)):
        if kept and not each.error < kept[-1].error:
            continue
        while len(kept) > 1 and _gain(kept[-2], kept[-1]) <= _gain(kept[-2], each):
            kept.pop()
        kept.append(each)
    return kept


def _gain(few: MeasuredPattern, many: MeasuredPattern) -> float:
    """The error that one more token saves."""
    return (few.error - many.error) / (many.tokens - few.tokens)


def best_pattern(tried: Sequence[MeasuredPattern], price: float) -> Pattern:
    """The pattern of a head with the least sum of error and priced tokens.

    With one price for all layers, tokens move from heads where they save little error to heads where they save much.
    The model's layers together then have the least error for their total of tokens.

    Args:
        tried: by rising tokens.
        price: the error that saving 1,024 tokens may cost.
    """
    return min(tried, key=lambda each: each.error + price * each.tokens / 1024).pattern


def matches_at(matches: int, length: int) -> int:
    """How many blocks are matched in a context of `length` tokens: none up to 16,384 tokens.

    Below that, the search for them takes much of the time that sparse prefill saves.
    """
    return matches if length > _PRICED_LENGTH else 0


def price_at(price: float, length: int) -> float:
    """The price of 1,024 tokens in a context of `length` tokens: beyond 16,384 it falls with the square of the length.

    There a token is a smaller share of dense attention's cost, and the errors of omitted keys add up over more queries.
    """
    return price * min(1.0, (_PRICED_LENGTH / length) ** 2)
