"""What one method made of one sample, and what it cost: a line of `results.jsonl`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
        entries_held: entries per kv head that are held at the end, the mean over bounded layers; None without any.
    """

    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    tokens_per_s: float | None = None
    kv_bytes: int | None = None
    shared_prefill: bool = False
    entries_held: float | None = None


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
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Result:
        """The result that `to_json` wrote. Raises ValueError or TypeError for anything else."""
        fields = json.loads(line)
        fields["predictions"] = tuple(fields["predictions"])
        fields["expected"] = tuple(tuple(answers) for answers in fields["expected"])
        fields["cost"] = Cost(**fields["cost"])
        return cls(**fields)


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
