"""A recorded trace of conversations about documents, which every router gets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

#: The trace of the records.
RECORDED = Path(__file__).with_name("trace.json")


@dataclass(frozen=True)
class Conversation:
    """Questions about one document.

    Attributes:
        at_s: when the first question comes, seconds from the trace's beginning.
        document: its number.
        tokens: of the document.
        pauses_s: of each further question, seconds behind the answer before it.
    """

    at_s: float
    document: int
    tokens: int
    pauses_s: Sequence[float]


def drawn(
    conversations: int = 80, documents: int = 24, tokens: int = 600, seconds: float = 70.0, seed: int = 0
) -> list[Conversation]:
    """A trace: random times, documents by Zipf's law, one to three questions, and some seconds between two.

    Args:
        tokens: of a document in the mean; between a half and one and a half of it.
        seconds: in which the conversations begin.
    """
    random = np.random.default_rng(seed)
    lengths = random.integers(tokens // 2, 3 * tokens // 2, documents)
    weights = 1 / np.arange(1, documents + 1)
    chosen = random.choice(documents, conversations, p=weights / weights.sum())
    times = np.sort(random.uniform(0, seconds, conversations))
    questions = random.integers(1, 4, conversations)
    return [
        Conversation(
            round(float(at), 2), int(document), int(lengths[document]),
            [round(float(each), 2) for each in random.exponential(2.0, count - 1)],
        )
        for at, document, count in zip(times, chosen, questions, strict=True)
    ]  # fmt: skip


def written(trace: Sequence[Conversation], path: Path) -> None:
    """Write a trace, a conversation on a line."""
    lines = ",\n".join(f" {json.dumps(asdict(each))}" for each in trace)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def read(path: Path) -> list[Conversation]:
    """The trace that `written` wrote."""
    return [Conversation(**each) for each in json.loads(path.read_text(encoding="utf-8"))]
