"""The sets of keys of a sparse prefill on a GPU: minference's patterns and flexprefill's choice, for all heads at once.

They are the sets that a CPU chooses (`minference.keys_of`, `flexprefill.keys_of`). Kernels of another device sum in
another order: where two scores are equal but for their last bits, another key may be the last one that is chosen.
No choice waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK
from hetero_kv.families.sparse_prefill import flexprefill
from hetero_kv.families.sparse_prefill.device_chunk import DeviceChunk
from hetero_kv.families.sparse_prefill.key_lists import ALWAYS_FIRST, ALWAYS_NEAR
from hetero_kv.families.sparse_prefill.minference import (
    MeasuredPattern,
    Pattern,
    best_at_some_price,
    tried_queries,
)
from hetero_kv.gpu_ops.host_copies import on_device
from hetero_kv.gpu_ops.key_sets import KeySets, distances_within, of_largest
from hetero_kv.gpu_ops.query_scores import LAST_QUERIES

#: Nearest distances of a head that chooses blocks of keys: distance 0 makes a query block see its own tokens.
_OWN = 1


@dataclass(frozen=True)
class HeadPatterns:
    """The patterns of a layer's heads as numbers on a device.

    Attributes:
        patterns: of all heads.
        numbers: [5, heads] int64: the first tokens and the nearest distances that a head attends to always, the tokens
            of its lines and of its slashes, and its blocks of keys.
    """

    patterns: tuple[Pattern, ...]
    numbers: torch.Tensor

    @classmethod
    def of(cls, patterns: Sequence[Pattern], device: torch.device) -> HeadPatterns:
        """Copy the patterns to a device, without waiting for it."""
        rows = [_numbers(each) for each in patterns]
        return cls(tuple(patterns), on_device(torch.tensor(rows, dtype=torch.int64).T.contiguous(), device))

    def sets(self, chunk: DeviceChunk, n: int, first_head: int, matches: int) -> KeySets:
        """The sets of the first n queries of a part of the heads; matches: as for `minference.keys_of`."""
        part = slice(first_head, first_head + chunk.q.shape[1])
        patterns, shape = self.patterns[part], (*chunk.q.shape[:2], chunk.total)
        # Rows of a batch have the same patterns.
        sinks, nearest, lines, slashes, blocks = self.numbers[:, part, None].unbind(0)
        place = torch.arange(chunk.total, device=chunk.q.device)
        tokens, distances = (place < sinks).expand(shape), (place < nearest).expand(shape)
        if any(pattern.kind == "vertical_slash" for pattern in patterns):
            by_token, by_distance = chunk.sums
            tokens = tokens | of_largest(by_token, lines[:, 0], max(_numbers(each)[2] for each in patterns))
            most = min(max(_numbers(each)[3] for each in patterns), chunk.total)
            order, budgets = by_distance.topk(most, dim=2).indices, slashes[:, 0].expand(shape[:2])
            distances = distances | distances_within(order, budgets, budgets, chunk.total)
        chosen, counts = self._best_blocks(chunk, n, patterns, blocks[:, 0])
        sets = KeySets.of(tokens, distances, chosen, counts, chunk.first, n)
        if not matches or all(pattern.kind == "block_sparse" for pattern in patterns):
            return sets
        matched, found = chunk.matched_blocks(sets, matches)
        return _either(sets, matched, found, nearest == _OWN)

    @staticmethod
    def _best_blocks(
        chunk: DeviceChunk, n: int, patterns: Sequence[Pattern], blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The best key blocks of block-sparse heads, best first, and how many; none for others."""
        query_blocks = -(-n // QUERY_BLOCK)
        most = max(_numbers(pattern)[4] for pattern in patterns)
        if not most:
            none = torch.zeros(*chunk.q.shape[:2], query_blocks, 1, dtype=torch.int32, device=chunk.q.device)
            return none, none[..., 0]
        scores = chunk.block_scores(n)
        chosen = scores.topk(min(most, scores.shape[3]), dim=3).indices.int()
        counts = torch.minimum(blocks[:, None], _available(chunk, query_blocks)).int()
        return chosen, counts.expand(chosen.shape[:3])


def _numbers(pattern: Pattern) -> tuple[int, int, int, int, int]:
    """A row of `HeadPatterns.numbers`."""
    if pattern.kind == "a_shape":
        return max(ALWAYS_FIRST, pattern.first), max(ALWAYS_NEAR, pattern.rest), 0, 0, 0
    if pattern.kind == "vertical_slash":
        return ALWAYS_FIRST, ALWAYS_NEAR, pattern.first, pattern.rest, 0
    return ALWAYS_FIRST, _OWN, 0, 0, pattern.rest // QUERY_BLOCK


def _available(chunk: DeviceChunk, query_blocks: int) -> torch.Tensor:
    """Key blocks that begin before the end of each query block, [query blocks] int64, on the device."""
    ends = chunk.first + QUERY_BLOCK * torch.arange(1, query_blocks + 1, device=chunk.q.device)
    return (ends.clamp_(max=chunk.total) + QUERY_BLOCK - 1) // QUERY_BLOCK


def _either(sets: KeySets, blocks: torch.Tensor, counts: torch.Tensor, keeps: torch.Tensor) -> KeySets:
    """The sets with other key blocks for the heads that do not keep theirs; keeps: [heads, 1] bool."""
    width = max(sets.blocks.shape[3], blocks.shape[3])
    own, other = (torch.nn.functional.pad(each, (0, width - each.shape[3])) for each in (sets.blocks, blocks))
    return KeySets(
        sets.tokens, sets.offsets, torch.where(keeps[..., None], own, other), torch.where(keeps, sets.counts, counts),
        sets.first, sets.n,
    )  # fmt: skip


def flexprefill_sets(chunk: DeviceChunk, n: int, mass: float, least: int) -> KeySets:
    """The sets of the first n queries as by `flexprefill.keys_of`.

    Both choices are made for each head, and one is taken.
    """
    (by_token, by_distance), total = chunk.sums, chunk.total
    is_near = _estimate_distance(chunk, by_token) < flexprefill.NEAR
    place = torch.arange(total, device=chunk.q.device)
    lines = (place < ALWAYS_FIRST) | _fewest(by_token, by_token.sort(dim=2, descending=True, stable=True), mass, least)
    ranked = by_distance.sort(dim=2, descending=True, stable=True)
    order = ranked.indices[..., :least]
    limits = torch.full(order.shape[:2], least, device=order.device)
    distances = distances_within(order, limits, limits, total) | _fewest(by_distance, ranked, mass, 0)
    blocks, counts = _blocks_of_mass(chunk, n, mass, least)
    near = is_near[..., None]
    tokens = torch.where(near, place < ALWAYS_FIRST, lines)
    distances = torch.where(near, place < _OWN, distances | (place < ALWAYS_NEAR))
    return KeySets.of(tokens, distances, blocks, torch.where(near, counts, 0), chunk.first, n)


def _estimate_distance(chunk: DeviceChunk, by_token: torch.Tensor) -> torch.Tensor:
    """As `flexprefill.estimate_distance`, [batch, heads] float64."""
    queries = min(LAST_QUERIES, chunk.n)
    key_blocks = -(-chunk.total // QUERY_BLOCK)
    padded = torch.nn.functional.pad(by_token, (0, key_blocks * QUERY_BLOCK - chunk.total))
    true = padded.unflatten(2, (key_blocks, QUERY_BLOCK)).sum(dim=3, dtype=torch.float64) / queries
    q = chunk.q[:, :, -queries:].float().mean(dim=2, keepdim=True)
    guessed = chunk.scores_of_means(q)[:, :, 0].double().softmax(dim=2)
    middle = (true + guessed) / 2
    parts = (torch.where(each > 0, each * (each / middle).log(), 0.0).sum(dim=2) for each in (true, guessed))
    return (sum(parts, torch.zeros_like(true[..., 0])) / 2).clamp_(min=0).sqrt_()


def _fewest(
    values: torch.Tensor, ranked: tuple[torch.Tensor, torch.Tensor], mass: float, least: int
) -> torch.Tensor:  # fmt: skip
    """Masks [batch, heads, total] of the fewest values with this share of their sum, at least `least`.

    ranked: the values and their places, largest first.
    """
    if mass >= 1:
        return torch.ones(values.shape, dtype=torch.bool, device=values.device)
    largest, order = ranked
    up_to = largest.cumsum(dim=2, dtype=torch.float64)
    needed = (up_to < mass * up_to[..., -1:]).sum(dim=2, keepdim=True) + 1
    taken = torch.arange(values.shape[2], device=values.device) < needed.clamp_(min=least)
    return torch.zeros_like(taken).scatter_(2, order, taken)


def _blocks_of_mass(chunk: DeviceChunk, n: int, mass: float, least: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `flexprefill.blocks_of_mass`: key blocks [batch, heads, blocks, key blocks] int32, and how many are taken.

    The sink's block is among the tokens that every head sees.
    """
    shares, order = chunk.block_scores(n).softmax(dim=3).sort(dim=3, descending=True, stable=True)
    available = _available(chunk, shares.shape[2])
    if mass >= 1:
        return order.int(), available.int().expand(shares.shape[:3])
    taken = ((shares.cumsum(dim=3) - shares) < mass).sum(dim=3).clamp_(min=max(1, -(-least // QUERY_BLOCK)))
    return order.int(), torch.minimum(taken, available).int()


def measured_patterns(chunk: DeviceChunk, exact: torch.Tensor, budget: int) -> list[list[MeasuredPattern]]:
    """As `minference.measured_patterns`, on a GPU, for a chunk of a prompt's last queries."""
    n = tried_queries(chunk.n)
    tried = replace(chunk, q=chunk.q[:, :, -n:], first=chunk.total - n)

    def attend(pattern: Pattern) -> tuple[torch.Tensor, torch.Tensor]:
        patterns = HeadPatterns.of([pattern] * tried.q.shape[1], tried.q.device)
        out, _, attended = tried.attention(lambda part, count, head: patterns.sets(part, count, head, 0))
        return out, attended.double().mean(dim=(0, 2))

    return best_at_some_price(attend, exact[:, :, -n:].float(), budget)
