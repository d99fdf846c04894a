"""Time of matrix products of a decoded token on a busy machine, by how long waiting OpenMP threads spin.

    python -m benchmarks.busy_machine                # with as many busy processes as there are CPUs
    python -m benchmarks.busy_machine --busy 0       # alone

Separate processes run in turn: hetero_kv imported first; torch imported first, where spare threads shorten the
spinning; and torch with GNU OpenMP's default spinning, as without hetero_kv.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

# Products of a few tokens of a model with 24 layers and seven products per layer.
_TOKENS, _PRODUCTS, _WIDTH = 5, 7 * 24, 896
_OWN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
WAYS = {
    "hetero_kv first": "import hetero_kv.cpu_ops, torch",
    "torch first": "import torch, hetero_kv.cpu_ops",
    "GNU OpenMP's own": "import torch",
}
WORKER = """
{imports}
import time
row, weight = torch.randn(1, {width}), torch.randn({width}, {width})
for _ in range(20):
    torch.nn.functional.linear(row, weight)
wall, cpu = time.perf_counter(), time.process_time()
for _ in range({count}):
    torch.nn.functional.linear(row, weight)
    torch.add(weight, 1)
print(1000 * (time.perf_counter() - wall) / {tokens}, 1000 * (time.process_time() - cpu) / {tokens})
"""


def measured(imports: str) -> tuple[float, float]:
    """(wall-clock ms, CPU ms) of a token's products."""
    program = WORKER.format(imports=imports, width=_WIDTH, count=_TOKENS * _PRODUCTS, tokens=_TOKENS)
    environment = {name: value for name, value in os.environ.items() if name not in _OWN}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    wall, cpu = map(float, done.stdout.split())
    return wall, cpu


def main() -> None:
    """Print the medians, and their ratios to the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--busy", type=int, default=os.cpu_count(), help="other busy processes (default: the number of CPUs)"
    )
    parser.add_argument("--repeats", type=int, default=3)
    flags = parser.parse_args()
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(flags.busy)]
    try:
        rounds = [{way: measured(imports) for way, imports in WAYS.items()} for _ in range(flags.repeats)]
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    medians = {way: [statistics.median(each[way][kind] for each in rounds) for kind in (0, 1)] for way in WAYS}
    first = next(iter(medians.values()))
    print(f"{flags.busy} other busy processes, {os.cpu_count()} CPUs")
    for way, (wall, cpu) in medians.items():
        print(f"{way:18} {wall:8.1f} ms wall clock ({wall / first[0]:.1f}x), {cpu:6.1f} ms of CPUs")


if __name__ == "__main__":
    main()
