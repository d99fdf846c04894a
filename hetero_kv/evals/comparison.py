"""Compares two runs: per task the mean difference over the samples that both answered, with its interval."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.bootstrap import mean_interval
from hetero_kv.evals.outcome import Result
from hetero_kv.evals.run_folder import read_results, read_settings
from hetero_kv.settings.setting import nearest_spelling


@dataclass(frozen=True)
class Comparison:
    """A task under one method of each run.

    Attributes:
        method_a, method_b: the compared methods.
        pairs: samples that both answered.
        unpaired: samples that only one run answered.
        mean_a, mean_b: mean scores over the pairs.
        difference: mean of b - a over the pairs.
        interval: the 95 % interval of the mean difference, by percentile bootstrap.
        better, worse: the pairs in which b scores more, and less, than a.
    """

    task: str
    method_a: str
    method_b: str
    pairs: int
    unpaired: int
    mean_a: float
    mean_b: float
    difference: float
    interval: tuple[float, float]
    better: int
    worse: int

    @property
    def is_certain(self) -> bool:
        """Whether the interval excludes 0."""
        return not self.interval[0] <= 0 <= self.interval[1]


def compare(run_a: str | Path, run_b: str | Path) -> list[Comparison]:
    """Compare the methods of two runs, task by task.

    A run is a folder, or `FOLDER:METHOD` for one of its methods. Methods of the same name are compared; two methods of
    different names are compared if each run has only that one, apart from the baseline.

    Raises:
        HeteroKVError: a folder without a run, an unknown method, runs without a common sample, or samples of the same
            name with different prompts (other seeds, lengths or files).
    """
    a, b = _read(run_a), _read(run_b)
    found = []
    for method_a, method_b in _paired_methods(a, b):
        of_a, of_b = a.methods[method_a], b.methods[method_b]
        tasks = dict.fromkeys(result.task for result in of_a.values())
        found += [_compared(task, method_a, method_b, of_a, of_b) for task in tasks if _common(task, of_a, of_b)]
    if not found:
        raise HeteroKVError(
            f"{str(run_a)!r} and {str(run_b)!r} have no sample in common; compare runs of the same tasks"
        )
    return found


@dataclass(frozen=True)
class _Answers:
    """A run's results by method and sample."""

    name: str
    baseline: str | None
    methods: dict[str, dict[str, Result]]


def _read(run: str | Path) -> _Answers:
    folder, colon, method = str(run).partition(":")
    # A folder's name may contain a colon.
    if os.path.isdir(str(run)):
        folder, colon, method = str(run), "", ""
    settings = read_settings(Path(folder))["settings"]
    methods: dict[str, dict[str, Result]] = {name: {} for name in settings["methods"]}
    for result in read_results(Path(folder)):
        if result.method is not None:
            methods.setdefault(result.method, {})[result.sample] = result
    if colon:
        if method not in methods:
            near = nearest_spelling(method, methods) or f"; it has {', '.join(methods)}"
            raise HeteroKVError(f"run {folder!r} has no method {method!r}{near}")
        methods = {method: methods[method]}
    return _Answers(str(run), settings.get("baseline"), methods)


def _paired_methods(a: _Answers, b: _Answers) -> list[tuple[str, str]]:
    if len(a.methods) == len(b.methods) == 1:
        return [(next(iter(a.methods)), next(iter(b.methods)))]
    own_a, own_b = ([name for name in run.methods if name != run.baseline] for run in (a, b))
    common = [(name, name) for name in a.methods if name in b.methods]
    if len(own_a) == len(own_b) == 1 and own_a != own_b:
        return [*common, (own_a[0], own_b[0])]
    if not common:
        raise HeteroKVError(
            f"{a.name!r} has the methods {', '.join(a.methods)} and {b.name!r} has {', '.join(b.methods)}; name one of "
            "each: RUN:METHOD"
        )
    return common


def _common(task: str, of_a: Mapping[str, Result], of_b: Mapping[str, Result]) -> list[str]:
    """The samples of a task that both runs answered. Raises HeteroKVError if a sample's prompts differ."""
    common = [sample for sample, result in of_a.items() if result.task == task and sample in of_b]
    for sample in common:
        if of_a[sample].prompt != of_b[sample].prompt:
            raise HeteroKVError(
                f"sample {sample} has different prompts in the two runs, which cannot be compared; run both with the "
                "same seed, tokenizer and files"
            )
    return common


def _compared(
    task: str, method_a: str, method_b: str, of_a: Mapping[str, Result], of_b: Mapping[str, Result]
) -> Comparison:
    common = sorted(_common(task, of_a, of_b))
    samples = {result.sample for of in (of_a, of_b) for result in of.values() if result.task == task}
    scores_a, scores_b = ([_score(of[sample]) for sample in common] for of in (of_a, of_b))
    differences = [b - a for a, b in zip(scores_a, scores_b, strict=True)]
    return Comparison(
        task,
        method_a,
        method_b,
        len(common),
        len(samples) - len(common),
        _mean(scores_a),
        _mean(scores_b),
        _mean(differences),
        mean_interval(differences),
        sum(difference > 0 for difference in differences),
        sum(difference < 0 for difference in differences),
    )


def _score(result: Result) -> float:
    assert result.score is not None
    return result.score


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
