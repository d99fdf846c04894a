"""The kernels that choose single tokens and attend to them; `interpreted_kernels.py` runs this."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hetero_kv.gpu_ops import estimated_masses as by_torch
from hetero_kv.gpu_ops.stored_keys import score_stored_keys_in_torch
from hetero_kv.gpu_ops.token_attention import (
    PARTS,
    REST_PARTS,
    KeyOffsets,
    Parts,
    attend_to_rest_in_torch,
    attend_to_tokens_in_torch,
    sum_masses_in_torch,
)
from hetero_kv.gpu_ops.token_choice import Target, choose_in_torch, leave_in_torch
from hetero_kv.gpu_ops.token_slots import TokenSlots, fetch_tokens_in_torch, place_tokens_in_torch
from hetero_kv.gpu_ops.triton_kernels import (
    estimated_masses,
    stored_keys,
    token_attention,
    token_choice,
    token_slots,
)
from hetero_kv.gpu_ops.window_step import join_parts_in_torch
from hetero_kv.store import storage
from hetero_kv.store.key_codes import encode
from tests.gpu_ops.interpreted_numbers import DTYPES, GENERATOR, difference, multiplied, random


class Blocks(NamedTuple):
    """Of a Context of `count` blocks, in room for `capacity`."""

    count: int = 21
    capacity: int = 40
    size: int = 16
    group: int = 2
    dim: int = 32
    softcap: float | None = None
    packed: bool = True
    spread: bool = True
    listed: int = 0
    bits: int = 0
    differ: bool = False


#: Blocks that fill no tile, of no power of two, alone, and none at all; listed ones, with padding.
BLOCKS = (
    Blocks(),
    Blocks(count=20, capacity=20, size=48, group=5, softcap=4.0, dim=64),
    Blocks(count=1, packed=False, spread=False, dim=20),
    Blocks(count=33, size=32, spread=False, listed=12),
    Blocks(count=0, listed=3, packed=False),
    Blocks(count=9, capacity=12, size=128, softcap=3.0, listed=12, dim=160),
    # Keys as they are stored.
    Blocks(count=21, bits=4, differ=True, softcap=3.0),
    Blocks(count=9, capacity=12, size=48, group=5, listed=12, bits=8, dim=64),
    Blocks(count=0, listed=3, bits=4, differ=True),
)


def _known(kernels: Any, q: torch.Tensor, vectors: torch.Tensor, number: torch.Tensor, case: Blocks) -> Any:
    score = by_torch.score_means_in_torch if kernels is by_torch else kernels.score_means
    return score(q, vectors, number, case.size, 0.3, case.softcap)


def estimated(dtype: torch.dtype, case: Blocks) -> float:
    """Of scores by means and by coarse keys, of their sums, and of shares."""
    keys = random(case.capacity, 3, case.size, case.dim) + 2 * random(case.capacity, 3, 1, case.dim)
    means = [keys.mean(dim=2), keys.std(dim=2, correction=0)][: 2 if case.spread else 1]
    kind = storage.get("Q8_0" if case.packed else "FP16")
    vectors = kind.encode(torch.stack(means, dim=2))
    codes = encode(keys - kind.decode(vectors)[:, :, :1].float()).squeeze(2)
    # Block by block, heads side by side, of two sequences.
    # Of another mean, as of a block that has filled token by token.
    offsets = (keys.mean(dim=2, keepdim=True) + 0.1).half() if case.differ else None
    if case.bits:
        stored = storage.get("Q4_0" if case.bits == 4 else "Q8_0")
        codes = stored.encode(keys if offsets is None else keys - offsets.float())
    both = (
        None if array is None else torch.stack([array, array.flip(0)], dim=1).movedim(0, 2)
        for array in (vectors, codes, offsets)
    )  # fmt: skip
    vectors, codes, offsets = both
    q = random(2, 1, 3 * case.group, case.dim, dtype=dtype).transpose(1, 2)
    number, listed, lists = torch.tensor([case.count]), None, (2, 3, case.listed)
    if case.listed:
        listed = torch.rand(2, 3, max(case.count, 1), generator=GENERATOR).argsort(dim=2)[..., : case.listed].int()
        listed = torch.nn.functional.pad(listed, (0, case.listed - listed.shape[2]), value=-1)
        listed[..., min(case.count, case.listed - 1) :] = -1
    outside = random(2, 3, 9, case.group)[:, :, :5]
    outside[0, 1, 2] = float("-inf")
    results = []
    for kernels in (estimated_masses, by_torch):
        suffix = "_in_torch" if kernels is by_torch else ""
        score_codes, log_totals, mean_shares = (
            getattr(kernels, name + suffix) for name in ("score_codes", "log_totals", "mean_shares")
        )
        score_stored = score_stored_keys_in_torch if kernels is by_torch else stored_keys.score_stored_keys
        known = _known(kernels, q, vectors, number, case)
        means_only = [each.clone() for each in known]
        of_tokens = torch.full((*lists[:2], case.group, case.listed * case.size), torch.nan) if case.listed else None
        scoring = known, 0.3, case.softcap, of_tokens
        if case.bits:
            score_stored(q, codes, offsets, listed, number, *scoring)
        else:
            score_codes(q, codes, listed, number, case.size, *scoring)
        totals = log_totals(known.likely, known.masses, outside, number)
        shares = mean_shares(known.likely, known.masses, totals)
        results.append([*means_only, *known, totals, *shares, *([] if of_tokens is None else [of_tokens])])
    apart = [0.0]
    for actual, expected in zip(*results, strict=True):
        is_none = expected.isinf() | expected.isnan()
        # Of no block at all there are no shares.
        assert torch.equal(actual.isinf() | actual.isnan(), is_none) or case.count == 0
        apart.append(difference(actual.masked_fill(is_none, 0.0), expected.masked_fill(is_none, 0.0)))
    return max(apart)


class Listed(NamedTuple):
    """Entries of `blocks` blocks of `unit` each, in room for `room` blocks."""

    blocks: int
    room: int
    unit: int
    target: Target
    width: int
    group: int = 2
    listed: int = 0


#: A target that few entries reach, with bounds that hold and that do not; none; all of them; no entries; candidates.
LISTED = (
    Listed(60, 70, 1, Target(0.6, 0, 70, 2, 0), 64),
    Listed(70, 70, 1, Target(0.9, 30, 40, 1, 8), 70, group=3),
    Listed(64, 64, 1, Target(0.0, 0, 12, 4, 3), 20),
    Listed(9, 64, 1, Target(0.5, 1, 4, 1, 9), 20),
    Listed(0, 64, 16, Target(0.5, 1, 64, 1, 0), 64),
    Listed(60, 64, 16, Target(0.7, 0, 200, 1, 4), 200, listed=20),
    Listed(60, 600, 16, Target(0.99, 16, 500, 1, 4), 512, group=1, listed=600),
    Listed(20, 64, 48, Target(0.7, 48, 96, 1, 20), 960, listed=20),
)
SHARED = "any", "equal"


def chosen(kind: str, case: Listed) -> bool:
    """The same entries, numbers and marks; shares behind the last entry are no numbers."""
    n = case.room * case.unit if not case.listed else case.listed * case.unit
    scores = random(2, 3, n) * 3 if kind == "any" else torch.randint(0, 3, (2, 3, n), generator=GENERATOR).float()
    places = place_counts = None
    there = torch.full((2, 3), case.blocks, dtype=torch.int32)
    if case.listed:
        order = torch.rand(2, 3, case.room, generator=GENERATOR).argsort(dim=2)[..., : case.listed].sort(dim=2).values
        there = torch.randint(0, min(case.blocks, case.listed) + 1, (2, 3), generator=GENERATOR).int()
        places = order.int().masked_fill(torch.arange(case.listed) >= there[..., None], -1).contiguous()
        place_counts = there
    behind = torch.arange(n) >= there[..., None] * case.unit
    # Powers of two are added exactly, in any order.
    shares = scores.exp() if kind == "any" else torch.exp2(scores)
    shares = shares.masked_fill(behind, 0.0)
    whole = shares.sum(dim=2, keepdim=True).clamp(min=1.0) * 1.25
    shares = shares / (whole if kind == "any" else torch.exp2(whole.log2().ceil()))
    totals = torch.stack([torch.zeros(2, 3, case.group)] * 3)
    totals[2] = torch.tensor(0.125).log()
    results = []
    for choose in (token_choice.choose, choose_in_torch):
        made = torch.full((2, 3, case.width), 99, dtype=torch.int32)
        counts, taken = torch.zeros(2, 3, dtype=torch.int32), torch.full((2, 3, n), 7, dtype=torch.int8)
        whole_list = places, place_counts, case.target, made, counts
        choose(shares, shares, totals, torch.tensor([case.blocks]), case.unit, *whole_list, taken)
        without = torch.full_like(made, 99)
        choose(shares, shares, totals, torch.tensor([case.blocks]), case.unit, *whole_list[:3], without, counts, None)
        results.append((made, counts, taken, without))
    return all(torch.equal(actual, expected) for actual, expected in zip(*results, strict=True))


def left(size: int, places_of: int) -> float:
    """Of weights and masses of blocks with none, some and all of their tokens chosen; counts are the same."""
    capacity, group = 50, 3
    order = torch.rand(2, 3, capacity, generator=GENERATOR).argsort(dim=2)[..., :places_of].int()
    order[:, :, -1] = -1
    taken = (torch.rand(2, 3, places_of, size, generator=GENERATOR) < 0.3).to(torch.int8)
    taken[:, :, 0], taken[:, :, 1], taken[:, :, -1] = 1, 0, 0
    token_scores = random(2, 3, group, places_of * size)
    arguments = token_scores, taken.flatten(2), order.contiguous(), random(3, 2, 3, group) + 4
    before, results = (random(2, 3, group, capacity), random(2, 3, group, capacity)), []
    for leave in (token_choice.leave, leave_in_torch):
        arrays, counted = [each.clone() for each in before], torch.ones(2, 3, 4, dtype=torch.int32)
        leave(*arguments, *arrays, counted)
        results.append((*arrays, counted))
    (*found, counts), (*expected, right) = results
    assert torch.equal(counts, right)
    pairs = list(zip(found, expected, strict=True))
    assert all(torch.equal(actual.isinf(), other.isinf()) for actual, other in pairs)
    return max(difference(*(each.masked_fill(each.isinf(), 0.0) for each in pair)) for pair in pairs)


def brought(dtype: torch.dtype, stored: torch.dtype, count: int) -> bool:
    """Three tokens' choices, of which later ones find some tokens in slots."""
    size, width, blocks, capacity = 16, 24, 12, 12 * 16
    # The interpreter cuts numbers off to bfloat16, which is exact for these.
    pool = torch.randint(0, 256, (2 * blocks, 3, size, width), generator=GENERATOR).to(stored)
    table = torch.randperm(2 * blocks, generator=GENERATOR).view(2, blocks).int()
    kept = [TokenSlots.empty(2, 3, count, capacity, torch.device("cpu")) for _ in range(2)]
    made_of = torch.uint8 if stored is torch.uint8 else dtype
    memory = [torch.zeros(2, 3, count, width, dtype=made_of) for _ in range(2)]
    is_same = True
    for _ in range(3):
        chosen = torch.rand(2, 3, capacity, generator=GENERATOR).argsort(dim=2)[..., :count].int().contiguous()
        counts = torch.randint(0, count + 1, (2, 3), generator=GENERATOR).int()
        missed = [torch.full((6,), 9, dtype=torch.int32) for _ in range(2)]
        lists = []
        for number, (place, fetch) in enumerate(
            ((token_slots.place, token_slots.fetch), (place_tokens_in_torch, fetch_tokens_in_torch))
        ):
            at, misses, into = place(kept[number], chosen, counts, missed[number])
            fetch(pool, table, misses, into, missed[number], memory[number])
            is_listed = torch.arange(count) < counts[..., None]
            is_miss = torch.arange(count) < missed[number].view(2, 3, 1)
            lists.append([at.where(is_listed, 0), misses.where(is_miss, 0), into.where(is_miss, 0)])
        pairs = [*zip(*lists, strict=True), *zip(*kept, strict=True), tuple(missed), tuple(memory)]
        is_same = is_same and all(torch.equal(*pair) for pair in pairs)
        # What is attended to is what was chosen.
        row, head, place = is_listed.nonzero(as_tuple=True)
        token = chosen[row, head, place].long()
        right = pool[table[row, token // size].long(), head, token % size].to(made_of)
        is_same = is_same and torch.equal(memory[0][row, head, lists[0][0][row, head, place].long()], right)
    return is_same


class Attended(NamedTuple):
    """Tokens in slots, and blocks of which the mean values count."""

    count: int = 90
    slots: int = 130
    blocks: int = 70
    group: int = 2
    k_dim: int = 32
    v_dim: int = 32
    softcap: float | None = None
    v_bits: int = 0
    mean_bits: int = 8
    k_bits: int = 0
    block_size: int = 0


#: Keys as they are stored, some as differences in blocks of several sizes.
ATTENDED = (
    Attended(block_size=16),
    Attended(count=0, blocks=3, group=5, k_dim=24, v_dim=40, mean_bits=0, softcap=2.0),
    Attended(count=130, blocks=0, v_bits=4, k_dim=64, v_dim=96, k_bits=8),
    Attended(count=1, blocks=33, v_bits=8, softcap=3.0),
    Attended(count=90, blocks=5, k_bits=4, block_size=48, k_dim=64),
)


def stored_vectors(shape: tuple[int, ...], bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Packed numbers are exact in bfloat16, which the interpreter cuts off."""
    if not bits:
        return random(*shape, dtype=dtype)
    codes = torch.randint(-127 if bits == 8 else -8, 128 if bits == 8 else 8, shape, generator=GENERATOR).float()
    codes[..., :: storage.ggml.GROUP] = 127 if bits == 8 else -8
    kind, scale = (storage.Q8_0, 1 / 64) if bits == 8 else (storage.Q4_0, 1 / 4)
    return kind.encode(codes * scale)


def attended(dtype: torch.dtype, case: Attended) -> tuple[float, float]:
    """Of the joined attention, and of the logarithms and the share that is covered."""
    of_slots, group = (2, 3, case.slots), case.group
    q = random(2, 1, 3 * group, case.k_dim, dtype=dtype).transpose(1, 2)
    keys, values = (
        stored_vectors((*of_slots, dim), bits, dtype)
        for dim, bits in ((case.k_dim, case.k_bits), (case.v_dim, case.v_bits))
    )
    slots = torch.rand(*of_slots, generator=GENERATOR).argsort(dim=2).int().contiguous()
    counts = torch.full((2, 3), case.count, dtype=torch.int32)
    offsets = None
    if case.block_size:
        # Sums that are exact in bfloat16.
        keys = keys if case.k_bits else (keys * 4).round() / 4
        # Behind what is listed there are no tokens.
        tokens = torch.randint(0, 7 * case.block_size, of_slots, generator=GENERATOR).int()
        tokens[..., case.count :] = -(1 << 30)
        vectors = torch.randint(-4, 5, (2, 7, 3, 1, case.k_dim), generator=GENERATOR).half() / 4
        offsets = KeyOffsets(vectors.movedim(1, 2), tokens, case.block_size)
    weights, masses = (random(2, 3, group, 80) for _ in range(2))
    weights[0, 1], masses[0, 1] = float("-inf"), float("-inf")
    means = stored_vectors((80, 2, 3, case.v_dim), case.mean_bits, torch.float16).movedim(0, 2)
    window = random(2, 3, 16, group, case.v_dim), random(2, 3, 16, group)
    results = []
    for attend, attend_rest, sum_up in (
        (token_attention.attend_to_tokens, token_attention.attend_to_rest, token_attention.sum_masses),
        (attend_to_tokens_in_torch, attend_to_rest_in_torch, sum_masses_in_torch),
    ):
        parts = Parts(
            torch.full((2, 3, PARTS, group, case.v_dim), torch.nan), torch.full((2, 3, PARTS, group), torch.nan)
        )
        parts.out[:, :, :16], parts.lse[:, :, :16] = window
        attend(q, keys, values, slots, counts, 0.3, case.softcap, parts, offsets)
        rest = attend_rest(weights, masses, means, torch.tensor([case.blocks]), parts)
        shares = torch.full((6,), torch.nan)
        sum_up(parts.lse, rest, shares)
        out, lse = torch.empty(2, 3 * group, 1, case.v_dim, dtype=dtype), torch.empty(2, 3 * group)
        join_parts_in_torch(*parts, None, None, out, lse)
        results.append((out, lse, shares, rest.logsumexp(dim=2), parts.lse[:, :, -REST_PARTS:].logsumexp(dim=2)))
    (out, *found), (expected, *others) = results
    apart = []
    for actual, right in zip(found, others, strict=True):
        assert torch.equal(actual.isinf(), right.isinf())
        apart.append(difference(actual.masked_fill(actual.isinf(), 0.0), right.masked_fill(right.isinf(), 0.0)))
    return difference(out, expected), max(apart)


def of_tokens() -> dict[str, dict[str, Any]]:
    """Of each kernel, by case, how far apart they are, or whether they are the same."""
    fetched = [(dtype, stored) for dtype in DTYPES for stored in (dtype, torch.float16, torch.uint8)]
    return {
        "estimated": {f"{dtype}, {case}": estimated(dtype, case) for dtype, case in multiplied(DTYPES, BLOCKS)},
        "chosen by shares": {f"{kind}, {case}": chosen(kind, case) for kind, case in multiplied(SHARED, LISTED)},
        "left": {f"{size}, {places}": left(size, places) for size, places in ((16, 9), (48, 40), (128, 3))},
        "tokens brought": {
            f"{dtype}, {stored}, {count}": brought(dtype, stored, count)
            for (dtype, stored), count in multiplied(fetched, (1, 20, 100))
        },
        "tokens attended": {f"{dtype}, {case}": attended(dtype, case) for dtype, case in multiplied(DTYPES, ATTENDED)},
    }
