"""Sparse and dense prefill of real text, in turn in one run, and the largest possible gain of a sparse one.

    python -m benchmarks.sparse_prefill --haystack $ESSAYS [--model NAME] [--lengths 16384,32768]
                                        [--recipes minference,flexprefill] [--layers N] [--repeats 3] [--threads N]

Keys: the share of the causal keys that blocks of 64 queries attend to. The next columns are attention's share of the
prefill's CPU seconds, and the ratio of `dense`'s attention seconds to its own. `at most` is the speedup over `dense` if
attention took no time. With `--layers` the model has only its first N layers, for a shorter run with the same time per
layer. CPU seconds next to tokens/s show disturbance by other processes. MInference's patterns are found in an untimed
prefill before, and stored in a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.timing import seconds
from hetero_kv import HeteroCache, eject, inject
from hetero_kv.evals.haystack import Haystack
from hetero_kv.families.sparse_prefill.attention import PromptAttention
from hetero_kv.families.sparse_prefill.known_patterns import ENVIRONMENT_VARIABLE
from hetero_kv.models import DEFAULT_MODEL, load_model
from hetero_kv.threads import set_threads

DENSE = "dense"


@dataclass(frozen=True)
class Prefill:
    """One prefill: wall-clock seconds, CPU seconds, those of attention, and the attended share of the keys."""

    wall: float
    cpu: float
    attention: float
    keys: float


def timed_prefill(model: Any, recipe: str, context: torch.Tensor) -> Prefill:
    """A prefill of [1, tokens] under a recipe."""
    injection = inject(model, recipe, command_line={"max_seq_len": context.shape[1]})
    spent = 0.0

    def timed(attend: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal spent
            start = time.process_time()
            result = attend(*arguments)
            spent += time.process_time() - start
            return result

        return run

    try:
        injection.compile_kernels()
        prompts = [operator.prompt_attention for operator in injection.attention_operators()]
        for operator in injection.attention_operators():
            operator.prompt_attention = timed(operator.prompt_attention)
        cache, before = HeteroCache(model), time.process_time()
        with torch.no_grad():
            wall = seconds(lambda: model(context, past_key_values=cache, logits_to_keep=1))
        return Prefill(wall, time.process_time() - before, spent, share_of_keys(prompts))
    finally:
        eject(model)


def share_of_keys(prompts: Iterable[PromptAttention]) -> float:
    """The share of the keys that prompts attended to so far, as a mean over layers."""
    return statistics.fmean(each.attended / each.there for each in prompts)


def with_layers(model: Any, count: int) -> None:
    """Remove all but the model's first `count` layers."""
    model.model.layers = model.model.layers[:count]
    model.config.num_hidden_layers = count
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:count]


def measured(model: Any, recipes: list[str], context: torch.Tensor, repeats: int) -> dict[str, Prefill]:
    """The medians of prefills under `dense` and the recipes, in turns."""
    for recipe in recipes:
        timed_prefill(model, recipe, context)
    runs: dict[str, list[Prefill]] = {name: [] for name in (DENSE, *recipes)}
    for _ in range(repeats):
        for name, found in runs.items():
            found.append(timed_prefill(model, name, context))
    return {
        name: Prefill(
            *(statistics.median(getattr(run, part) for run in found) for part in ("wall", "cpu", "attention", "keys"))
        )
        for name, found in runs.items()
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--haystack", required=True, type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--lengths", default="16384,32768")
    parser.add_argument("--recipes", default="minference,flexprefill")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if arguments.threads:
        set_threads(arguments.threads)
    loaded = load_model(arguments.model, device="cpu")
    if arguments.layers:
        with_layers(loaded.model, arguments.layers)
    lengths = [int(length) for length in arguments.lengths.split(",")]
    text = Haystack.from_file(arguments.haystack).text
    tokens = torch.tensor([loaded.tokenizer(text[: 8 * max(lengths)])["input_ids"]])
    table = Table(title=f"prefill, {arguments.model}, {loaded.model.config.num_hidden_layers} layers")
    columns = "tokens", "recipe", "keys", "tokens/s", "/ dense", "CPU s", "/ dense", "attention", "/ dense", "at most"
    for column in columns:
        table.add_column(column, justify="left" if column == "recipe" else "right")
    with tempfile.TemporaryDirectory() as folder:
        os.environ[ENVIRONMENT_VARIABLE] = folder
        for length in lengths:
            found = measured(loaded.model, arguments.recipes.split(","), tokens[:, :length], arguments.repeats)
            dense = found[DENSE]
            for name, run in found.items():
                table.add_row(
                    f"{length:,}", name, f"{run.keys:.1%}", f"{length / run.wall:.0f}", f"{dense.wall / run.wall:.2f}",
                    f"{run.cpu:.1f}", f"{dense.cpu / run.cpu:.2f}", f"{run.attention / run.cpu:.0%}",
                    f"{dense.attention / run.attention:.2f}",
                    f"{run.cpu / (run.cpu - run.attention):.2f}" if name == DENSE else "",
                )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
