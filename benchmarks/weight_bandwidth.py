"""Bandwidth of products with packed weights as a share of the machine's DRAM read bandwidth.

    python -m benchmarks.weight_bandwidth [--types Q5_0,Q8_0,Q6_K,Q4_K] [--repeats 40] [--threads N] [--gb 0.5]

Each product has one row of activations, as for a decoded token, and the matrices of the default model's MLP: several
with a shared input per call, different ones in every call, from memory much larger than the caches. The same rounds
measure plain reads of this memory; best against best, and median against median.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import cycle
from typing import Any

from benchmarks.dram_read import WAYS, fastest_read, stretches_of

# isort: split
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.goals import verdicts_table
from benchmarks.timing import interleaved_samples, seconds
from hetero_kv.cpu_ops.quantized_linear import PackedMatrix, multiply
from hetero_kv.cpu_ops.weight_formats import format_named

ROWS, COLUMNS = 896, 4864
"""The shape of the default model's down projections; every type's block size divides the columns."""
TOGETHER = 8
"""Matrices per call: about 20 MB, as in two layers."""
GOAL = 0.7
"""The goal for every type of the default model's file, as a share of the DRAM read bandwidth."""
DEFAULT_TYPES = "Q5_0,Q8_0,Q6_K,Q4_K"


class Weights:
    """Random matrices of one type, side by side in one stretch of memory."""

    def __init__(self, name: str, size_bytes: float) -> None:
        layout = format_named(name)
        nbytes = layout.packed_bytes(ROWS, COLUMNS)
        calls = int(size_bytes / nbytes / TOGETHER)
        random = np.random.default_rng(0)
        memory = np.empty(calls * TOGETHER * nbytes + 64, np.uint8)
        self.memory = memory[-memory.ctypes.data % 64 :][: calls * TOGETHER * nbytes]
        one = random.integers(0, 256, nbytes, np.uint8)
        matrices = []
        for part in self.memory.reshape(-1, nbytes):
            part[:] = one
            matrices.append(PackedMatrix(part, name, ROWS, COLUMNS))
        self.call_bytes = TOGETHER * nbytes
        self.calls = cycle([matrices[i : i + TOGETHER] for i in range(0, len(matrices), TOGETHER)])
        self.stretches = cycle(stretches_of(self.memory))
        self.x = random.standard_normal((1, COLUMNS), np.float32)

    def product(self, threads: int | None) -> float:
        """Seconds per byte of a call."""
        matrices = next(self.calls)
        return seconds(lambda: multiply(self.x, matrices, threads)) / self.call_bytes

    def read(self) -> float:
        """Seconds per byte of reading the same memory."""
        return fastest_read([next(self.stretches) for _ in range(WAYS)])


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One type's rate and shares."""
    weights = Weights(name, arguments.gb * 1e9)
    actions = {"product": lambda: weights.product(arguments.threads), "read": weights.read}
    for action in actions.values():
        action()
    samples = interleaved_samples(actions, arguments.repeats)
    best = {of: min(values) for of, values in samples.items()}
    median = {of: statistics.median(values) for of, values in samples.items()}
    return {
        "type": name,
        "gb_per_s": 1 / best["product"] / 1e9,
        "dram_gb_per_s": 1 / best["read"] / 1e9,
        "share": best["read"] / best["product"],
        "median_share": median["read"] / median["product"],
    }


def main() -> None:
    """Print the table, goals and verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=DEFAULT_TYPES, help="weight formats, with commas between")
    parser.add_argument("--repeats", type=int, default=40, help="rounds of one call of each")
    parser.add_argument("--threads", type=int, help="threads of the kernels (default: all cores)")
    parser.add_argument("--gb", type=float, default=0.5, help="memory of each type's weights; far above the caches")
    arguments = parser.parse_args()
    rows = [measure(name, arguments) for name in arguments.types.split(",")]
    table = Table("type", "GB/s", "DRAM read, GB/s", "share, best", "share, medians")
    for row in rows:
        table.add_row(
            row["type"], f"{row['gb_per_s']:.1f}", f"{row['dram_gb_per_s']:.1f}", f"{row['share']:.0%}",
            f"{row['median_share']:.0%}",
        )  # fmt: skip
    goals = [(f"{row['type']}, share of the DRAM read", row["share"], GOAL) for row in rows]
    Console().print(table, verdicts_table(goals))


if __name__ == "__main__":
    main()
