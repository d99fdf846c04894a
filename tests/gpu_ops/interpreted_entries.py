"""The kernels of bounded caches against their torch functions; `interpreted_kernels.py` runs this."""

from __future__ import annotations

from typing import Any

import torch

from hetero_kv.gpu_ops.cached_entries import all_but_lowest_in_torch, append_token_in_torch, keep_in_torch
from hetero_kv.gpu_ops.draws import FACTORS, mixed_in_torch, share_in_torch
from hetero_kv.gpu_ops.merged_entries import merge_one_in_torch, similarities_in_torch
from hetero_kv.gpu_ops.triton_kernels import cached_entries, draws, merged_entries
from tests.gpu_ops.interpreted_numbers import DTYPES, GENERATOR, difference, multiplied, random


def room(dtype: torch.dtype, capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory of entries of two sequences with three heads."""
    keys, values = random(2, 3, capacity, 24, dtype=dtype), random(2, 3, capacity, 17, dtype=dtype)
    return keys, values, torch.randint(0, 900, (2, 3, capacity), generator=GENERATOR)


def appended(dtype: torch.dtype, taken: int) -> bool:
    """A token that a model has projected, so that its heads do not lie side by side."""
    key, value = (random(2, 1, 3, dim, dtype=dtype).transpose(1, 2) for dim in (24, 17))
    found = room(dtype, 9)
    expected = [part.clone() for part in found]
    cached_entries.append_token(key, value, *found, taken, 777)
    append_token_in_torch(key, value, *expected, taken, 777)
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def lowest_left_out(kind: str, cached: int, first: int, last: int) -> bool:
    """Of scores among which are equal ones, of a list for all heads or one for each."""
    scores = torch.randint(0, 5, (2, 3, cached + 2), generator=GENERATOR)[..., :cached]
    scores = scores << 40 if kind == "int64" else scores.float().masked_fill(scores == 4, float("inf"))
    if kind == "not a number":
        scores[:, 1, cached // 2] = float("nan")
    shown = scores[:, :1] if kind == "shared" else scores
    return torch.equal(cached_entries.all_but_lowest(shown, first, last), all_but_lowest_in_torch(shown, first, last))


def kept(dtype: torch.dtype, count: int, lists: int, is_shared: bool) -> bool:
    """Entries with scores of which some have not come to the newest, and one is the same for all heads."""
    heads = 1 if is_shared else 3
    index = torch.rand(2 if heads == 3 else 1, heads, 80, generator=GENERATOR).argsort(dim=2)[..., :count]
    scores = random(2, 3, 78), torch.randint(0, 1 << 60, (2, 3, 80), generator=GENERATOR), random(2, 1, 79)
    shown = room(dtype, 83), (*scores[:2], scores[2].expand(-1, 3, -1))[:lists], index.sort(dim=2).values
    found, expected = room(dtype, count + 5), room(dtype, count + 5)
    gathered = [
        cached_entries.keep(*shown, found),
        keep_in_torch(*shown, expected),
    ]
    entries = zip((part[:, :, :count] for part in found), (part[:, :, :count] for part in expected), strict=True)
    return all(torch.equal(*pair) for pair in (*entries, *zip(*gathered, strict=True)))


def drawn(constant: int, count: int) -> bool:
    positions = torch.randint(0, 1 << 20, (2, 3, count + 3), generator=GENERATOR)[..., :count]
    found = [draws.draw(positions, constant, FACTORS, bits) for bits in (0, 24)]
    expected = mixed_in_torch(positions, constant)
    return torch.equal(found[0], expected) and torch.equal(found[1], share_in_torch(expected))


def most_alike(dtype: torch.dtype, count: int) -> float:
    """One of the kept keys has no length."""
    kept, evicted = room(dtype, count + 4)[0][:, :, :count], room(dtype, 9)[0][:, :, :1]
    kept[0, 1, count // 2] = 0
    return difference(merged_entries.similarities(evicted, kept), similarities_in_torch(evicted, kept))


def merged_one(dtype: torch.dtype) -> float:
    """Into kept entries with room behind, of heads of which some are joined by nothing."""
    kept, evicted = room(dtype, 50)[:2], [part[:, :, :1] for part in room(dtype, 33)[:2]]
    found, expected = ([part.clone() for part in kept] for _ in range(2))
    matches, joins = torch.randint(0, 46, (2, 3, 1), generator=GENERATOR), torch.tensor([True, False, True])
    shown = *evicted, random(2, 3, 1), matches, joins[None, :, None].expand(2, -1, -1)
    merged_entries.merge_one(*(part[:, :, :46] for part in found), *shown)
    merge_one_in_torch(*(part[:, :, :46] for part in expected), *shown)
    assert all(torch.equal(part[:, 1], before[:, 1]) for part, before in zip(found, kept, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(found, kept, strict=True))
    return max(difference(*pair) for pair in zip(found, expected, strict=True))


def of_entries() -> dict[str, dict[str, Any]]:
    """Of each kernel, by case, whether both are the same, or how far apart they are."""
    return {
        "appended": {f"{dtype}, {taken}": appended(dtype, taken) for dtype in DTYPES for taken in (0, 5, 8)},
        "lowest left out": {
            f"{kind}, {cached}, {first}, {last}": lowest_left_out(kind, cached, first, last)
            for kind in ("float32", "shared", "not a number", "int64")
            for cached, first, last in ((1, 0, 0), (30, 0, 0), (30, 4, 9), (20, 10, 10), (2500, 3, 700))
            if kind != "int64" or not first
        },
        "kept": {
            f"{dtype}, {count}, {lists}, {is_shared}": kept(dtype, count, lists, is_shared)
            for dtype in DTYPES
            for count, lists, is_shared in ((79, 3, False), (1, 2, False), (80, 1, True), (40, 0, True))
        },
        "drawn": {
            f"{constant}, {count}": drawn(constant, count)
            for constant in (0, 104_729, 77 * 15_485_863 * 1_000)
            for count in (1, 70, 1100)
        },
        "most alike": {
            f"{torch.float32} of {dtype}, {count}": most_alike(dtype, count)
            for dtype, count in multiplied(DTYPES, (1, 40, 150, 129, 700))
        },
        "merged into one": {f"{dtype}, {turn}": merged_one(dtype) for dtype, turn in multiplied(DTYPES, range(5))},
    }
