"""Writing processes are killed at random moments: nothing is lost or duplicated, and no stray file stays."""

from __future__ import annotations

import os
import random as randomness
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.campaigns.campaign import Campaign, WrongResultError
from tests.campaigns.evaluation import answered, evaluate


def forked(work: Callable[[], None]) -> int:
    """The number of a child that does `work`, and ends with 1 where that raises."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def killed(work: Callable[[], None], after: float) -> bool:
    """Fork a child that does `work` and kill it after `seconds`; returns whether it was still working."""
    child = forked(work)
    time.sleep(after)
    # A child that has ended is a zombie until it is waited for, so that the signal reaches no other process.
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if not os.WIFSIGNALED(status) and os.waitstatus_to_exitcode(status):
        raise WrongResultError("the work failed before it was killed")
    return os.WIFSIGNALED(status)


def prepare_settings(folder: Path) -> str:
    """The settings file's text, which takes the most time, made once."""
    from hetero_kv.rules import settings_file

    text = settings_file.settings_text()
    settings_file.settings_text = lambda: text
    return text


def attempt_settings(text: str, random: randomness.Random, folder: Path) -> None:
    """Two first runs that are killed, and one that is not."""
    from hetero_kv.rules.settings_file import ensure_settings_file, read_settings_file

    path = folder / "home" / "config.yaml"
    shutil.rmtree(path.parent, ignore_errors=True)
    for _ in range(2):
        killed(lambda: ensure_settings_file(path), random.uniform(0, 0.004))
        if path.exists() and path.read_text() != text:
            raise WrongResultError("the file is there, and not whole")
    ensure_settings_file(path)
    if [each.name for each in path.parent.iterdir()] != ["config.yaml"] or path.read_text() != text:
        raise WrongResultError(f"there are {[each.name for each in path.parent.iterdir()]}")
    read_settings_file(path)


def prepare_runs(folder: Path) -> tuple[Path, float]:
    """A run that was not disturbed, and the seconds that one takes."""
    evaluate(folder / "first")
    start = time.perf_counter()
    evaluate(folder / "whole")
    return folder / "whole", time.perf_counter() - start


def attempt_runs(prepared: tuple[Path, float], random: randomness.Random, folder: Path) -> None:
    """A run that is killed twice, and then ends."""
    whole, seconds = prepared
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    seen: list[str] = []
    for _ in range(2):
        killed(lambda: evaluate(out), random.uniform(0, 1.2 * seconds))
        lines = (out / "results.jsonl").read_text().split("\n")[:-1] if (out / "results.jsonl").exists() else []
        if lines[: len(seen)] != seen:
            raise WrongResultError("a line that was there is gone or another")
        seen = lines
    evaluate(out)
    if (out / "results.jsonl").read_text().split("\n")[: len(seen)] != seen:
        raise WrongResultError("a line that was there is gone or another")
    if answered(out) != answered(whole):
        raise WrongResultError("a sample is missing, doubled or another")
    if (out / "summary.json").read_bytes() != (whole / "summary.json").read_bytes():
        raise WrongResultError("the summary is another")
    names = sorted(path.name for path in out.iterdir())
    if names != sorted(path.name for path in whole.iterdir()):
        raise WrongResultError(f"there are {names}")


CAMPAIGNS = (
    Campaign("kills of settings", 10, prepare_settings, attempt_settings),
    Campaign("kills of evaluations", 10, prepare_runs, attempt_runs),
)
