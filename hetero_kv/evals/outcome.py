"""What one method made of one sample, and what it cost: a line of `results.jsonl`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hetero_kv.evals.sample import Sample, Score


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
        if not all(isinstance(value, int | float) for value in counted.values()):
            raise TypeError(f"a cost counts {counted}, which are not all numbers")
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
        return json.dumps(plain, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Result:
        """The result that `to_json` wrote. Raises ValueError or TypeError for anything else."""
        plain = json.loads(line)
        plain["predictions"] = tuple(plain["predictions"])
        plain["expected"] = tuple(tuple(answers) for answers in plain["expected"])
        plain["cost"] = Cost.from_plain(plain["cost"])
        return cls(**plain)


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
