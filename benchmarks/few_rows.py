"""Time of products of few activation rows with packed weights: with the codes, and with unpacked weights.

    python -m benchmarks.few_rows [--types Q4_K,Q8_0] [--rows 1,2,3,4,8,16,32,48,64,96,128] [--dtype bfloat16]
                                  [--repeats 15] [--threads N]

Short questions, batches and beams have few rows. The matrices are those of the default model's MLP, from memory larger
than most caches. Both ways run in turn; figures are medians. The last column has the way that the project chooses.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import cycle
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.timing import interleaved_samples, seconds
from benchmarks.weight_bandwidth import COLUMNS, Weights
from hetero_kv.cpu_ops.prompt_products import multiply_prompt
from hetero_kv.cpu_ops.quantized_linear import multiply
from hetero_kv.threads import set_threads
from hetero_kv.weights.kernel_arrays import ARRAY_DTYPES, bits
from hetero_kv.weights.packed_weight import FEW_ROWS
from hetero_kv.weights.quantized_weight import QuantizedWeight, kernel_threads_of_torch, most_rows_of_codes

DEFAULT_ROWS = "1,2,3,4,8,16,32,48,64,96,128"
_GB = 0.2


def measure(name: str, rows: list[int], dtype: torch.dtype, repeats: int) -> list[dict[str, Any]]:
    """A line per number of rows, for one type."""
    weights = Weights(name, _GB * 1e9)
    several = [QuantizedWeight(matrix) for matrices in (next(weights.calls) for _ in range(4)) for matrix in matrices]
    of_codes, of_numbers = cycle(several), cycle(several)
    generator = torch.Generator().manual_seed(0)
    lines = []
    for count in rows:
        x = torch.randn(count, COLUMNS, generator=generator).to(dtype)
        actions = {
            "codes": lambda x=x: seconds(lambda: _by_codes(next(of_codes), x)),
            "numbers": lambda x=x: seconds(lambda: next(of_numbers)._multiply_unpacked(x)),
        }
        for action in actions.values():
            action()
        times = {of: statistics.median(found) for of, found in interleaved_samples(actions, repeats).items()}
        taken = "codes" if count <= most_rows_of_codes(name, dtype) else "numbers"
        lines.append({"type": name, "rows": count, **times, "taken": taken})
    return lines


def _by_codes(weight: QuantizedWeight, x: torch.Tensor) -> torch.Tensor:
    threads = kernel_threads_of_torch()
    if len(x) > FEW_ROWS and x.dtype in ARRAY_DTYPES:
        out = torch.empty((len(x), weight.shape[0]), dtype=x.dtype)
        multiply_prompt(bits(x), weight.matrix, bits(out), threads=threads)
        return out
    return torch.from_numpy(multiply(x.float().contiguous().numpy(), (weight.matrix,), threads)[0]).to(x.dtype)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="Q4_K,Q8_0", help="weight formats, with commas between")
    parser.add_argument("--rows", default=DEFAULT_ROWS, help="rows of activations, with commas between")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, default=15, help="rounds of one product each way")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    flags = parser.parse_args()
    set_threads(flags.threads)
    rows = [int(count) for count in flags.rows.split(",")]
    table = Table("type", "rows", "by codes, ms", "unpacked, ms", "unpacked / by codes", "taken")
    for name in flags.types.split(","):
        for line in measure(name, rows, getattr(torch, flags.dtype), flags.repeats):
            table.add_row(
                name, str(line["rows"]), f"{1e3 * line['codes']:.2f}", f"{1e3 * line['numbers']:.2f}",
                f"{line['numbers'] / line['codes']:.2f}", line["taken"],
            )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
