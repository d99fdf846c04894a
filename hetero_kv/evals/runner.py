"""Runs every method on the same samples, and writes each result to the disk before the next begins."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_kv.errors import ConfigError, HeteroKVError
from hetero_kv.evals.config_spec import BASELINE
from hetero_kv.evals.configured_model import ConfiguredModel
from hetero_kv.evals.environment import environment
from hetero_kv.evals.logits_task import LogitsTask
from hetero_kv.evals.options import RunOptions, described_file
from hetero_kv.evals.outcome import Outcome, Result, prompt_hash
from hetero_kv.evals.progress import RunBar
from hetero_kv.evals.report import write_reports
from hetero_kv.evals.run_folder import RunFolder
from hetero_kv.evals.run_request import (
    request_of,
    requested_tasks,
    require_measurable,
    require_methods,
    require_room,
    samples_of,
    subjects_of,
)
from hetero_kv.evals.sample import Sample
from hetero_kv.evals.subject import Answerer, CountTokens, Subject
from hetero_kv.evals.summary import costs, summarize
from hetero_kv.evals.tasks import registry

__all__ = ["Run", "run"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        out: the run's folder.
        summary: the content of `summary.json`.
        results: the lines of `results.jsonl`.
    """

    out: Path
    summary: dict[str, Any]
    results: list[Result]


def run(
    tasks: Sequence[str],
    models: ConfiguredModel | Mapping[str, Answerer] | Sequence[Subject],
    out: str | Path,
    options: RunOptions | None = None,
    *,
    baseline: str | None = BASELINE,
    count_tokens: CountTokens | None = None,
    command_line: str | None = None,
    show_progress: bool = True,
) -> Run:
    """Run every method on the same samples, and write the results into the folder `out`.

    Each result becomes a line of `results.jsonl` at once, so that the next call with the same arguments continues a
    killed run. At the end the run writes `summary.json`, `costs.json`, `report.md` and the plots.

    Args:
        tasks: names of registered tasks, or patterns such as `ruler/niah_*`; `NAME=FILE` for a task that uses published
            data. Empty for data files alone.
        models: a model with its configurations, functions by name, or a list of subjects of any kind.
        options: the choice of samples.
        baseline: the method that the others are compared with, if it is among them.
        count_tokens: counts a text's tokens; needed without a `ConfiguredModel`.
        command_line: the command of the run, for the report.
        show_progress: whether to draw a bar on standard error, if that is a terminal.

    Raises:
        HeteroKVError: an unknown task, a length beyond `max_seq_len`, a folder with another run, or another obstacle
            before the start; during a run, the errors of the model.
    """
    options = options or RunOptions()
    subjects = subjects_of(models)
    configured = next((subject for subject in subjects if isinstance(subject, ConfiguredModel)), None)
    chosen = requested_tasks(tasks)
    if not chosen and not options.data:
        raise ConfigError(f"nothing to run: give a task or a data file; tasks: {', '.join(registry.names())}")
    require_measurable(chosen, subjects)
    require_room(chosen, options, configured)
    request = request_of(options, configured, count_tokens)
    require_methods(chosen, request, subjects)
    samples, skipped_lines = samples_of(chosen, options, request)
    methods = [method for subject in subjects for method in subject.methods]
    settings = {
        "tasks": {name: None if file is None else described_file(file) for name, file in chosen.items()},
        **options.described(),
        "baseline": baseline if baseline in methods else None,
        "methods": {name: what for subject in subjects for name, what in subject.described().items()},
    }
    out = Path(out)
    device = configured.loaded.model.device if configured else None
    with RunFolder.opened(out, settings, environment(command_line, device)) as folder:
        _run_all(samples, subjects, folder, show_progress)
        summary = summarize(settings, folder.results, skipped_lines)
        summary["attended_tokens"] = _attended(subjects, sorted({sample.length for sample in samples} - {0}))
        write_reports(out, summary, costs(folder.results))
    return Run(out, summary, folder.results)


# -- the run's loop


def _run_all(samples: Sequence[Sample], subjects: Sequence[Subject], folder: RunFolder, show_progress: bool) -> None:
    _require_same_prompts(samples, folder.results)
    known = {(result.sample, result.method) for result in folder.results if result.skipped is None}
    left_out = {result.sample for result in folder.results if result.skipped is not None}
    missing = [
        (sample, [(subject, [m for m in subject.methods if (sample.id, m) not in known]) for subject in subjects])
        for sample in samples
        if sample.id not in left_out
    ]
    counts = [sum(len(methods) for _, methods in by_subject) for _, by_subject in missing]
    work = sum(count * _work(sample) for count, (sample, _) in zip(counts, missing, strict=True))
    with RunBar(sum(counts), work, len(known), shown=show_progress) as bar:
        for count, (sample, by_subject) in zip(counts, missing, strict=True):
            if not count:
                continue
            reason = next((reason for subject in subjects if (reason := subject.refusal(sample))), None)
            if reason is not None and any((sample.id, m) in known for subject in subjects for m in subject.methods):
                raise HeteroKVError(
                    f"sample {sample.id} has answers from before this run was stopped, and does not fit now: {reason}; "
                    "give the run the memory that it began with, or begin anew in another folder"
                )
            if reason is not None:
                _logger.warning("sample %s is left out: %s", sample.id, reason)
                folder.append(Result.of_skipped(sample, reason))
                bar.advance_by(count * _work(sample), count)
                continue
            for subject, methods in by_subject:
                if not methods:
                    continue
                bar.begin(sample.id, ", ".join(methods))
                for result in _results(sample, subject, methods):
                    folder.append(result)
                    bar.advance_by(_work(sample), 1)


def _work(sample: Sample) -> int:
    """A sample's weight in the progress: its length; for data files, without lengths, a token per four characters."""
    return sample.length or 1 + len(sample.turns[0]) // 4


def _results(sample: Sample, subject: Subject, methods: Sequence[str]) -> Iterator[Result]:
    task = registry.get(sample.task)
    if isinstance(task, LogitsTask) and isinstance(subject, ConfiguredModel):
        outcomes: Iterator[Outcome] = task.measure(sample, subject, methods)
    else:
        outcomes = subject.answers(sample, methods)
    for outcome in outcomes:
        score = outcome.score or task.score(sample, outcome.predictions)
        for name, value in (("score", score.value), *score.parts.items()):
            if not math.isfinite(value):
                raise HeteroKVError(
                    f"{outcome.method} on sample {sample.id}: its {name} is {value}; the model's logits are no numbers "
                    "there: try --dtype float32"
                )
        yield Result.of(sample, outcome, score)


def _require_same_prompts(samples: Sequence[Sample], results: Sequence[Result]) -> None:
    prompts = {sample.id: prompt_hash(sample.turns, sample.answer_prefix, sample.raw_prompt) for sample in samples}
    for result in results:
        if prompts.get(result.sample) != result.prompt:
            raise HeteroKVError(
                f"sample {result.sample} has another prompt now than when the run was started (another version, or "
                "another tokenizer?); give another --out"
            )


def _attended(subjects: Sequence[Subject], lengths: Sequence[int]) -> dict[str, dict[str, float]]:
    """Method -> length -> tokens that a step attends to, for methods where they are known."""
    found: dict[str, dict[str, float]] = {}
    for subject in subjects:
        for method in subject.methods:
            budgets = {str(length): subject.attended(method, length) for length in lengths}
            if None not in budgets.values():
                found[method] = {length: tokens for length, tokens in budgets.items() if tokens is not None}
    return found
