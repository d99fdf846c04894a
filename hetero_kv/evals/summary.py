"""Summarises a run's results. The summary depends only on settings and predictions; costs are separate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.bootstrap import mean_interval
from hetero_kv.evals.outcome import Result

_T = TypeVar("_T")


def summarize(
    settings: Mapping[str, Any], results: Sequence[Result], skipped_lines: Mapping[str, Sequence[tuple[int, str]]]
) -> dict[str, Any]:
    """The content of `summary.json`: per task and method the mean score, also by length and by depth.

    Args:
        settings: the run's settings, as in `run.json`; `methods` fixes the order, `baseline` the method that the others
            are compared with.
        results: all results of the run.
        skipped_lines: data file -> (number, reason) of each unusable line.
    """
    baseline = settings.get("baseline")
    answered = [result for result in results if result.skipped is None]
    return {
        "settings": dict(settings),
        "tasks": {
            task: _task_summary(of_task, list(settings["methods"]), baseline)
            for task, of_task in grouped(answered, lambda result: result.task).items()
        },
        "skipped_samples": [
            {"sample": result.sample, "reason": result.skipped}
            for result in sorted(results, key=lambda result: result.sample)
            if result.skipped is not None
        ],
        "skipped_lines": {
            file: [{"line": line, "reason": reason} for line, reason in lines] for file, lines in skipped_lines.items()
        },
    }


def grouped(items: Iterable[_T], key: Callable[[_T], Any]) -> dict[Any, list[_T]]:
    """The items by key; keys are in order of appearance, but numbers in ascending order."""
    groups: dict[Any, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    if all(isinstance(name, int | float) for name in groups):
        return dict(sorted(groups.items()))
    return groups


def _task_summary(results: list[Result], methods: list[str], baseline: str | None) -> dict[str, Any]:
    by_method = grouped(sorted(results, key=lambda result: result.sample), lambda result: result.method)
    scores = {method: {r.sample: _score(r) for r in of_method} for method, of_method in by_method.items()}
    return {
        method: {
            **_mean_and_parts(by_method[method]),
            **_against(scores[method], scores.get(baseline), method == baseline),
            "lengths": {
                str(length): _mean_and_parts(of_length)
                for length, of_length in grouped(by_method[method], lambda result: result.length).items()
            },
            "cells": [
                {"length": length, "depth": depth, "score": _mean(map(_score, cell)), "samples": len(cell)}
                for (length, depth), cell in sorted(
                    grouped(
                        (result for result in by_method[method] if result.depth is not None),
                        lambda result: (result.length, result.depth),
                    ).items()
                )
            ],
            **_details(by_method[method]),
        }
        for method in methods
        if method in by_method
    }


def _mean_and_parts(results: Sequence[Result]) -> dict[str, Any]:
    parts = {name for result in results for name in result.parts}
    return {
        "score": _mean(map(_score, results)),
        "samples": len(results),
        "parts": {
            name: _mean(result.parts[name] for result in results if name in result.parts) for name in sorted(parts)
        },
    }


def _against(scores: Mapping[str, float], baseline: Mapping[str, float] | None, is_baseline: bool) -> dict[str, Any]:
    """The mean difference to the baseline over the samples that both answered, with its bootstrap interval."""
    pairs = [scores[sample] - baseline[sample] for sample in scores if sample in baseline] if baseline else []
    if is_baseline or not pairs:
        return {}
    return {"difference": _mean(pairs), "difference_interval": list(mean_interval(pairs))}


def _details(results: Sequence[Result]) -> dict[str, Any]:
    """The means of details that tasks add to the score: a value per layer, and a curve along the text."""
    found: dict[str, Any] = {}
    recalls = [result.details["block_recall"] for result in results if result.details.get("block_recall")]
    if recalls:
        found["block_recall"] = [
            _mean([value for value in layer if value is not None]) if any(v is not None for v in layer) else None
            for layer in _columns(recalls, "block_recall")
        ]
    curves = [(result.length, result.details["curve"]) for result in results if "curve" in result.details]
    if curves:
        found["curves"] = {
            str(length): {
                "position": group[0][1]["position"],
                "nll": [_mean(column) for column in _columns([curve["nll"] for _, curve in group], "curve")],
            }
            for length, group in grouped(curves, lambda pair: pair[0]).items()
        }
    return found


def _columns(rows: Sequence[Sequence[Any]], name: str) -> list[tuple[Any, ...]]:
    """The rows' values at each position. Raises HeteroKVError if the rows' lengths differ."""
    if len({len(row) for row in rows}) > 1:
        raise HeteroKVError(f"results.jsonl: {name} has another length in some lines of a task than in others")
    return list(zip(*rows, strict=True))


def _score(result: Result) -> float:
    assert result.score is not None
    return result.score


def _mean(values: Iterable[float]) -> float:
    # fsum, so that the order of the results does not change the last digit.
    listed = list(values)
    return math.fsum(listed) / len(listed)


def costs(results: Sequence[Result]) -> dict[str, Any]:
    """The content of `costs.json`: per method and length the machine's costs, medians over the samples."""
    # This imports torch; code that only compares runs need not wait for it.
    from hetero_kv.rules.registered import layer_statistics

    answered = [result for result in results if result.method is not None]
    counted = dict.fromkeys((*layer_statistics(), *(name for result in answered for name in result.cost.counted)))
    return {
        method: {
            str(length): {
                **{name: _median(getattr(result.cost, name) for result in of_length) for name in _COSTS},
                **{name: _median(result.cost.counted.get(name) for result in of_length) for name in counted},
                "shared_prefills": sum(result.cost.shared_prefill for result in of_length),
                "samples": len(of_length),
            }
            for length, of_length in grouped(of_method, lambda result: result.length).items()
        }
        for method, of_method in grouped(answered, lambda result: result.method).items()
    }


_COSTS = ("prompt_tokens", "generated_tokens", "prefill_s", "decode_s", "tokens_per_s", "kv_bytes")
#: The names in `costs` other than the layers' statistics.
COSTS = (*_COSTS, "shared_prefills", "samples")


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
