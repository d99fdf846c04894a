"""One question to a model, and what its answer was worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """What is asked of every method alike.

    Attributes:
        id: unique in a run, and the same for the same seed: "needle/4096/50/0".
        task: the registered task that scores the answers.
        turns: the user's messages; one, except in multi-turn tasks.
        answers: per turn, what is expected.
        length: tokens aimed at; 0 for a prompt from a data file, which is taken as it is.
        depth: where the answer lies in the context, per cent; None where the task has no such place.
        max_new_tokens: how many tokens a turn's answer may take.
        answer_prefix: what the assistant's answer is made to begin with.
        question: what `turns[0]` ends with, which asks about the text before it; "" where nobody says.
        raw_prompt: whether `turns[0]` is fed as it is, without the chat template.
        metadata: what scoring needs beyond the answers, and what a reader may want to know.
    """

    id: str
    task: str
    turns: tuple[str, ...]
    answers: tuple[tuple[str, ...], ...]
    length: int
    depth: float | None
    max_new_tokens: int
    answer_prefix: str = ""
    question: str = ""
    raw_prompt: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


def asked_behind(separator: str, text: str) -> str:
    """What stands behind the last `separator` of a text; "" where there is none."""
    return text.rpartition(separator)[2] if separator in text else ""


@dataclass(frozen=True)
class Score:
    """What a sample's answers are worth.

    Attributes:
        value: from 0 to 1.
        parts: what the value is made of, or goes with it: per-digit accuracy, the score of each turn.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
