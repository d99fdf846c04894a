"""Compares the Triton kernels of bounded caches with the torch functions that define them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_checks.setting import HALF, Setting
from hetero_kv.gpu_ops import cached_entries, draws, merged_entries, rotary

Case = tuple[str, Callable[[], Any], Callable[[], Any], float]


def entry_cases(setting: Setting, dtype: torch.dtype) -> list[Case]:
    """The kernels of a decoded token with keys and values in `dtype`: an entry is written and dropped, others stay."""
    heads, cached, dim = (2, 40, 16) if setting.tiny else (8, 4096, 128)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=setting.device).to(dtype)

    positions = torch.randint(0, 100_000, (1, heads, cached + 32), device=setting.device)
    parts = random(1, heads, cached + 32, dim), random(1, heads, cached + 32, dim), positions
    key, value, scores = random(1, heads, 1, dim), random(1, heads, 1, dim), random(1, heads, cached).float()
    index = cached_entries.all_but_lowest_in_torch(scores, 0, 0)
    layout = rotary.RotaryLayout(dim // 2)
    turns = (parts[0][:, :, :cached], random(cached, dim // 2), random(cached, dim // 2), layout)
    kept = parts[0][:, :, :cached], parts[1][:, :, :cached]
    matches, joins = index[..., :1] // 2, scores[..., :1] > -9
    merging = key, value, scores[..., :1].sigmoid(), matches, joins

    def appended(append: Callable[..., None]) -> torch.Tensor:
        room = [part.clone() for part in parts]
        append(room)
        return torch.cat([part.float().flatten() for part in room])

    def gathered(keep: Callable[..., list[torch.Tensor]]) -> torch.Tensor:
        room = tuple(torch.empty_like(part[:, :, : cached - 1]) for part in parts)
        found = keep(parts, [scores], index, room)
        return torch.cat([part.float().flatten() for part in (*room, *found)])

    def turned(rotate_into: Callable[..., None]) -> torch.Tensor:
        out = torch.empty_like(turns[0])
        rotate_into(*turns, out)
        return out

    def merged(merge_one: Callable[..., None]) -> torch.Tensor:
        found = [part.clone() for part in kept]
        merge_one(*found, *merging)
        return torch.cat(found)

    def mixed() -> torch.Tensor:
        return draws.share_in_torch(draws.mixed_in_torch(positions, 104_729 * 3 + 15_485_863))

    few = 1.0 if dtype in HALF else 20.0
    return [
        (
            "an entry written",
            lambda: appended(lambda room: cached_entries.append_token(key, value, tuple(room), cached, 77)),
            lambda: appended(lambda room: cached_entries.append_token_in_torch(key, value, *room, cached, 77)),
            0.0,
        ),
        (
            "all entries but the lowest",
            lambda: cached_entries.all_but_lowest(scores, 4, 9),
            lambda: cached_entries.all_but_lowest_in_torch(scores, 4, 9),
            0.0,
        ),
        (
            "entries gathered",
            lambda: gathered(cached_entries.keep),
            lambda: gathered(cached_entries.keep_in_torch),
            0.0,
        ),
        ("numbers drawn", lambda: draws.uniform(positions, 1, 3), mixed, 0.0),
        (
            "keys rotated",
            lambda: turned(rotary.rotate_into),
            lambda: turned(rotary.rotate_into_in_torch),
            few,
        ),
        (
            "likeness of an evicted key",
            lambda: merged_entries.similarities(key, kept[0]),
            lambda: merged_entries.similarities_in_torch(key, kept[0]),
            1.0 if dtype in HALF else 50.0,
        ),
        (
            "an evicted entry merged",
            lambda: merged(merged_entries.merge_one),
            lambda: merged(merged_entries.merge_one_in_torch),
            few,
        ),
    ]
