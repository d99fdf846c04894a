"""The peak memory of a prefill, compared with the plan: weights + store + one layer's KV + two hidden-state buffers +
one chunk's activations.

    python -m benchmarks.prefill_memory [--lengths 2048,4096,7680] [--long 16384]

The figure is the peak growth of the process's memory over the loaded weights, in a process per run: the small real
model at `--lengths`, and a random model of eight layers with the heads of a 7B model (8 kv heads of 128) at `--long`.
The C library keeps some freed memory: "kept" is a run that allows this, "returned" one that returns memory at once,
which the plan assumes. Takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

SMALL = "smollm2-135m-instruct"
WIDE = "random, 8 kv heads of 128"
CHUNK = 512
PARTS = ("layer_kv", "hidden", "activations")
RETURN_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def _model(name: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hetero_kv.models import load_model

    if name == SMALL:
        return load_model(name, dtype="float32", device="cpu").model
    shape = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 20_000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 1 << 20}
    with torch.no_grad():
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape, **heads)).eval()


def measured(name: str, length: int) -> dict[str, float]:
    """Bytes that one prefill in this process adds at its peak, bytes in the store, and the planned bytes."""
    import torch

    from hetero_kv import HeteroCache, inject
    from hetero_kv.planning.plan import Footprint

    model = _model(name)
    injection = inject(model, "ktransformers", command_line={"chunk_size": CHUNK})
    with torch.no_grad():
        # A first prompt loads kernels, thread stacks and libraries.
        model(torch.randint(100, 20_000, (1, 64)), past_key_values=HeteroCache(model, 64), logits_to_keep=1)
        prompt = torch.randint(100, 20_000, (1, length))
        cache = HeteroCache(model, length)
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
    memory = Footprint.of(injection).memory(length)
    parts = {part: getattr(memory, part) for part in PARTS}
    return {"growth": peak - before, "planned": memory.store + memory.compute, "store": memory.store, **parts}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="2048,4096,7680")
    parser.add_argument("--long", type=int, default=16384)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measured(arguments.measure[0], int(arguments.measure[1]))))
        return
    runs = [(SMALL, int(length)) for length in arguments.lengths.split(",")] + [(WIDE, arguments.long)]
    table = Table(title=f"growth of memory over the weights in a prefill, chunks of {CHUNK}, fp32, MB")
    for column in ("model", "tokens", "store", *PARTS, "planned", "returned", "ratio", "kept", "ratio"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, length in runs:
        returned, kept = (_in_process_of_its_own(name, length, extra) for extra in (RETURN_AT_ONCE, {}))
        planned = returned["planned"]
        figures = [
            f"{size / 1e6:.0f}"
            for size in (returned["store"], *(returned[p] for p in PARTS), planned, returned["growth"])
        ]
        ratios = [f"{run['growth'] / planned:.2f}" for run in (returned, kept)]
        table.add_row(name, str(length), *figures, ratios[0], f"{kept['growth'] / 1e6:.0f}", ratios[1])
    Console().print(table)


def _in_process_of_its_own(name: str, length: int, environment: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.prefill_memory", "--measure", name, str(length)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | environment).stdout
    return json.loads(output.splitlines()[-1])


if __name__ == "__main__":
    main()
