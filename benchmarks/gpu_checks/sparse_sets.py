"""The keys that a sparse prefill chooses on a GPU, compared with those that a CPU chooses."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_checks.setting import CheckResult, Setting
from hetero_kv.cpu_ops.key_runs import QUERY_BLOCK
from hetero_kv.families.sparse_prefill import flexprefill, minference
from hetero_kv.families.sparse_prefill.chunk import Chunk
from hetero_kv.families.sparse_prefill.device_chunk import DeviceChunk
from hetero_kv.families.sparse_prefill.device_sets import HeadPatterns, flexprefill_sets
from hetero_kv.families.sparse_prefill.key_lists import KeyBlocks, KeyLines, runs_of
from hetero_kv.families.sparse_prefill.minference import Pattern
from hetero_kv.gpu_ops.attention_backend import obstacle_to_sets

#: Share of a CPU's keys that may differ: the last ones chosen, whose scores are equal but for rounding.
_MOST_APART = 2e-3
_MASS, _LEAST, _MATCHES = 0.5, 512, 2


def check(setting: Setting) -> Iterator[CheckResult]:
    """The sets of every pattern and of flexprefill in float32; then the attention to them."""
    tokens, n = (600, 200) if setting.tiny else (16_384, 1024)
    chunk = _chunk(tokens - n, n)
    tensors = chunk.q, chunk.past_k, chunk.past_v, chunk.k, chunk.v
    there = [each.to(setting.device) for each in tensors]
    obstacle = "it needs a GPU" if not setting.on_gpu else obstacle_to_sets(there[0], there[3], there[4])
    budget = tokens // 8
    patterns = [
        Pattern("vertical_slash", budget // 4, budget),
        Pattern("vertical_slash", budget // 32, budget // 16),
        Pattern("block_sparse", 0, budget),
        Pattern("a_shape", budget // 4, budget),
    ]
    if obstacle is not None:
        yield CheckResult("sparse prefill's sets", None if not setting.on_gpu else False, obstacle)
        return
    device = DeviceChunk.of(Chunk(*there, chunk.scale, chunk.softcap))
    by_patterns = HeadPatterns.of(patterns, setting.device)
    for name, keys, sets in (
        (
            "minference",
            minference.keys_of(chunk, patterns, _MATCHES),
            lambda part, count, head: by_patterns.sets(part, count, head, _MATCHES),
        ),
        (
            "flexprefill",
            flexprefill.keys_of(chunk, _MASS, _LEAST),
            lambda part, count, head: flexprefill_sets(part, count, _MASS, _LEAST),
        ),
    ):
        apart = _share_apart(chunk, keys, sets(device, n, 0).seen().cpu())
        out, expected = device.attention(sets)[0].cpu(), chunk.attention(keys)[0]
        error = float((out - expected).norm() / expected.norm())
        yield CheckResult(
            f"sparse prefill's sets, {name}",
            apart <= _MOST_APART and error <= 0.05,
            f"{apart:.2%} of a CPU's keys differ, at most {_MOST_APART:.2%}; error of the attention {error:.1e}",
            {"apart": apart, "error": error},
        )


def _chunk(past: int, n: int) -> Chunk:
    """Four heads of two kv heads; some keys, and some distances, are attended to by all queries."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, n, 64, generator=generator)
    k, v = (torch.randn(1, 2, past + n, 64, generator=generator) for _ in range(2))
    k[:, :, ::37] += 2 * q.mean(dim=(0, 1, 2))
    return Chunk(q, k[:, :, :past], v[:, :, :past], k[:, :, past:], v[:, :, past:], 0.2, None)


def _share_apart(chunk: Chunk, keys: list[KeyLines | KeyBlocks], found: torch.Tensor) -> float:
    """Tokens of query blocks that one of both has, relative to those that the CPU has."""
    runs, starts = runs_of(keys, chunk.past, chunk.n)
    expected = torch.zeros(len(starts) - 1, -(-chunk.total // QUERY_BLOCK) * QUERY_BLOCK, dtype=torch.bool)
    for item, mask in enumerate(expected):
        for first, stop in runs[starts[item] : starts[item + 1]]:
            mask[first:stop] = True
    expected = expected[:, : chunk.total]
    return float((expected ^ found.flatten(0, 2)).sum() / expected.sum())
