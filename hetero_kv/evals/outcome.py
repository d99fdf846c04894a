"""What one method made of one sample, and what it cost: a line of `results.jsonl`."""

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
    """What a sample took; None where it is not known, as of a callable that only returns texts.

    Attributes:
        prompt_tokens: tokens of all turns, answers not counted.
        generated_tokens: tokens of all answers, end-of-turn tokens included.
        prefill_s: seconds of all prefills; a shared one counts in full for every method that took it.
        decode_s: seconds for the tokens after each answer's first.
        tokens_per_s: tokens decoded, or forced through, per second of `decode_s`.
        kv_bytes: memory of the stored keys, values and representatives at the end.
        shared_prefill: whether the first turn's prefill was computed once for several methods.
        counted: what the method's layers counted, name -> the mean over the layers that have a value at the end.
    """

    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    tokens_per_s: float | None = None
    kv_bytes: int | None = None
    shared_prefill: bool = False
    counted: Mapping[str, float] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """As a line has it: what layers count stands beside the rest, None under the names that have no value."""
        # It takes torch, which who only reads results need not wait for.
        from hetero_kv.rules.registered import layer_statistics

        fixed = {name: value for name, value in asdict(self).items() if name != "counted"}
        return {**fixed, **dict.fromkeys(layer_statistics()), **self.counted}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Cost:
        """The cost that `to_plain` gave. Raises TypeError for a value that is no number."""
        fixed = {f.name: plain[f.name] for f in fields(cls) if f.name != "counted" and f.name in plain}
        counted = {name: value for name, value in plain.items() if name not in fixed and value is not None}
        for name, value in (*fixed.items(), *counted.items()):
            fits = isinstance(value, bool) if name == "shared_prefill" else value is None or is_number(value)
            if not fits:
                raise TypeError(f"its cost has {shown(name, 100)}: {shown(value, 100)}")
        return cls(**fixed, counted=counted)


@dataclass(frozen=True)
class Outcome:
    """What a method made of a sample.

    Attributes:
        predictions: per turn, the answer's text.
        score: None where the task scores the predictions.
        details: plain data beside the score, such as the likelihoods along a text.
    """

    method: str
    predictions: tuple[str, ...]
    cost: Cost = field(default_factory=Cost)
    score: Score | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """A line of `results.jsonl`: a sample that a method answered, or that was left out for every method.

    Attributes:
        sample: the sample's id.
        prompt: a hash of everything that is asked, so that two runs know whether they asked the same.
        method: None where the sample was left out.
        expected: per turn, the answers that count.
        score: None where the sample was left out.
        skipped: why it was left out; None where it was not.
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
            **_asked(sample),
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
        """The line of a sample that was left out for every method."""
        return cls(**_asked(sample), skipped=reason)

    def to_json(self) -> str:
        """One line of JSON, without the line's end."""
        plain = {**asdict(self), "cost": self.cost.to_plain()}
        return escaped(json.dumps(plain, ensure_ascii=False, allow_nan=False))

    @classmethod
    def from_json(cls, line: str) -> Result:
        """The result that `to_json` wrote. Raises ValueError or TypeError for anything else."""
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
    """Whether a value of JSON is a number that a result may be; true and false are none."""
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
    """Whether a line's details are as tasks give them, of those that a summary takes means of."""
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
    """What a field of a line may be."""

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


def _asked(sample: Sample) -> dict[str, Any]:
    return {
        "sample": sample.id,
        "task": sample.task,
        "prompt": prompt_hash(sample.turns, sample.answer_prefix, sample.raw_prompt),
        "length": sample.length,
        "depth": sample.depth,
    }


def prompt_hash(turns: Sequence[str], answer_prefix: str, raw_prompt: bool) -> str:
    """A hash of what is asked, the same on every machine: 16 hexadecimal digits of SHA-256."""
    asked = json.dumps([list(turns), answer_prefix, raw_prompt], ensure_ascii=True)
    return hashlib.sha256(asked.encode()).hexdigest()[:16]
