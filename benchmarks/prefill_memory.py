"""Peak memory of a prefill, measured, against what the design says it takes.

    python -m benchmarks.prefill_memory [--model smollm2-135m-instruct] [--lengths 2048,4096,7680]

The design: weights + one layer's KV + two hidden-state buffers + one chunk's activations + the store. The chunk's
activations are what a prompt of a single chunk takes beyond the other terms; every longer prompt is held to that.
Each length runs in a process of its own, so that a peak is that run's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

CHUNK = 512


def measured(model_name: str, length: int) -> dict[str, float]:
    """Bytes before and at the peak of one prefill in this process, and the terms that the design accounts for."""
    import torch

    from hetero_kv import HeteroCache, inject
    from hetero_kv.models import load_model
    from hetero_kv.planner import KVShape

    model: Any = load_model(model_name, dtype="float32").model
    injection = inject(model, "ktransformers", command_line={"chunk_size": CHUNK})
    # A first prompt brings in what is loaded once: kernels, thread stacks, libraries.
    with torch.no_grad():
        model(torch.randint(100, 20_000, (1, 64)), past_key_values=HeteroCache(model), logits_to_keep=1)
        prompt = torch.randint(100, 20_000, (1, length))
        cache = HeteroCache(model)
        process, peak, done = psutil.Process(), 0, threading.Event()
        before = process.memory_info().rss

        def watch() -> None:
            nonlocal peak
            while not done.is_set():
                peak = max(peak, process.memory_info().rss)
                time.sleep(0.001)

        watcher = threading.Thread(target=watch)
        watcher.start()
        model(prompt, past_key_values=cache, logits_to_keep=1)
        done.set()
        watcher.join()
    config, shape = model.config, KVShape.of(model.config)
    return {
        "growth": peak - before,
        "store": injection.bytes_per_token() * length,
        "layer_kv": 4 * length * shape.kv_heads * (shape.k_dim + shape.v_dim),
        "hidden": 2 * 4 * length * config.hidden_size,
        "rotary": 2 * 4 * length * shape.k_dim,
    }


def main() -> None:
    """Print the table, or with --json the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--lengths", default="2048,4096,7680")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measured(arguments.model, arguments.measure)))
        return
    rows = {}
    for length in [CHUNK, *(int(n) for n in arguments.lengths.split(","))]:
        command = [sys.executable, "-m", "benchmarks.prefill_memory", "--model", arguments.model]
        output = subprocess.run([*command, "--measure", str(length)], check=True, capture_output=True, text=True).stdout
        rows[length] = json.loads(output.splitlines()[-1])
    for row in rows.values():
        row["accounted"] = sum(row[part] for part in ("store", "layer_kv", "hidden", "rotary"))
    activations = rows[CHUNK]["growth"] - rows[CHUNK]["accounted"]
    if arguments.json:
        print(json.dumps({"chunk_activations": activations, "lengths": rows}))
        return
    table = Table(title=f"{arguments.model}, fp32, chunks of {CHUNK}: growth of memory over the weights, MB")
    for column in ("tokens", "store", "layer KV", "2 hidden", "rotary", "+ chunk", "design", "measured", "ratio"):
        table.add_column(column, justify="right")
    for length, row in rows.items():
        design = row["accounted"] + activations
        parts = [row["store"], row["layer_kv"], row["hidden"], row["rotary"], activations, design, row["growth"]]
        table.add_row(str(length), *(f"{part / 1e6:.0f}" for part in parts), f"{row['growth'] / design:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
