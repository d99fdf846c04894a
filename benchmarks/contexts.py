"""The first token of a question to a long document: prefilled, and gone on from a saved context, beside llama.cpp's.

    python -m benchmarks.contexts [--model NAME] [--config FILE] [--lengths 16384,30000] [--repeats 5]
                                  [--llama_python PYTHON] [--threads N] [--json FILE]

The document is prefilled and saved once; then, in turns, the saved context is loaded and the question asked: from a
cold page cache (the file's pages are dropped before) and a warm one, with every block checked and without (`verify`).
Seconds are from the beginning of loading to the first token; bytes read are those that came from the disk. llama.cpp
runs the same GGUF file in a process of its own, and saves and loads its state file (`llama_state_save_file`).
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.goals import verdicts_table
from benchmarks.peers import LLAMA, LlamaCpp, source_tokens
from benchmarks.timing import interleaved_samples, seconds
from hetero_kv import HeteroCache, inject, open_model
from hetero_kv.models import DEFAULT_MODEL
from hetero_kv.threads import set_threads

QUESTION = 24
"""Tokens of the question."""
PREFILL, SAVE = "prefill", "save"
CHECKED, UNCHECKED = "resumed, checked", "resumed"
#: What is to be reached at this length: prefill's time over that of a checked cold start, and its seconds.
GOAL_LENGTH, GOAL_RATIO, GOAL_SECONDS = 16384, 50.0, 1.5


@dataclass
class ContextFigures:
    """One way to the first token.

    Attributes:
        seconds: the median; of `save` those of saving, None where they are not measured.
        loading: of these until the context is loaded, of a median run.
        read: bytes from the disk; None where they are not counted.
        written: bytes of the file; None where there is none.
    """

    engine: str
    length: int
    way: str
    seconds: float | None
    loading: float | None = None
    read: int | None = None
    written: int | None = None


class ContextRun(NamedTuple):
    """One way gone once: seconds in all, seconds until the context is loaded, bytes read from the disk if counted."""

    seconds: float
    loading: float
    read: int | None


class HeteroContexts:
    """This project: one model, whose context is saved at `path`."""

    def __init__(self, model: str, config: str, longest: int, path: Path) -> None:
        opened = open_model(model)
        inject(opened.model, config, command_line={"max_seq_len": longest})
        self.model, self.path = opened.load().model, path
        self.model.hetero_kv_injection.compile_kernels()

    @torch.no_grad()
    def ask(self, cache: HeteroCache, ids: list[int]) -> int:
        """The likeliest token behind `ids`."""
        return int(self.model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits[0, -1].argmax())

    def prefill(self, document: list[int], question: list[int]) -> tuple[float, int]:
        """Seconds of the first token from nothing, and the token. The document's context is saved then."""
        cache = HeteroCache(self.model)
        document_seconds = seconds(lambda: self.ask(cache, document))
        cache.save(self.path, [document])
        token: list[int] = []
        question_seconds = seconds(lambda: token.append(self.ask(cache, question)))
        return document_seconds + question_seconds, token[0]

    def saved(self, document: list[int]) -> float:
        """Seconds of saving a loaded context once more."""
        cache = HeteroCache.load(self.path, self.model)
        return seconds(lambda: cache.save(self.path.with_suffix(".again"), [document]))

    def resumed(self, question: list[int], expected: int, verify: bool, cold: bool) -> ContextRun:
        """To the first token behind the saved context."""
        gc.collect()
        if cold:
            drop_pages(self.path)
        before, caches, tokens = bytes_read(), [], []
        loading = seconds(lambda: caches.append(HeteroCache.load(self.path, self.model, verify=verify)))
        asking = seconds(lambda: tokens.append(self.ask(caches[0], question)))
        if tokens != [expected]:
            raise RuntimeError(f"the first token is {tokens[0]}, and without the break it is {expected}")
        return ContextRun(loading + asking, loading, bytes_read() - before)


class Llama(LlamaCpp):
    """llama.cpp, with its state file."""

    def __init__(self, python: str, model: str, threads: int, path: Path) -> None:
        super().__init__(python, model, threads)
        self.state = path

    def first(self, document: list[int], question: list[int]) -> float:
        """Seconds of the first token from nothing; the document's state is saved then."""
        took = self.prefill(document)
        self.ask(save=str(self.state), tokens=document)
        return took + self.ask(eval=question)

    def resumed(self, question: list[int], cold: bool) -> ContextRun:
        """To the first token behind the state; the model is there."""
        if cold:
            drop_pages(self.state)
        loading = self.ask(load=str(self.state))
        return ContextRun(loading + self.ask(eval=question), loading, None)


def drop_pages(path: Path) -> None:
    """Let no page of a file be in memory; nothing may have it mapped."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def bytes_read() -> int:
    """Bytes that this process has had read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])


def measure(
    ours: HeteroContexts, llama: Llama | None, document: list[int], question: list[int], repeats: int
) -> list[ContextFigures]:
    """Every way at one length."""
    length = len(document)
    took, token = ours.prefill(document, question)
    measured = [ContextFigures("hetero-kv", length, PREFILL, took)]
    measured.append(ContextFigures("hetero-kv", length, SAVE, ours.saved(document), written=ours.path.stat().st_size))
    ways: dict[tuple[str, str], Callable[[], ContextRun]] = {
        ("hetero-kv", f"{way}, {'cold' if cold else 'warm'}"): partial(ours.resumed, question, token, verify, cold)
        for way, verify in ((CHECKED, True), (UNCHECKED, False))
        for cold in (True, False)
    }
    if llama is not None:
        measured.append(ContextFigures(LLAMA, length, PREFILL, llama.first(document, question)))
        measured.append(ContextFigures(LLAMA, length, SAVE, None, written=llama.state.stat().st_size))
        ways |= {(LLAMA, f"resumed, {'cold' if cold else 'warm'}"): partial(llama.resumed, question, cold)
                 for cold in (True, False)}  # fmt: skip
    names = {f"{engine}/{way}": (engine, way) for engine, way in ways}
    samples = interleaved_samples({name: ways[key] for name, key in names.items()}, repeats)  # type: ignore[arg-type]
    for name, (engine, way) in names.items():
        middle = sorted(samples[name])[repeats // 2]
        measured.append(ContextFigures(engine, length, way, *middle))  # type: ignore[misc]
    return measured


def show(measured: Sequence[ContextFigures]) -> None:
    """Print what was measured, then goals and verdicts."""
    table = Table("tokens", "engine", "way", "s", "of that loading", "/ prefill", "MB read", "MB on disk")
    prefill = {(each.engine, each.length): each.seconds or 0.0 for each in measured if each.way == PREFILL}
    for each in measured:
        is_resumed = each.seconds is not None and each.way not in (PREFILL, SAVE)
        ratio = f"{prefill[each.engine, each.length] / each.seconds:.0f}" if is_resumed and each.seconds else ""
        times = ("" if value is None else f"{value:.3f}" for value in (each.seconds, each.loading))
        sizes = ("" if size is None else f"{size / 1e6:.1f}" for size in (each.read, each.written))
        table.add_row(f"{each.length:,}", each.engine, each.way, *times, ratio, *sizes)
    Console().print(table)
    cold = [each for each in measured if (each.engine, each.length, each.way)
            == ("hetero-kv", GOAL_LENGTH, f"{CHECKED}, cold")]  # fmt: skip
    goals = [
        goal
        for each in cold
        for took in [each.seconds or 0.0]
        for goal in (
            (
                f"prefill over {each.way} at {GOAL_LENGTH:,}",
                prefill["hetero-kv", GOAL_LENGTH] / each.seconds,
                GOAL_RATIO,
            ),
            (f"{GOAL_SECONDS} s over {each.way} at {GOAL_LENGTH:,}", GOAL_SECONDS / each.seconds, 1.0),
        )
    ]
    if goals:
        Console().print(verdicts_table(goals))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--config", default="ktransformers")
    parser.add_argument("--lengths", default="16384,30000")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    own = sys.executable if importlib.util.find_spec("llama_cpp") else None
    parser.add_argument("--llama_python", default=own, help="a Python that has llama-cpp-python; none: left out")
    parser.add_argument("--folder", default=None, help="where contexts are saved, on the disk to be measured")
    parser.add_argument("--json", default=None)
    given = parser.parse_args(arguments)
    lengths = [int(length) for length in given.lengths.split(",")]
    set_threads(given.threads)
    text = source_tokens(given.model, max(lengths) + QUESTION)
    measured: list[ContextFigures] = []
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        ours = HeteroContexts(given.model, given.config, max(lengths) + 512, Path(folder) / "context")
        llama = None
        if given.llama_python:
            llama = Llama(given.llama_python, given.model, given.threads, Path(folder) / "state")
        for length in lengths:
            document, question = text[:length], text[length : length + QUESTION]
            measured += measure(ours, llama, document, question, given.repeats)
    show(measured)
    if given.json:
        Path(given.json).write_text(json.dumps([asdict(each) for each in measured], indent=1))


if __name__ == "__main__":
    main()
