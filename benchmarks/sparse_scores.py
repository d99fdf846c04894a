"""RULER's scores under sparse prefill, against the share of keys that prompts attend to.

    python -m benchmarks.sparse_scores --haystack $ESSAYS --out DIRECTORY [--lengths 8192] [--samples 2]
                                       [--configs dense,minference,...] [--tasks ruler/niah_*] [--plot FILE]
                                       [--threads N]

Each length is an evaluation run in a separate folder below `--out`, which the same command continues. Its file
`prefills.jsonl` has a line per prefill: the share of keys, and tokens per second. MInference's patterns are found
before, on a needle prompt of another seed that no score uses, and stored in `--out`. Prints a table per length; the
plot shows the score against the share, with a line per recipe and length.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.figures import label_decades, new_figure, save
from benchmarks.sparse_prefill import DENSE, share_of_keys
from hetero_kv import load_model
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.evals import ConfiguredModel, RunOptions, config_specs, run
from hetero_kv.evals.bootstrap import mean_interval
from hetero_kv.evals.haystack import Haystack
from hetero_kv.evals.outcome import Result
from hetero_kv.evals.prompt import Prefilled, Prompt
from hetero_kv.evals.tasks import registry
from hetero_kv.evals.tasks.registry import TaskRequest
from hetero_kv.families.sparse_prefill.known_patterns import ENVIRONMENT_VARIABLE
from hetero_kv.models import DEFAULT_MODEL
from hetero_kv.threads import set_threads

PREFILLS = "prefills.jsonl"
_FOUND_ON, _FOUND_SEED, _FOUND_LENGTH = "ruler/niah_multikey_1", 7, 9216
# Capacity of a cache in addition to the prompt, tokens.
_ANSWER = 512


class PrefillingAlone(ConfiguredModel):
    """A model whose methods prefill every prompt separately; a file records each prefill's share of keys.

    Attributes:
        file: the file to which lines are appended; None to write nothing.
    """

    file: Path | None = None

    @contextmanager
    def prefilled(self, method: str, prompt: Prompt, *, measure_recall: bool = False) -> Iterator[Prefilled]:
        """See ConfiguredModel."""
        self._methods[method] = replace(self._methods[method], shares_prefill=False)
        with super().prefilled(method, prompt, measure_recall=measure_recall) as ready:
            if self.file is not None:
                operators = [each for each in ready.model.modules() if isinstance(each, AttentionOperator)]
                said = {
                    "method": method,
                    "keys": share_of_keys(each.prompt_attention for each in operators),
                    "tokens_per_s": len(prompt.tokens) / ready.seconds,
                }
                with self.file.open("a") as stream:
                    stream.write(json.dumps(said) + "\n")
            yield ready


def find_patterns(model: PrefillingAlone, haystack: Haystack) -> None:
    """Run a long prompt under every method, in which methods with patterns find these."""
    request = TaskRequest(
        (_FOUND_LENGTH,), (50.0,), 1, _FOUND_SEED, haystack, model.count_tokens, model.template_tokens
    )
    (sample,) = registry.get(_FOUND_ON).generate(request)
    for method in model.methods:
        with model.prefilled(method, model.prompt(sample)):
            pass


def rows_of(results: Sequence[Result], prefills: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per method, on the samples that all have answered: scores, share of keys, tokens per second."""
    scores: dict[str, dict[str, float]] = {}
    for result in results:
        if result.method is not None:
            scores.setdefault(result.method, {})[result.sample] = float(result.score or 0)
    samples = sorted(set.intersection(*map(set, scores.values()))) if scores else []
    rows = []
    for method, own in scores.items():
        said = [each for each in prefills if each["method"] == method]
        rows.append(
            {
                "method": method,
                "scores": [own[sample] for sample in samples],
                **{name: fmean(each[name] for each in said) for name in ("keys", "tokens_per_s")},
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table; the ratio is that of the scores to `dense`'s."""
    lines = ["| method | keys | tokens/s | score | / dense |", "|---|---:|---:|---:|---:|"]
    dense = next((fmean(row["scores"]) for row in rows if row["method"] == DENSE), None)
    for row in rows:
        low, high = mean_interval(row["scores"])
        score = fmean(row["scores"])
        ratio = f"{score / dense:.2f}" if dense else ""
        cells = [f"`{row['method']}`", f"{row['keys']:.1%}", f"{row['tokens_per_s']:.0f}"]
        lines.append(f"| {' | '.join(cells)} | {score:.2f} ({low:.2f} to {high:.2f}) | {ratio} |")
    return "\n".join(lines)


def plot(tables: dict[int, list[dict[str, Any]]], path: Path) -> None:
    """Scores against the share of keys, a line for each recipe and length; a dashed one for `dense`."""
    figure, axis = new_figure()
    for number, (length, rows) in enumerate(tables.items()):
        recipes = dict.fromkeys(row["method"].partition(":")[0] for row in rows)
        for recipe in recipes:
            own = [row for row in rows if row["method"].partition(":")[0] == recipe]
            points = sorted((row["keys"], fmean(row["scores"])) for row in own)
            title = f"{recipe}, {length:,} tokens"
            if recipe == DENSE:
                axis.axhline(points[0][1], linestyle="--", color=f"C{number}", label=title)
            else:
                marker = "os^D"[list(recipes).index(recipe) % 4]
                axis.plot(*zip(*points, strict=True), marker=marker, color=f"C{number}", label=title)
    axis.set_xscale("log")
    label_decades(axis.xaxis, lambda value: f"{value:.0%}")
    axis.set_xlabel("share of the keys that a prompt's queries attend to")
    axis.set_ylabel("score")
    axis.set_ylim(0, 1.02)
    save(figure, axis, path)


def main() -> None:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--haystack", type=Path, required=True, help="essays: text, or JSON with a 'text' field")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--lengths", default="8192", help="tokens of a prompt")
    parser.add_argument("--samples", type=int, default=2, help="per task")
    parser.add_argument("--tasks", default="ruler/niah_*")
    parser.add_argument("--configs", default=f"{DENSE},minference,flexprefill")
    parser.add_argument("--plot", type=Path, help="PNG")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    flags = parser.parse_args()
    set_threads(flags.threads)
    flags.out.mkdir(parents=True, exist_ok=True)
    os.environ[ENVIRONMENT_VARIABLE] = str((flags.out / "patterns").resolve())
    lengths = [int(length) for length in flags.lengths.split(",")]
    settings = {"threads_num": flags.threads, "max_seq_len": max(_FOUND_LENGTH, *lengths) + _ANSWER}
    model = PrefillingAlone(
        load_model(flags.model, device="cpu"), config_specs(flags.configs.split(",")),
        baseline=False, measure_recall=False, settings=settings,
    )  # fmt: skip
    haystack = Haystack.from_file(flags.haystack)
    find_patterns(model, haystack)
    tables = {}
    for length in lengths:
        out = flags.out / str(length)
        out.mkdir(exist_ok=True)
        model.file = out / PREFILLS
        options = RunOptions(lengths=(length,), samples=flags.samples, haystack=flags.haystack)
        done = run(flags.tasks.split(","), model, out / "run", options, baseline=None)
        prefills = [json.loads(line) for line in model.file.read_text().splitlines()]
        tables[length] = rows_of(done.results, prefills)
        print(f"{length:,} tokens, {len(tables[length][0]['scores'])} samples\n\n{table(tables[length])}\n", flush=True)
    if flags.plot:
        plot(tables, flags.plot)


if __name__ == "__main__":
    main()
