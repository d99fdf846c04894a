"""What prompts and steps cost a simulated replica, by measured figures and the engine's own sizes of parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hetero_kv.serving.part_size import PartSize

# Larger than any prompt, so that a part's size does not follow from what is left of it.
_MANY = 1 << 20


@dataclass(frozen=True)
class Costs:
    """A replica's speed; the defaults are those of the default model under `adaptive` on two Zen 3 cores.

    Attributes:
        prefill_tokens_per_s: while nobody waits for a token: 2,203 tokens in 17.34 s (`http_serving.json`).
        steps_s: rows -> seconds of a decode step (`speculation.json`); between them, by the nearest.
        row_limit: the most rows.
        longest_gap_s: the engine's target for a row's next token while a prompt passes.
        bytes_per_token: of keys and values: 206 MB for 16,384 tokens (`contexts.json`).
    """

    prefill_tokens_per_s: float = 2203 / 17.34
    steps_s: Sequence[tuple[int, float]] = ((1, 0.0468), (2, 0.0995), (4, 0.116), (8, 0.214))
    row_limit: int = 8
    longest_gap_s: float = 0.25
    bytes_per_token: float = 206e6 / 16384
    #: By rows, seconds of a step alone.
    alone_s: list[float] = field(init=False)
    #: By rows, tokens of a prompt that pass in a second beside them.
    beside_per_s: list[float] = field(init=False)
    #: By rows, seconds of a step that passes a part of a prompt too.
    beside_s: list[float] = field(init=False)

    def __post_init__(self) -> None:
        alone = [0.0, *(_between(self.steps_s, rows) for rows in range(1, self.row_limit + 1))]
        rates, steps = [self.prefill_tokens_per_s], [0.0]
        for rows in range(1, self.row_limit + 1):
            size = PartSize(self.longest_gap_s, _MANY)
            size.passed(1, 1 / self.prefill_tokens_per_s)
            part = size.of(_MANY, rows, beside=True)
            steps.append((part + rows) / self.prefill_tokens_per_s)
            rates.append(part / steps[-1])
        for name, value in (("alone_s", alone), ("beside_per_s", rates), ("beside_s", steps)):
            object.__setattr__(self, name, value)

    @property
    def row_s(self) -> float:
        """Seconds that each further row adds to a step, as a replica reports it."""
        return (self.alone_s[self.row_limit] - self.alone_s[1]) / (self.row_limit - 1)


def _between(points: Sequence[tuple[int, float]], rows: int) -> float:
    below = max((each for each in points if each[0] <= rows), default=points[0])
    above = min((each for each in points if each[0] >= rows), default=points[-1])
    if above[0] == below[0]:
        return below[1]
    return below[1] + (above[1] - below[1]) * (rows - below[0]) / (above[0] - below[0])
