"""What a cluster of one replica costs beside one machine's server, of the same model."""

from __future__ import annotations

import itertools
import statistics
import time

from benchmarks.http_clients import ask, ask_all
from benchmarks.http_serving import document
from benchmarks.timing import interleaved_samples

COLUMNS = ("figure", "one server", "cluster, one replica", "difference")
ROWS = 4
"""Answers at a time, of which throughput is measured."""
_PROMPT = 64
_PROMPTS = itertools.count(1000)


def _fresh() -> str:
    """A prompt of which no server has anything."""
    return document(_PROMPT, next(_PROMPTS))


def _first_s(address: str) -> float:
    return ask(address, _fresh(), 2).first_s


def _tokens_per_s(address: str, answer: int) -> float:
    """Tokens per second of several answers at a time, from the last prompt's end."""
    answers = ask_all(address, [_fresh() for _ in range(ROWS)], answer)
    began, ended = max(each.times[0] for each in answers), min(each.times[-1] for each in answers)
    count = sum(began < when <= ended for each in answers for when in each.times)
    return count / (ended - began)


def rows(server: str, cluster: str, repeats: int, answer: int) -> list[list[str]]:
    """The figures of two addresses, in turns, as `COLUMNS` has them."""
    addresses = {"server": server, "cluster": cluster}
    for each in addresses.values():
        _tokens_per_s(each, answer)
        _first_s(each)
    time.sleep(1.0)
    firsts = interleaved_samples({n: lambda a=a: _first_s(a) for n, a in addresses.items()}, 4 * repeats)
    speeds = interleaved_samples({n: lambda a=a: _tokens_per_s(a, answer) for n, a in addresses.items()}, repeats)
    first = {name: 1000 * statistics.median(values) for name, values in firsts.items()}
    speed = {name: statistics.median(values) for name, values in speeds.items()}
    added, less = first["cluster"] - first["server"], 1 - speed["cluster"] / speed["server"]
    return [
        ["first token, median", f"{first['server']:.0f} ms", f"{first['cluster']:.0f} ms", f"{added:+.1f} ms"],
        [
            f"tokens per second, {ROWS} answers at a time", f"{speed['server']:.1f}", f"{speed['cluster']:.1f}",
            f"{-100 * less:+.1f} %",
        ],
    ]  # fmt: skip
