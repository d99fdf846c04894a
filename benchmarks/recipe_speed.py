"""Time of a decoded token under each recipe, after one text, in one run.

    python -m benchmarks.recipe_speed --prompt_file TEXT [--lengths 4000,8000,16000,28000] [--threads N]
        [--recipes ktransformers,dense,adaptive,adaptive:target_mass=0.95] [--rounds 12] [--tokens 8] [--json FILE]

Every recipe has a separate model with packed weights, and prefills the first tokens of the text. In each round every
recipe decodes the text's next tokens and rolls back, so that all recipes see the same tokens at the same length. A
figure is the median over rounds of the mean over a round's tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.timing import interleaved_medians, seconds
from hetero_kv import HeteroCache, inject, open_model
from hetero_kv.evals import config_specs
from hetero_kv.models import DEFAULT_MODEL
from hetero_kv.threads import set_threads


class Decoding:
    """A recipe's model, with the first `length` of `tokens` [1, n] in its cache and room for the others."""

    def __init__(self, spec: Any, model: str, tokens: torch.Tensor, length: int, threads: int) -> None:
        opened = open_model(model)
        settings = {"max_seq_len": tokens.shape[1], "threads_num": threads}
        inject(opened.model, spec.rules, command_line=settings | spec.settings)
        self.model, self.following = opened.load().model, tokens[:, length:]
        self.cache = HeteroCache(self.model)
        self._forward(tokens[:, :length])

    def _forward(self, ids: torch.Tensor) -> None:
        with torch.no_grad():
            self.model(ids, past_key_values=self.cache, logits_to_keep=1)

    def a_round(self) -> float:
        """Milliseconds of one of the text's next tokens."""
        parts = self.following.split(1, dim=1)
        spent = seconds(lambda: [self._forward(token) for token in parts])
        self.cache.crop(-len(parts))
        return 1000 * spent / len(parts)


def measured(make: Callable[[str], Decoding], names: list[str], rounds: int) -> dict[str, float]:
    """Milliseconds per token under each recipe."""
    decodings = {name: make(name) for name in names}
    for decoding in decodings.values():
        decoding.a_round()
    return interleaved_medians({name: decoding.a_round for name, decoding in decodings.items()}, rounds)


def main() -> None:
    """Run every length, print a table, and write `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt_file", type=Path, required=True)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--lengths", default="4000,8000,16000,28000")
    parser.add_argument("--recipes", default="ktransformers,dense,adaptive,adaptive:target_mass=0.95")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=8, help="decoded in a round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    set_threads(flags.threads)
    specs = {spec.name: spec for spec in config_specs(flags.recipes.split(","))}
    ids = open_model(flags.model).tokenizer(flags.prompt_file.read_text(), return_tensors="pt").input_ids
    found: dict[int, dict[str, float]] = {}
    for length in map(int, flags.lengths.split(",")):
        tokens = ids[:, : length + flags.tokens]
        if tokens.shape[1] < length + flags.tokens:
            parser.error(f"--prompt_file has {ids.shape[1]} tokens; give smaller --lengths")
        found[length] = measured(
            lambda name, tokens=tokens, length=length: Decoding(
                specs[name], flags.model, tokens, length, flags.threads
            ),
            list(specs),
            flags.rounds,
        )
        print(length, {name: round(each, 1) for name, each in found[length].items()}, flush=True)
    table = Table("tokens", *specs, title="ms of a decoded token")
    for length, row in found.items():
        table.add_row(f"{length:,}", *(f"{each:.1f}" for each in row.values()))
    Console().print(table)
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
