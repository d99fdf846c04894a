"""Bandwidth of block attention as a share of the machine's DRAM read bandwidth, compared with torch's attention.

    python -m benchmarks.kernel_bandwidth [--repeats 40] [--threads N] [--isa avx2] [--pool_gb 1] [--json]

Each call attends to different, scattered blocks of a pool much larger than the caches, so that every byte comes from
DRAM. The reference is several plain reading kernels over stretches of the same pool, in the same rounds: best against
best (the undisturbed machine), and median against median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import hetero_kv.cpu_ops  # noqa: F401  before torch, for it sets how OpenMP waits

# isort: split
import numba
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.dram_read import STRETCH, WAYS, fastest_read
from benchmarks.goals import verdicts_table
from benchmarks.timing import interleaved_samples, seconds
from hetero_kv.cpu_ops.attention import attend_blocks
from hetero_kv.cpu_ops.cpu_features import ISAS, isa, use_isa
from hetero_kv.cpu_ops.scores import block_scores
from hetero_kv.cpu_ops.top_k import top_k_blocks

BLOCK_SIZE = 128
K = 1024
GOAL = 0.8
"""Share of the DRAM read bandwidth that attention to 16K tokens in fp16 is to reach."""


@dataclass(frozen=True)
class Heads:
    """A model's attention: `group` query heads for each of `kv_heads`."""

    kv_heads: int
    group: int
    dim: int

    def __str__(self) -> str:
        return f"{self.kv_heads * self.group} q / {self.kv_heads} kv heads, dim {self.dim}"


LLAMA_8B, QWEN_HALF_B = Heads(8, 4, 128), Heads(2, 7, 64)


class Pool:
    """Keys and values of one shape and storage type, filled, on a cache-line boundary."""

    def __init__(self, heads: Heads, dtype: type, size_bytes: float) -> None:
        itemsize = np.dtype(dtype).itemsize
        self.heads = heads
        self.num_blocks = int(size_bytes / (2 * heads.kv_heads * BLOCK_SIZE * heads.dim * itemsize))
        shape = (self.num_blocks, heads.kv_heads, BLOCK_SIZE, heads.dim)
        count = int(np.prod(shape)) * itemsize
        memory = np.empty(2 * count + 64, np.uint8)
        start = -memory.ctypes.data % 64
        self.memory = memory[start : start + 2 * count]
        self.keys: np.ndarray = self.memory[:count].view(dtype).reshape(shape)
        self.values: np.ndarray = self.memory[count:].view(dtype).reshape(shape)
        words = self.memory[: self.memory.size // STRETCH * STRETCH].view(np.uint64)
        self.stretches = cycle(np.split(words, words.nbytes // STRETCH))
        self.random = np.random.default_rng(0)
        self.keys[:] = self.random.standard_normal(shape[1:])
        self.values[:] = self.random.standard_normal(shape[1:])
        self.lengths = np.full(self.num_blocks, BLOCK_SIZE, np.int32)
        self.scale = heads.dim**-0.5

    def query(self) -> np.ndarray:
        """A random query, [1, kv_heads, group, dim] float32."""
        return self.random.standard_normal((1, self.heads.kv_heads, self.heads.group, self.heads.dim), np.float32)

    def disjoint_lists(self, blocks: int) -> list[np.ndarray]:
        """The pool's blocks, shuffled and dealt into lists [1, 1, blocks] int32."""
        ids = self.random.permutation(self.num_blocks).astype(np.int32)
        return [ids[i : i + blocks].copy()[None, None] for i in range(0, self.num_blocks - blocks + 1, blocks)]

    def fastest_read(self) -> float:
        """Seconds per byte of the fastest of several ways of reading, each of another stretch of the pool."""
        return fastest_read([next(self.stretches) for _ in range(WAYS)])


def awake(action: Callable[[], float]) -> Callable[[], float]:
    """The second of two calls in a row: in a decode step the layer before has woken the threads."""

    def second() -> float:
        action()
        return action()

    return second


def attend(pool: Pool, tokens: int, threads: int | None) -> Callable[[], float]:
    """Seconds of attention to `tokens` tokens in blocks that the previous calls did not touch."""
    lists, q = cycle(pool.disjoint_lists(tokens // BLOCK_SIZE)), pool.query()
    counts = np.full((1, 1), tokens // BLOCK_SIZE, np.int32)

    def action() -> float:
        ids = next(lists)
        return seconds(
            lambda: attend_blocks(q, pool.keys, pool.values, ids, counts, pool.lengths, pool.scale, threads=threads)
        )

    return action


def retrieve(pool: Pool, stored: int, best: int, separate: bool, threads: int | None) -> Callable[[], float]:
    """Seconds of a decode step: score `stored` tokens' blocks, choose the best, attend to them."""
    heads, blocks = pool.heads, stored // BLOCK_SIZE
    lists = cycle([ids[0] for ids in pool.disjoint_lists(blocks)])
    representatives = pool.random.standard_normal((pool.num_blocks, heads.kv_heads, 1, heads.dim)).astype(np.float16)
    counts, chosen_lists = np.array([blocks], np.int32), heads.kv_heads if separate else 1

    def step(ids: np.ndarray, q: np.ndarray) -> None:
        scores = block_scores(q, representatives, ids, counts, "dot", threads=threads)
        summed = scores.sum(axis=2 if separate else (1, 2)).reshape(chosen_lists, blocks)
        positions, taken = top_k_blocks(summed, np.repeat(counts, chosen_lists), best)
        chosen = np.ascontiguousarray(ids[0][positions][None])
        attend_blocks(
            q, pool.keys, pool.values, chosen, taken[None], pool.lengths, pool.scale, threads=threads
        )  # fmt: skip

    def action() -> float:
        ids, q = next(lists), pool.query()
        return seconds(lambda: step(ids, q))

    return action


def torch_attention(pool: Pool, tokens: int) -> Callable[[], float]:
    """Seconds of torch's attention to as many tokens, gathered beforehand, the queries of a group as its rows."""
    gathered = []
    for ids in pool.disjoint_lists(tokens // BLOCK_SIZE)[:4]:
        kv = (array[ids[0, 0]].swapaxes(0, 1).reshape(1, pool.heads.kv_heads, tokens, -1) for array in
              (pool.keys, pool.values))  # fmt: skip
        gathered.append(tuple(torch.from_numpy(array) for array in kv))
    pairs, q = cycle(gathered), torch.from_numpy(pool.query()).to(gathered[0][0].dtype)

    def action() -> float:
        keys, values = next(pairs)
        return seconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, keys, values))

    return action


def measure(heads: Heads, dtype: type, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every case of one pool, each with its time, rate and shares."""
    pool, threads = Pool(heads, dtype, arguments.pool_gb * 1e9), arguments.threads
    bytes_per_token = 2 * heads.kv_heads * heads.dim * np.dtype(dtype).itemsize
    cases = {f"{tokens // K}K attended": (attend(pool, tokens, threads), tokens) for tokens in (16 * K, 64 * K)}
    if dtype is np.float16:
        for name, separate in (("SHARED", False), ("SEPARATE", True)):
            step = retrieve(pool, 64 * K, 96, separate, threads)
            cases[f"64K stored, best 96 blocks, {name}"] = (step, 96 * BLOCK_SIZE)
    actions = {name: awake(action) for name, (action, _) in cases.items()}
    actions["torch"] = awake(torch_attention(pool, 16 * K))
    actions["read"] = pool.fastest_read
    for action in actions.values():
        action()
    samples = interleaved_samples(actions, arguments.repeats)
    torch_median = statistics.median(samples["torch"])
    rows = []
    for name, (_, tokens) in cases.items():
        best, median = min(samples[name]), statistics.median(samples[name])
        size = tokens * bytes_per_token
        rows.append(
            {
                "heads": str(heads),
                "storage": np.dtype(dtype).name,
                "case": name,
                "milliseconds": median * 1e3,
                "best_milliseconds": best * 1e3,
                "gb_per_s": size / best / 1e9,
                "gflop_per_s": 4 * tokens * heads.kv_heads * heads.group * heads.dim / best / 1e9,
                "dram_gb_per_s": 1 / min(samples["read"]) / 1e9,
                "share_of_dram": size * min(samples["read"]) / best,
                "median_share_of_dram": size * statistics.median(samples["read"]) / median,
                "torch_milliseconds": torch_median * 1e3 * tokens / (16 * K),
            }
        )
    return rows


def main() -> None:
    """Print the table, or with --json the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40, help="rounds of one call of each")
    parser.add_argument("--threads", type=int, help="threads of the kernels (default: all cores)")
    parser.add_argument("--isa", choices=ISAS, help="vector instructions of the kernels (default: the CPU's best)")
    parser.add_argument("--pool_gb", type=float, default=1.0, help="size of each pool; far above the last-level cache")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    arguments = parser.parse_args()
    if arguments.isa:
        use_isa(arguments.isa)
    rows = [
        row
        for heads in (LLAMA_8B, QWEN_HALF_B)
        for dtype in (np.float16, np.float32)
        for row in measure(heads, dtype, arguments)
    ]
    machine = {
        "cores": os.cpu_count(),
        "threads": arguments.threads or numba.get_num_threads(),
        "threading_layer": numba.threading_layer(),
        "isa": isa(),
    }
    if arguments.json:
        print(json.dumps({"machine": machine, "cases": rows}))
        return
    table = Table(title=f"Block attention, one decode step of one layer ({machine})")
    texts, shares = ("heads", "storage", "case"), ("of DRAM, best", "of DRAM, medians")
    for column in (*texts, "best ms", "ms", "GB/s", "GFLOP/s", "DRAM GB/s", *shares, "torch ms", "torch / ours"):
        table.add_column(column, justify="left" if column in texts else "right")
    for row in rows:
        keys = ("best_milliseconds", "milliseconds", "gb_per_s", "gflop_per_s", "dram_gb_per_s")
        table.add_row(
            row["heads"], row["storage"], row["case"], *(f"{row[key]:.2f}" for key in keys),
            f"{row['share_of_dram']:.0%}", f"{row['median_share_of_dram']:.0%}", f"{row['torch_milliseconds']:.1f}",
            f"{row['torch_milliseconds'] / row['milliseconds']:.1f}",
        )  # fmt: skip
    goals = [
        (f"{row['heads']}, {row['storage']}, {row['case']}, share of the DRAM read", row["share_of_dram"], GOAL)
        for row in rows
        if row["storage"] == "float16" and row["case"] == "16K attended"
    ]
    Console(width=180).print(table, verdicts_table(goals))
    print("torch: attention to as many contiguous tokens, scaled from 16K; it neither gathers nor selects blocks.")


if __name__ == "__main__":
    main()
