"""`make bench`: runs every benchmark that needs no GPU."""

from __future__ import annotations

import runpy
import sys

BENCHMARKS = (
    "peers",
    "kernel_bandwidth",
    "weight_bandwidth",
    "few_rows",
    "short_turn",
    "contexts",
    "causal_kernel",
    "long_context",
    "prefill_memory",
)

if __name__ == "__main__":
    chosen = sys.argv[1:] or BENCHMARKS
    if unknown := set(chosen) - set(BENCHMARKS):
        sys.exit(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(BENCHMARKS)}")
    for name in chosen:
        sys.argv = [name]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
