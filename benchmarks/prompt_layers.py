"""Prefill of real text by the layers' modules and by the fused prefill layer, in turn in one run.

    python -m benchmarks.prompt_layers --haystack $ESSAYS [--model NAME] [--recipe adaptive]
                                       [--lengths 64,256,1024,4096,16384] [--repeats 5] [--threads N]

Prompts use the fused layer (`hetero_kv/adapter/fused_prefill_layer.py`) if a layer has Llama's structure. Weights stay
packed, as in a chat. Figures are medians of wall-clock times.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.timing import interleaved_medians, seconds
from hetero_kv import HeteroCache, inject
from hetero_kv.adapter.fused_prefill_layer import FusedPrefillLayer
from hetero_kv.evals.haystack import Haystack
from hetero_kv.evals.packed_model import load_packed
from hetero_kv.models import DEFAULT_MODEL


def measured(model: Any, context: torch.Tensor, repeats: int) -> tuple[float, float]:
    """Seconds of a prefill of [1, tokens] by the layers' modules and by the fused layer."""

    def prefilled() -> float:
        cache = HeteroCache(model)
        return seconds(lambda: model(context, past_key_values=cache, logits_to_keep=1))

    def by_own_steps() -> float:
        with patch.object(FusedPrefillLayer, "fits", return_value=False):
            return prefilled()

    found = interleaved_medians({"own": by_own_steps, "short": prefilled}, repeats)
    return found["own"], found["short"]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--haystack", required=True, type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--recipe", default="adaptive")
    parser.add_argument("--lengths", default="64,256,1024,4096,16384")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    flags = parser.parse_args()
    lengths = [int(length) for length in flags.lengths.split(",")]
    loaded = load_packed(flags.model, threads_num=flags.threads or "auto")
    text = Haystack.from_file(flags.haystack).text
    tokens = torch.tensor([loaded.tokenizer(text[: 8 * max(lengths)])["input_ids"]])
    injection = inject(loaded.model, flags.recipe, command_line={"max_seq_len": max(lengths)})
    injection.compile_kernels()
    table = Table(
        "tokens", "own steps, tokens/s", "short way, tokens/s", "own / short", title=f"prefill, {flags.model}"
    )
    for length in lengths:
        own, short = measured(loaded.model, tokens[:, :length], flags.repeats)
        table.add_row(f"{length:,}", f"{length / own:.0f}", f"{length / short:.0f}", f"{own / short:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
