"""Prefill and decode of a real model, compared with llama.cpp and untouched transformers in one run, with goals.

    python -m benchmarks.peers [--model NAME] [--lengths 512,2048,8192] [--repeats 5] [--llama_python PYTHON]
                               [--transformers] [--threads N] [--plot FILE.png] [--json FILE]
    python -m benchmarks.peers --shape NAME --layers N [--llama_bench PROGRAM] [--rows N] [...]
    python -m benchmarks.peers --recorded --plot docs/peers.png

`--shape` measures a model of random weights (`benchmarks.shapes`), whose file is in a temporary folder meanwhile.

llama.cpp runs the same GGUF file with flash attention, in a separate process of PYTHON (default: this one), which needs
`llama-cpp-python`; without it only this project is measured. At each length every engine prefills the same tokens once.
Then all decode in turn, a few tokens at a time, for several rounds; figures are medians. All engines have the same
number of threads. With `--llama_bench`, llama.cpp is its own program `llama-batched-bench`, which computes tokens of
its choice: it runs before and after the rounds of the other engines at each length, and the faster run counts. With
`--rows`, so many conversations of this length decode together; a decode time is that of a token of every row.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.figures import Label, label_lines, new_figure, save
from benchmarks.goals import verdicts_table
from benchmarks.peer_engines import (
    BUDGET,
    DECODED,
    LLAMA,
    OURS,
    TRANSFORMERS,
    EngineSpeed,
    HeteroKVEngine,
    LlamaBench,
    LlamaCpp,
    Untouched,
)
from benchmarks.report import CURRENT, load
from benchmarks.shapes import SHAPES
from benchmarks.shapes import write as write_shape
from benchmarks.timing import interleaved_medians
from hetero_kv import open_model
from hetero_kv.models import DEFAULT_MODEL
from hetero_kv.threads import set_threads

# Milliseconds that an axis shows.
_MARKS = (1, 2, 5, 10, 20, 30, 50, 100, 200, 500, 1000, 2000)


@dataclass(frozen=True)
class Goal:
    """A goal for a decode time or prefill speed relative to another engine's.

    what: "decode" or "prefill". ratio: the minimum of the other's time over ours. other_length: None for the same one.
    """

    what: str
    engine: str
    length: int
    ratio: float
    other: str = LLAMA
    other_length: int | None = None

    def __str__(self) -> str:
        length = "" if self.other_length is None else f" at {self.other_length:,}"
        return f"{self.what} at {self.length:,}, {self.engine}, against {self.other}{length}"


GOALS = (
    Goal("decode", "dense", 512, 1.0),
    Goal("decode", "sparse", 2048, 1.4),
    Goal("decode", "sparse", 8192, 3.0),
    Goal("decode", "sparse", 16384, 6.0),
    Goal("decode", "sparse", 32000, 15.0),
    Goal("decode", "sparse", 32000, 1 / 1.15, "sparse", 2048),
    Goal("decode", "dense", 8192, 1.5),
    Goal("decode", "dense", 32000, 2.0),
    *(Goal("prefill", "dense", length, 2.0) for length in (2048, 8192, 32000)),
)


def measure_around(
    bench: LlamaBench, engines: dict[str, Any], lengths: Sequence[int], repeats: int, text: list[int]
) -> list[EngineSpeed]:
    """As `measure`, with llama.cpp's program before and after the engines at each length."""
    measured = []
    for length in lengths:
        before = bench.speed(length)
        measured += measure(engines, [length], repeats, text)
        after = bench.speed(length)
        decode, prefill = min(before.decode, after.decode), max(before.prefill, after.prefill)
        measured.append(EngineSpeed(LLAMA, length, decode, prefill))
        report_line(measured[-1:])
    return measured


def measure(engines: dict[str, Any], lengths: Sequence[int], repeats: int, text: list[int]) -> list[EngineSpeed]:
    """Every engine at every length; `text` is at least as long as the longest."""
    measured = []
    for length in lengths:
        ids = text[:length]
        prefill = {name: engine.prefill(ids) / getattr(engine, "rows", 1) for name, engine in engines.items()}
        following = text[7 : 7 + DECODED]
        for engine in engines.values():
            engine.decode(following)
        turns = {name: partial(engine.decode, following) for name, engine in engines.items()}
        decode = interleaved_medians(turns, repeats)
        measured += [EngineSpeed(name, length, decode[name], length / prefill[name]) for name in engines]
        report_line(measured[-len(engines) :])
    return measured


def report_line(measured: Sequence[EngineSpeed]) -> None:
    """Print the figures of one length as soon as they are measured."""
    parts = (f"{each.engine} {each.decode * 1e3:.1f} ms, prefill {each.prefill:.0f}/s" for each in measured)
    print(f"{measured[0].length:>6} tokens: " + "; ".join(parts), file=sys.stderr, flush=True)


def verdicts(measured: Sequence[EngineSpeed]) -> list[tuple[Goal, float]]:
    """The goals whose engines and lengths were measured, and the ratios reached."""
    found = {(each.engine, each.length): each for each in measured}
    reached = []
    for goal in GOALS:
        ours, other = found.get((goal.engine, goal.length)), found.get((goal.other, goal.other_length or goal.length))
        if ours and other:
            decode = goal.what == "decode"
            reached.append((goal, other.decode / ours.decode if decode else ours.prefill / other.prefill))
    return reached


def show(measured: Sequence[EngineSpeed]) -> None:
    """Print what was measured, then goals and verdicts."""
    table = Table("tokens", "engine", "decode, ms per token", "prefill, tokens/s")
    for each in measured:
        table.add_row(f"{each.length:,}", each.engine, f"{each.decode * 1e3:.1f}", f"{each.prefill:.0f}")
    goals = verdicts_table((str(goal), ratio, goal.ratio) for goal, ratio in verdicts(measured))
    Console().print(table, goals)


def plot(measured: Sequence[EngineSpeed], path: Path) -> None:
    """Milliseconds per token against the length of the context, a labelled line for each engine."""
    figure, axes = new_figure()
    labels = []
    for number, name in enumerate(dict.fromkeys(each.engine for each in measured)):
        of_engine = [(each.length, each.decode * 1e3) for each in measured if each.engine == name]
        axes.plot(*zip(*of_engine, strict=True), marker="o", color=f"C{number}")
        called = {"dense": "hetero-kv, all tokens", "sparse": f"hetero-kv, {BUDGET:,} tokens"}.get(name, name)
        labels.append(Label(called, *of_engine[-1], f"C{number}"))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({each.length for each in measured})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 3)
    axes.minorticks_off()
    times = [each.decode * 1e3 for each in measured]
    marks = [mark for mark in _MARKS if min(times) / 1.5 <= mark <= max(times) * 1.5]
    axes.set_yticks(marks, [f"{mark:,}" for mark in marks])
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("time per decoded token, ms")
    axes.set_title("Decode time by context (lower is better)", fontsize=10)
    label_lines(figure, axes, labels)
    save(figure, axes, path)


def recorded() -> list[EngineSpeed]:
    """The default model's current decode times of the record `peers`, one per engine and length."""
    found = []
    for entry in load("peers").measurements:
        if entry.status == CURRENT and entry.columns[0] == "tokens" and "--shape" not in entry.command:
            for tokens, engine, decode, _, prefill, *_ in entry.rows:
                found.append(EngineSpeed(engine, int(tokens.replace(",", "")), float(decode) / 1e3, float(prefill)))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--shape", choices=SHAPES, help="a model of random weights, instead of --model")
    parser.add_argument("--layers", type=int, default=8, help="of --shape")
    parser.add_argument("--rows", type=int, default=1, help="conversations that decode together")
    parser.add_argument("--llama_bench", type=Path, help="llama-batched-bench, instead of --llama_python")
    parser.add_argument("--lengths", default="512,2048,8192")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    own = sys.executable if importlib.util.find_spec("llama_cpp") else None
    parser.add_argument("--llama_python", default=own, help="a Python with llama-cpp-python; none: skip llama.cpp")
    parser.add_argument("--transformers", action="store_true", help="the untouched model too")
    parser.add_argument("--plot", type=Path, default=None)
    parser.add_argument("--recorded", action="store_true", help="measure nothing: show and plot the record `peers`")
    parser.add_argument("--json", default=None)
    flags = parser.parse_args(arguments)
    if flags.recorded:
        finish(recorded(), flags)
        return
    if flags.rows > 1 and (flags.transformers or (flags.llama_python and not flags.llama_bench)):
        parser.error("--rows compares with llama-batched-bench alone; give --llama_bench, and no --transformers")
    set_threads(flags.threads)
    with TemporaryDirectory() as folder:
        model = flags.model
        if flags.shape:
            model = str(Path(folder) / f"{flags.shape}.gguf")
            write_shape(Path(model), flags.shape, flags.layers)
        measured = compared(model, flags)
    finish(measured, flags)


def compared(model: str, flags: argparse.Namespace) -> list[EngineSpeed]:
    """The speeds of the engines that the flags name."""
    lengths = [int(length) for length in flags.lengths.split(",")]
    text = source_tokens(model, max(lengths))
    engines: dict[str, Any] = {}
    for name in OURS:
        longest = flags.rows * (max(lengths) + 512)
        engines[name] = HeteroKVEngine(model, name, longest, engines.get(next(iter(OURS))), flags.rows)
    if flags.transformers:
        engines[TRANSFORMERS] = Untouched(model)
    if flags.llama_bench:
        bench = LlamaBench(flags.llama_bench, model, flags.threads, flags.rows)
        return measure_around(bench, engines, lengths, flags.repeats, text)
    if flags.llama_python:
        engines[LLAMA] = LlamaCpp(flags.llama_python, model, flags.threads)
    return measure(engines, lengths, flags.repeats, text)


def finish(measured: Sequence[EngineSpeed], flags: argparse.Namespace) -> None:
    """Print what was measured, and write the files that the flags name."""
    show(measured)
    if flags.plot:
        plot(measured, flags.plot)
    if flags.json:
        Path(flags.json).write_text(json.dumps([asdict(each) for each in measured], indent=1))


def source_tokens(model: str, count: int) -> list[int]:
    """At least `count` tokens of this project's source code."""
    tokenizer = open_model(model).tokenizer
    root = Path(__file__).parents[1]
    ids: list[int] = []
    while len(ids) < count:
        for path in sorted((root / "hetero_kv").rglob("*.py")):
            ids += tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False)
            if len(ids) >= count:
                break
    return ids


if __name__ == "__main__":
    main()
