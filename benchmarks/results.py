"""The samples behind the page of results: every recipe at equal budgets of attended tokens, and full attention.

    python -m benchmarks.results PART --haystack $ESSAYS --out DIRECTORY [--length 4096] [--samples 20]
                                 [--recipes adaptive,quest,...] [--fractions 32,16,8] [--shipped adaptive] [--threads N]
                                 [--tasks ruler/vt,...]

A part is `fidelity` (texts of five kinds, `--samples` of each), `ruler` (its eleven tasks that need no download),
`needle`, `pairs`, `turns` or `perplexity` (of an essay's last 128 tokens, fed one by one). Every part, length and
choice of recipes is a run of evaluations in a folder of its own below `--out`; one that was stopped goes on when the
same command is given again. `benchmarks.results_page` reads all of them. With `--tasks` a part has these alone, and
wants an `--out` of its own: rows of a table are of one choice of tasks.
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
"""In a run's folder: which recipe and budget a method is."""
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
    given = parser.parse_args()
    of_part, options = _PARTS[given.part]
    tasks = tuple(given.tasks.split(",")) if given.tasks else of_part
    for task in tasks:
        if not any(fnmatch(task, name) for name in of_part):
            parser.error(f"--tasks: {task} is none of {given.part}; it has {', '.join(of_part)}")
    recipes, shipped = given.recipes.split(","), tuple(filter(None, given.shipped.split(",")))
    asked = cells(given.length, tuple(map(int, given.fractions.split(","))), shipped)
    asked = [cell for cell in asked if cell.recipe in recipes]
    loaded = load_packed(given.model, threads_num=given.threads)
    depths = len(options.get("depths", (0,)))
    if given.part == "perplexity":
        options = {"prefill_tokens": given.length - _FORETOLD}
    if given.part == "fidelity":
        folder = given.out / f"texts-{given.length}"
        options = options | {"prompt_files": _texts(folder, given, loaded.tokenizer)}
    settings = {"threads_num": given.threads}
    out = given.out / f"{given.part}-{given.length}-{'+'.join(recipes)}"
    out.mkdir(parents=True, exist_ok=True)
    (out / CELLS).write_text(
        json.dumps([[cell.recipe, cell.fraction, spec.name] for cell, spec in _named(asked)], indent=1) + "\n"
    )
    run(
        tasks,
        ConfiguredModel(
            loaded, [spec for _, spec in _named(asked)], share_baseline=True, measure_recall=False, settings=settings
        ),
        out / "run",
        RunOptions(
            lengths=(given.length,),
            samples=-(-given.samples // depths),
            haystack=None if given.part == "fidelity" else given.haystack,
            **options,
        ),
    )


def _named(asked: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(asked, config_specs([cell.spec for cell in asked]), strict=True))


def _texts(folder: Path, given: argparse.Namespace, tokenizer: Any) -> tuple[Path, ...]:
    """The texts, one of each kind after the other, so that a run that is stopped has as many of each."""
    names = [f"{kind}-{number:02}.txt" for number in range(given.samples) for kind in KINDS]
    if not all((folder / name).exists() for name in names):
        write_texts(folder, given.haystack, tokenizer, given.length, given.samples)
    return tuple(folder / name for name in names)


if __name__ == "__main__":
    main()
