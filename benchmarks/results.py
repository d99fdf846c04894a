"""Runs the samples of the results page: every recipe at equal budgets of attended tokens, and full attention.

    python -m benchmarks.results PART --haystack $ESSAYS --out DIRECTORY [--length 4096] [--samples 20]
                                 [--recipes adaptive,quest,...] [--fractions 32,16,8] [--shipped adaptive] [--threads N]
                                 [--tasks ruler/vt,...]

A part is `fidelity` (texts of five kinds, `--samples` of each), `ruler` (its eleven tasks that need no download),
`needle`, `pairs`, `turns` or `perplexity` (of an essay's last 128 tokens, decoded one by one). Every part, length and
choice of recipes is an evaluation run in a separate folder below `--out`; the same command continues a stopped run.
`benchmarks.results_page` reads all runs. `--tasks` restricts a part to these tasks, and needs a separate `--out`, since
a table's rows must have the same tasks.
"""

from __future__ import annotations

import argparse
import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from benchmarks.budgeted_recipes import FRACTIONS, RECIPES, cells
from benchmarks.fidelity_texts import KINDS, write_texts
from hetero_kv.evals import ConfiguredModel, RunOptions, config_specs, run
from hetero_kv.evals.packed_model import load_packed
from hetero_kv.models import DEFAULT_MODEL

CELLS = "cells.json"
"""The file in a run's folder that maps methods to recipes and budgets."""
# Tokens at a text's end, whose likelihoods are its perplexity.
_FORETOLD = 128
_RULER = ("ruler/niah_*", "ruler/vt", "ruler/cwe", "ruler/fwe")
# Depths: a sample of each in turn, so that a length's samples are spread evenly.
_PARTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "fidelity": (("fidelity",), {"max_new_tokens": 32}),
    "ruler": (_RULER, {}),
    "needle": (("needle",), {"depths": (5.0, 35.0, 65.0, 95.0)}),
    "pairs": (("kv_retrieval",), {"depths": (5.0, 35.0, 65.0, 95.0)}),
    "turns": (("multi_turn_needle",), {}),
    "perplexity": (("perplexity",), {}),
}


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=_PARTS)
    parser.add_argument("--haystack", type=Path, required=True, help="essays: text, or JSON with a 'text' field")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--samples", type=int, default=20, help="per task, for fidelity per kind of text")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--fractions", default=",".join(map(str, FRACTIONS)), help="tokens to an attended one")
    parser.add_argument("--shipped", default="", help="recipes that also run with their own budgets")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tasks", default="", help="of the part, all where none are named")
    flags = parser.parse_args()
    of_part, options = _PARTS[flags.part]
    tasks = tuple(flags.tasks.split(",")) if flags.tasks else of_part
    for task in tasks:
        if not any(fnmatch(task, name) for name in of_part):
            parser.error(f"--tasks: {task} is none of {flags.part}; it has {', '.join(of_part)}")
    recipes, shipped = flags.recipes.split(","), tuple(filter(None, flags.shipped.split(",")))
    chosen = cells(flags.length, tuple(map(int, flags.fractions.split(","))), shipped)
    chosen = [cell for cell in chosen if cell.recipe in recipes]
    loaded = load_packed(flags.model, threads_num=flags.threads)
    depths = len(options.get("depths", (0,)))
    if flags.part == "perplexity":
        options = {"prefill_tokens": flags.length - _FORETOLD}
    if flags.part == "fidelity":
        folder = flags.out / f"texts-{flags.length}"
        options = options | {"prompt_files": _texts(folder, flags, loaded.tokenizer)}
    settings = {"threads_num": flags.threads}
    out = flags.out / f"{flags.part}-{flags.length}-{'+'.join(recipes)}"
    out.mkdir(parents=True, exist_ok=True)
    (out / CELLS).write_text(
        json.dumps([[cell.recipe, cell.fraction, spec.name] for cell, spec in _named(chosen)], indent=1) + "\n"
    )
    run(
        tasks,
        ConfiguredModel(
            loaded, [spec for _, spec in _named(chosen)], share_baseline=True, measure_recall=False, settings=settings
        ),
        out / "run",
        RunOptions(
            lengths=(flags.length,),
            samples=-(-flags.samples // depths),
            haystack=None if flags.part == "fidelity" else flags.haystack,
            **options,
        ),
    )


def _named(chosen: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(chosen, config_specs([cell.spec for cell in chosen]), strict=True))


def _texts(folder: Path, flags: argparse.Namespace, tokenizer: Any) -> tuple[Path, ...]:
    """The texts, one of each kind after the other, so that a run that is stopped has as many of each."""
    names = [f"{kind}-{number:02}.txt" for number in range(flags.samples) for kind in KINDS]
    if not all((folder / name).exists() for name in names):
        write_texts(folder, flags.haystack, tokenizer, flags.length, flags.samples)
    return tuple(folder / name for name in names)


if __name__ == "__main__":
    main()
