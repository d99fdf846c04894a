"""One question to a model, and the score of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """A prompt for all methods.

    Attributes:
        id: unique in a run, and the same for the same seed: "needle/4096/50/0".
        task: the registered task that scores the answers.
        turns: the user's messages; one, except in multi-turn tasks.
        answers: the expected answers of each turn.
        length: the target length in tokens; 0 for a prompt from a data file, which is used as it is.
        depth: where the answer lies in the context, per cent; None if the task has no such place.
        max_new_tokens: the most tokens of a turn's answer.
        answer_prefix: the forced beginning of the assistant's answer.
        question: the end of `turns[0]` that asks about the text before it; "" if unknown.
        raw_prompt: whether `turns[0]` is fed without the chat template.
        metadata: other data for scoring and for readers.
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


def question_after(separator: str, text: str) -> str:
    """The text after the last `separator`; "" without one."""
    return text.rpartition(separator)[2] if separator in text else ""


@dataclass(frozen=True)
class Score:
    """The score of a sample's answers.

    Attributes:
        value: from 0 to 1.
        parts: components of the value, or further scores: per-digit accuracy, the score of each turn.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
