"""Campaigns and the outcomes of their tries."""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REFUSED, ACCEPTED = "own errors", "accepted"
WRONG, FOREIGN, HANG, CRASH = "wrong", "foreign", "hangs", "crashes"
OUTCOMES = (REFUSED, ACCEPTED, WRONG, FOREIGN, HANG, CRASH)
#: What must not happen.
FAULTS = (WRONG, FOREIGN, HANG, CRASH)


class WrongResultError(Exception):
    """Something was taken, or left behind, that is not as it should be."""


@dataclass(frozen=True)
class Campaign:
    """One kind of input that is damaged, or of work that is interrupted.

    Attributes:
        name: as the table shows it.
        tries: how many `make test-slow` makes; `make test` makes a fifth, of most.
        prepare: folder -> objects that all tries of a process share. Called once per process, each in another folder.
        attempt: (prepared, random, folder) -> one try. It returns where the input was taken, raises `HeteroKVError`
            where it was refused, and `WrongResultError` where what was taken is not right; whatever else it raises is
            foreign. `random` depends on the seed and the try's number alone; the folder is the same for all tries.
    """

    name: str
    tries: int
    prepare: Callable[[Path], Any]
    attempt: Callable[[Any, random.Random, Path], None]


@dataclass
class Tally:
    """What the tries of a campaign came to; `faults` has a line for each that must not be."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, number: int, outcome: str, detail: str) -> None:
        """Count one try; `detail` says what happened."""
        self.counts[outcome] += 1
        if outcome in FAULTS:
            self.faults.append(f"{self.name} {number}: {outcome}: {detail}")


def generator(seed: int, number: int) -> random.Random:
    """The random numbers of try `number`, so that one can be repeated alone."""
    return random.Random(f"{seed}/{number}")


def campaigns() -> dict[str, Campaign]:
    """All campaigns of this package, by name."""
    package = importlib.import_module(__package__)
    modules = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    taking_part = [name for name in modules if name != "__main__" and not name.startswith("test_")]
    found: tuple[Campaign, ...] = ()
    for name in taking_part:
        found += getattr(importlib.import_module(f"{__package__}.{name}"), "CAMPAIGNS", ())
    return {campaign.name: campaign for campaign in found}
