"""`make bench`: runs every benchmark that needs no GPU."""

from __future__ import annotations

import argparse
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
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description="Run benchmarks that need no GPU; python -m benchmarks.NAME takes flags."
    )
    parser.add_argument("names", nargs="*", help=f"all if none is named: {', '.join(BENCHMARKS)}")
    chosen = parser.parse_args().names or BENCHMARKS
    if unknown := set(chosen) - set(BENCHMARKS):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(BENCHMARKS)}")
    for name in chosen:
        sys.argv = [name]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
