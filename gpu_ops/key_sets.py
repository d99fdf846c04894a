"""Which keys the query blocks of a prompt's chunk attend to, as tensors on any device, without a wait of the host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK

#: Fills up lists of tokens and offsets: beyond every sequence, and within int32 after a tile's width is added.
BEYOND = 1 << 30
#: Entries behind a list's end that a kernel may read.
_ROOM = 64


@dataclass(frozen=True)
class KeyLists:
    """Chosen numbers of rows and heads in ascending order, filled up with `BEYOND`.

    Attributes:
        numbers: [variants, batch, heads, room] int32.
        counts: [batch, heads, query blocks] int32, how many of them a query block may see.
    """

    numbers: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True)
class KeySets:
    """The keys of each row, head and block of `QUERY_BLOCK` queries: the union of three sets and its own tokens.

    A query block that begins at position p and has c queries sees the tokens up to p + c - 1.

    Attributes:
        tokens: [batch, heads, total] bool, tokens that every query block sees.
        offsets: [variants, batch, heads, total + QUERY_BLOCK - 1] bool, how far before its last query a query block
            sees a token. The second variant, if there is one, belongs to the last query block, which is shorter.
        blocks: [batch, heads, query blocks, count] int32, blocks of `QUERY_BLOCK` keys, counted from the first token.
        counts: [batch, heads, query blocks] int32, how many of `blocks` a query block sees, from the first on.
        first: the position of the first query.
        n: the number of queries.
    """

    tokens: torch.Tensor
    offsets: torch.Tensor
    blocks: torch.Tensor
    counts: torch.Tensor
    first: int
    n: int

    @classmethod
    def of(
        cls, tokens: torch.Tensor, distances: torch.Tensor, blocks: torch.Tensor, counts: torch.Tensor, first: int,
        n: int,
    ) -> KeySets:  # fmt: skip
        """From the distances [batch, heads, total] bool at which a query sees keys; the others as the attributes.

        A query block sees what any of its queries sees, and its own tokens: distance 0 must be among the distances.
        """
        widths = [QUERY_BLOCK, n % QUERY_BLOCK] if n % QUERY_BLOCK else [QUERY_BLOCK]
        offsets = torch.stack([widened(distances, width) for width in widths])
        return cls(tokens.contiguous(), offsets, blocks.contiguous(), counts.contiguous(), first, n)

    @property
    def total(self) -> int:
        """Tokens that the masks cover, at least those up to the last query."""
        return self.tokens.shape[2]

    @property
    def query_blocks(self) -> int:
        """The number of query blocks."""
        return -(-self.n // QUERY_BLOCK)

    @cached_property
    def stops(self) -> torch.Tensor:
        """The end of the tokens that each query block may see, [query blocks] int64, on the sets' device."""
        ends = self.first + QUERY_BLOCK * torch.arange(1, self.query_blocks + 1, device=self.tokens.device)
        return ends.clamp_(max=self.first + self.n)

    def token_lists(self) -> KeyLists:
        """`tokens` as lists; a query block may see those before its end."""
        numbers, counts = _listed(self.tokens[None])
        return KeyLists(numbers, counts[0][..., self.stops - 1])

    def offset_lists(self) -> KeyLists:
        """`offsets` as lists; a query block may see those that reach no token before the first."""
        numbers, counts = _listed(self.offsets)
        seen = counts[0][..., self.stops - 1]
        if len(counts) > 1:
            seen[..., -1] = counts[1][..., self.first + self.n - 1]
        return KeyLists(numbers, seen)

    def seen(self) -> torch.Tensor:
        """The sets as masks, [batch, heads, query blocks, total] bool: the definition of the attributes."""
        listed = torch.arange(self.blocks.shape[3], device=self.blocks.device) < self.counts[..., None]
        key_blocks = -(-self.total // QUERY_BLOCK)
        numbers = torch.where(listed, self.blocks, key_blocks).long()
        by_block = torch.zeros(*numbers.shape[:3], key_blocks + 1, dtype=torch.bool, device=numbers.device)
        by_block.scatter_(3, numbers, value=True)
        place = torch.arange(self.total, device=numbers.device)
        return self.seen_by_line() | (by_block[..., place // QUERY_BLOCK] & (place < self.stops[:, None]))

    def seen_by_line(self) -> torch.Tensor:
        """As `seen`, without the blocks of keys."""
        place, stops = torch.arange(self.total, device=self.tokens.device), self.stops
        away = stops[:, None] - 1 - place
        seen = self.tokens[:, :, None, :] | self.offsets[0][:, :, away.clamp(min=0)]
        if len(self.offsets) > 1:
            seen[:, :, -1] = self.tokens | self.offsets[1][:, :, away[-1].clamp(min=0)]
        return seen & (away >= 0)


def widened(distances: torch.Tensor, width: int) -> torch.Tensor:
    """Offsets from the last of `width` queries at which any of them sees a key at one of the distances.

    distances: [..., total] bool. Returns [..., total + QUERY_BLOCK - 1] bool.
    """
    padded = torch.nn.functional.pad(distances, (0, QUERY_BLOCK - 1))
    before = padded.cumsum(-1, dtype=torch.int32)
    before[..., width:] -= before[..., :-width].clone()
    return before > 0


def of_largest(values: torch.Tensor, counts: torch.Tensor, most: int) -> torch.Tensor:
    """Masks of the `counts` [...] int64 largest values [..., total], at most `most`: [..., total] bool."""
    order = values.topk(min(most, values.shape[-1]), dim=-1).indices
    taken = torch.arange(order.shape[-1], device=values.device) < counts[..., None]
    return torch.zeros(values.shape, dtype=torch.bool, device=values.device).scatter_(
        -1, order, taken.expand(order.shape)
    )


def distances_within(order: torch.Tensor, limits: torch.Tensor, budgets: torch.Tensor, total: int) -> torch.Tensor:
    """The best distances, as many as make a query block see at most a budget of further tokens, as masks.

    As `cpu_ops.vertical_slash_scores.distances_within`, for all rows and heads at once. An offset that a query block
    sees has the rank of the first distance by which it does; the r best distances together cover the offsets of
    lower ranks than r. The nearest `QUERY_BLOCK` distances are seen always, and cost nothing.

    Args:
        order: [..., count] int64, distances below `total`, all different, best first.
        limits: [...] int64, how many of them may be taken.
        budgets: [...] int64, tokens.

    Returns [..., total] bool.
    """
    count = order.shape[-1]
    place = torch.arange(count, dtype=torch.int32, device=order.device)
    numbered = torch.where(place < limits[..., None], place, count)
    ranks = torch.full((*order.shape[:-1], total + QUERY_BLOCK - 1), count, dtype=torch.int32, device=order.device)
    ranks.scatter_(-1, order, numbered)
    # The nearest distances cover these offsets for all queries of a block.
    of_first = _least_behind(ranks, QUERY_BLOCK)[..., 2 * QUERY_BLOCK - 1 :].long()
    added = torch.zeros(*order.shape[:-1], count + 1, dtype=torch.int32, device=order.device)
    added.scatter_add_(-1, of_first, torch.ones_like(of_first, dtype=torch.int32))
    covered = added.cumsum(-1)[..., :count]
    taken = (covered <= budgets[..., None]).sum(-1)
    return ranks[..., :total] < taken[..., None]


def _least_behind(numbers: torch.Tensor, width: int) -> torch.Tensor:
    """The least of each number and of the `width` - 1 before it, a power of two: [..., total]."""
    step = 1
    while step < width:
        least = numbers.clone()
        torch.minimum(numbers[..., step:], numbers[..., :-step], out=least[..., step:])
        numbers, step = least, 2 * step
    return numbers


def _listed(masks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks [..., length] as lists [..., length + room] int32, and how many are set up to each place, int32."""
    length = masks.shape[-1]
    counts = masks.cumsum(-1, dtype=torch.int32)
    # What is not set goes behind everything that is read.
    numbers = torch.full((*masks.shape[:-1], length + _ROOM + 1), BEYOND, dtype=torch.int32, device=masks.device)
    place = torch.arange(length, dtype=torch.int32, device=masks.device)
    target = torch.where(masks, counts - 1, length + _ROOM).long()
    numbers.scatter_(-1, target, place.expand(masks.shape))
    return numbers, counts


def block_means(past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Means of blocks of `QUERY_BLOCK` tokens of [..., past, dim] and [..., n, dim] concatenated, in float32.

    Returns [..., blocks, dim]; the last block may be shorter.
    """
    whole = past.shape[-2] // QUERY_BLOCK * QUERY_BLOCK
    rest = torch.cat([past[..., whole:, :], new], dim=-2) if whole < past.shape[-2] else new
    parts = []
    for part in (past[..., :whole, :], rest):
        full = part.shape[-2] // QUERY_BLOCK
        blocks = part[..., : full * QUERY_BLOCK, :].unflatten(-2, (full, QUERY_BLOCK))
        parts.append(blocks.mean(dim=-2, dtype=torch.float32))
        if full * QUERY_BLOCK < part.shape[-2]:
            parts.append(part[..., full * QUERY_BLOCK :, :].mean(dim=-2, keepdim=True, dtype=torch.float32))
    return torch.cat(parts, dim=-2)
