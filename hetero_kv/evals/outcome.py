"""The outcome of one method on one sample, and its cost: a line of `results.jsonl`."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from hetero_kv.errors import shown
from hetero_kv.evals.checked_lines import parsed
from hetero_kv.evals.sample import Sample, Score
from hetero_kv.printing import escaped


@dataclass(frozen=True)
class Cost:
    """The cost of a sample; None where unknown, as for a callable that only returns texts.

    Attributes:
        prompt_tokens: tokens of all turns, without answers.
        generated_tokens: tokens of all answers, including end-of-turn tokens.
        prefill_s: seconds of all prefills; a shared one counts in full for every method that used it.
        decode_s: seconds of the tokens after each answer's first.
        tokens_per_s: tokens decoded, or forced through, per second of `decode_s`.
        kv_bytes: memory of the stored keys, values and representatives at the end.
        shared_prefill: whether several methods shared the computation of the first turn's prefill.
        drafted_tokens: guesses at the answers' tokens that were verified (speculation).
        accepted_tokens: how many of them were right.
        counted: the statistics of the method's layers at the end, name -> the mean over the layers that have a value.
    """

    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    tokens_per_s: float | None = None
    kv_bytes: int | None = None
    shared_prefill: bool = False
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    counted: Mapping[str, float] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """The cost in the form of a line: the layers' statistics are top-level fields, None if they have no value."""
        # This imports torch; code that only reads results need not wait for it.
        from hetero_kv.rules.registered import layer_statistics

        fixed = {name: value for name, value in asdict(self).items() if name != "counted"}
        return {**fixed, **dict.fromkeys(layer_statistics()), **self.counted}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Cost:
        """The cost from `to_plain`'s form. Raises TypeError for a value that is not a number."""
        fixed = {f.name: plain[f.name] for f in fields(cls) if f.name != "counted" and f.name in plain}
        counted = {name: value for name, value in plain.items() if name not in fixed and value is not None}
        for name, value in (*fixed.items(), *counted.items()):
            fits = isinstance(value, bool) if name == "shared_prefill" else value is None or is_number(value)
            if not fits:
                raise TypeError(f"its cost has {shown(name, 100)}: {shown(value, 100)}")
        return cls(**fixed, counted=counted)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a method on a sample.

    Attributes:
        predictions: the answer's text of each turn.
        score: None if the task scores the predictions.
        details: plain data in addition to the score, such as the likelihoods along a text.
    """

    method: str
    predictions: tuple[str, ...]
    cost: Cost = field(default_factory=Cost)
    score: Score | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """A line of `results.jsonl`: a sample that a method answered, or that was skipped for every method.

    Attributes:
        sample: the sample's id.
        prompt: a hash of the whole prompt, which shows whether two runs had the same one.
        method: None if the sample was skipped.
        expected: the right answers of each turn.
        score: None if the sample was skipped.
        skipped: the reason for skipping it; None if it was not.
    """

    sample: str
    task: str
    prompt: str
    length: int
    depth: float | None
    method: str | None = None
    predictions: tuple[str, ...] = ()
    expected: tuple[tuple[str, ...], ...] = ()
    score: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    skipped: str | None = None

    @classmethod
    def of(cls, sample: Sample, outcome: Outcome, score: Score) -> Result:
        """The line of a sample that a method answered."""
        return cls(
            **_sample_fields(sample),
            method=outcome.method,
            predictions=outcome.predictions,
            expected=sample.answers,
            score=score.value,
            parts=dict(score.parts),
            details=dict(outcome.details),
            cost=outcome.cost,
        )

    @classmethod
    def of_skipped(cls, sample: Sample, reason: str) -> Result:
        """The line of a sample that was skipped for every method."""
        return cls(**_sample_fields(sample), skipped=reason)

    def to_json(self) -> str:
        """One line of JSON, without a line break."""
        plain = {**asdict(self), "cost": self.cost.to_plain()}
        return escaped(json.dumps(plain, ensure_ascii=False, allow_nan=False))

    @classmethod
    def from_json(cls, line: str) -> Result:
        """The result from `to_json`'s line. Raises ValueError or TypeError for anything else."""
        plain = parsed(line)
        if not isinstance(plain, dict):
            raise TypeError(f"{shown(plain)} is no JSON object")
        for name, what in _PLAIN.items():
            if not what.fits(plain.get(name)):
                raise TypeError(f"{name} is {shown(plain.get(name), 100)}, not {what.words}")
        if plain["skipped"] is None and (plain["method"] is None or plain["score"] is None):
            raise TypeError("it has neither a method's score nor a reason why there is none")
        plain["predictions"] = tuple(plain["predictions"])
        plain["expected"] = tuple(tuple(answers) for answers in plain["expected"])
        plain["cost"] = Cost.from_plain(plain["cost"])
        return cls(**plain)


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number that a result may contain; true and false are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1 << 63 if isinstance(value, int) else math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_number, value.values()))


def _are_details(value: Any) -> bool:
    """Whether the details of which a summary computes means have their tasks' form."""
    if not isinstance(value, dict):
        return False
    recall, curve = value.get("block_recall", []), value.get("curve", {"position": [], "nll": []})
    return (
        isinstance(recall, list)
        and all(each is None or is_number(each) for each in recall)
        and isinstance(curve, dict)
        and all(isinstance(curve.get(name), list) and all(map(is_number, curve[name])) for name in ("position", "nll"))
    )


class _What(NamedTuple):
    """The allowed values of a field of a line."""

    words: str
    fits: Callable[[Any], bool]


_TEXT, _NUMBERS = _What("text", _is_text), _What("numbers by name", _are_numbers)
_OBJECT = _What("a JSON object", lambda value: isinstance(value, dict))
_DETAILS = _What("details as tasks give them", _are_details)
_TEXT_OR_NONE = _What("text or null", lambda value: value is None or _is_text(value))
_NUMBER_OR_NONE = _What("a number or null", lambda value: value is None or is_number(value))
_PLAIN = {
    "sample": _TEXT,
    "task": _TEXT,
    "prompt": _TEXT,
    "length": _What("a whole number", lambda value: is_number(value) and isinstance(value, int)),
    "depth": _NUMBER_OR_NONE,
    "method": _TEXT_OR_NONE,
    "predictions": _What("a list of texts", _are_texts),
    "expected": _What("lists of texts", lambda value: isinstance(value, list) and all(map(_are_texts, value))),
    "score": _NUMBER_OR_NONE,
    "parts": _NUMBERS,
    "details": _DETAILS,
    "cost": _OBJECT,
    "skipped": _TEXT_OR_NONE,
}


def _sample_fields(sample: Sample) -> dict[str, Any]:
    return {
        "sample": sample.id,
        "task": sample.task,
        "prompt": prompt_hash(sample.turns, sample.answer_prefix, sample.raw_prompt),
        "length": sample.length,
        "depth": sample.depth,
    }


def prompt_hash(turns: Sequence[str], answer_prefix: str, raw_prompt: bool) -> str:
    """A hash of a prompt, the same on every machine: 16 hexadecimal digits of SHA-256."""
    content = json.dumps([list(turns), answer_prefix, raw_prompt], ensure_ascii=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
