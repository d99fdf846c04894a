"""A few tries of every campaign: each input is refused with a HeteroKVError or accepted correctly."""

from __future__ import annotations

import math
import os

import pytest

from hetero_kv import HeteroKVError
from tests.campaigns.campaign import (
    ACCEPTED,
    CRASH,
    FOREIGN,
    HANG,
    REFUSED,
    WRONG,
    Campaign,
    WrongResultError,
    campaigns,
)
from tests.campaigns.runner import run
from tests.support.slow_variants import with_few

QUICK, WHOLE = 0.1, 1
#: Their first tries take the longest. The others save contexts and open files as they do, and each wrong key, full disk
#: and interrupted write has a test of its own.
LONG = ("GGUF metadata", "kills of saves", "saves on full disks")
FEW = [(name, QUICK) for name in campaigns() if name not in LONG]


@pytest.mark.parametrize(("name", "share"), with_few([*FEW, *((name, WHOLE) for name in campaigns())], FEW))
def test_every_try_is_refused_by_name_or_right(name, share):
    tries = math.ceil(share * campaigns()[name].tries)
    tally = run(name, tries)
    assert tally.faults == []
    assert tally.counts[REFUSED] + tally.counts[ACCEPTED] == tries


def _misbehave(prepared, random, folder):
    kind = random.choice(("taken", "refused", "wrong", "foreign", "gone"))
    if kind == "refused":
        raise HeteroKVError("no")
    if kind == "wrong":
        raise WrongResultError("other numbers")
    if kind == "foreign":
        raise KeyError("rope")
    if kind == "gone":
        os._exit(3)


#: Not a part of `campaigns()`, for modules of tests are left out there.
MISBEHAVING = Campaign("misbehaving", 40, lambda folder: None, _misbehave)


def _known():
    return {"misbehaving": MISBEHAVING}


def test_faults_are_counted_and_the_tries_continue(monkeypatch):
    from tests.campaigns import runner

    monkeypatch.setattr(runner, "_PROCESSES", runner.multiprocessing.get_context("fork"))
    monkeypatch.setattr(runner, "campaigns", _known)
    tally = run("misbehaving", MISBEHAVING.tries)
    assert tally.counts.total() == MISBEHAVING.tries
    assert all(tally.counts[outcome] for outcome in (REFUSED, ACCEPTED, WRONG, FOREIGN, CRASH))
    assert tally.counts[HANG] == 0
    assert len(tally.faults) == tally.counts[WRONG] + tally.counts[FOREIGN] + tally.counts[CRASH]


def test_a_try_without_an_answer_is_a_hang(monkeypatch):
    from tests.campaigns import runner

    hang = Campaign("hang", 2, lambda folder: None, lambda *args: __import__("time").sleep(600))
    monkeypatch.setattr(runner, "_PROCESSES", runner.multiprocessing.get_context("fork"))
    monkeypatch.setattr(runner, "campaigns", lambda: {"hang": hang})
    monkeypatch.setattr(runner, "HANG_SECONDS", 0.2)
    assert run("hang", 2).counts == {HANG: 2}
