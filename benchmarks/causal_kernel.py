"""Speed of a short turn's attention to all stored tokens, against single queries and the arithmetic of one core.

    python -m benchmarks.causal_kernel [--repeats 20] [--threads N] [--isa avx2] [--tokens 16384] [--json]

The heads are those of `kernel_bandwidth`, in fp16; each call reads different blocks of a pool much larger than the
caches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import cycle

import hetero_kv.cpu_ops  # noqa: F401  before torch, for it sets how OpenMP waits

# isort: split
import numpy as np

from benchmarks.kernel_bandwidth import BLOCK_SIZE, LLAMA_8B, QWEN_HALF_B, Heads, Pool, attend, awake
from benchmarks.timing import interleaved_samples, seconds
from hetero_kv.cpu_ops.causal_attention import attend_blocks_causal
from hetero_kv.cpu_ops.cpu_features import ISAS, use_isa

QUERIES = (1, 8, 30, 64)


def causal(pool: Pool, q_len: int, tokens: int, threads: int | None) -> Callable[[], float]:
    """Seconds in which the last `q_len` of `tokens` tokens attend to all of them."""
    heads, lists = pool.heads, cycle(pool.disjoint_lists(tokens // BLOCK_SIZE))
    q = pool.random.standard_normal((1, q_len, heads.kv_heads, heads.group, heads.dim), np.float32)
    counts = np.full((1, 1), tokens // BLOCK_SIZE, np.int32)

    def action() -> float:
        arguments = (q, pool.keys, pool.values, next(lists), counts, pool.lengths, pool.scale)
        return seconds(lambda: attend_blocks_causal(*arguments, threads=threads))

    return action


def measure(heads: Heads, arguments: argparse.Namespace) -> list[dict[str, float | str]]:
    """The best time for each number of queries, its rate, and the time of as many single queries."""
    pool, tokens, threads = Pool(heads, np.float16, 5e8), arguments.tokens, arguments.threads
    actions = {"single": awake(attend(pool, tokens, threads))}
    for q_len in QUERIES:
        actions[str(q_len)] = causal(pool, q_len, tokens, threads)
    for action in actions.values():
        action()
    best = {name: min(samples) for name, samples in interleaved_samples(actions, arguments.repeats).items()}
    flops = 4 * tokens * heads.kv_heads * heads.group * heads.dim
    return [
        {
            "heads": str(heads),
            "queries": q_len,
            "milliseconds": best[str(q_len)] * 1e3,
            "gflop_per_s": q_len * flops / best[str(q_len)] / 1e9,
            "single_queries_milliseconds": q_len * best["single"] * 1e3,
        }
        for q_len in QUERIES
    ]


def main() -> None:
    """Print a line for every number of queries, or with --json the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="rounds; the best of each is reported")
    parser.add_argument("--threads", type=int, help="threads of the kernels (default: all cores)")
    parser.add_argument("--isa", choices=ISAS, help="vector instructions of the kernels (default: the CPU's best)")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens attended to")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    arguments = parser.parse_args()
    if arguments.isa:
        use_isa(arguments.isa)
    rows = [row for heads in (LLAMA_8B, QWEN_HALF_B) for row in measure(heads, arguments)]
    if arguments.json:
        print(json.dumps({"cases": rows}))
        return
    for row in rows:
        print(
            f"{row['heads']}: {row['queries']:>2} queries {row['milliseconds']:8.2f} ms "
            f"{row['gflop_per_s']:6.0f} GFLOP/s; one by one {row['single_queries_milliseconds']:8.2f} ms"
        )


if __name__ == "__main__":
    main()
