"""Time to the first token after a long document: with prefill, and from a saved context, compared with llama.cpp.

    python -m benchmarks.contexts [--model NAME] [--config FILE] [--lengths 16384,30000] [--repeats 5]
                                  [--llama_python PYTHON] [--threads N] [--json FILE]

The document is prefilled and saved once. Then the saved context is loaded and the question answered, in turn from a
cold page cache (the file's pages are dropped before) and a warm one, with and without a check of every block
(`verify`). Seconds are from the start of loading to the first token; bytes read are from the disk. llama.cpp runs the
same GGUF file in a separate process, and saves and loads its state file (`llama_state_save_file`).
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
from benchmarks.peer_engines import LLAMA, LlamaCpp
from benchmarks.peers import source_tokens
from benchmarks.timing import interleaved_samples, seconds
from hetero_kv import HeteroCache, inject, open_model
from hetero_kv.models import DEFAULT_MODEL
from hetero_kv.threads import set_threads

QUESTION = 24
"""Tokens of the question."""
PREFILL, SAVE = "prefill", "save"
CHECKED, UNCHECKED = "resumed, checked", "resumed"
#: The goal at this length: the prefill's time over that of a checked cold start, and the latter's seconds.
GOAL_LENGTH, GOAL_RATIO, GOAL_SECONDS = 16384, 50.0, 1.5


@dataclass
class FirstTokenTime:
    """The time of one way to the first token.

    Attributes:
        seconds: the median; for `save`, the time of saving; None if not measured.
        loading: the part until the context is loaded, in the median run.
        read: bytes read from the disk; None if not counted.
        written: bytes of the file; None without a file.
    """

    engine: str
    length: int
    way: str
    seconds: float | None
    loading: float | None = None
    read: int | None = None
    written: int | None = None


class ResumeTime(NamedTuple):
    """One run: total seconds, seconds until the context is loaded, and bytes read from the disk, if counted."""

    seconds: float
    loading: float
    read: int | None


class SavedContextEngine:
    """This project's engine: one model, whose context is saved at `path`."""

    def __init__(self, model: str, config: str, longest: int, path: Path) -> None:
        opened = open_model(model)
        inject(opened.model, config, command_line={"max_seq_len": longest})
        self.model, self.path = opened.load().model, path
        self.model.hetero_kv_injection.compile_kernels()

    @torch.no_grad()
    def ask(self, cache: HeteroCache, ids: list[int]) -> int:
        """The likeliest token after `ids`."""
        return int(self.model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits[0, -1].argmax())

    def prefill(self, document: list[int], question: list[int]) -> tuple[float, int]:
        """Seconds to the first token with an empty cache, and the token. Also saves the document's context."""
        cache = HeteroCache(self.model)
        document_seconds = seconds(lambda: self.ask(cache, document))
        cache.save(self.path, [document])
        token: list[int] = []
        question_seconds = seconds(lambda: token.append(self.ask(cache, question)))
        return document_seconds + question_seconds, token[0]

    def saved(self, document: list[int]) -> float:
        """Seconds of saving a loaded context again."""
        cache = HeteroCache.load(self.path, self.model)
        return seconds(lambda: cache.save(self.path.with_suffix(".again"), [document]))

    def resumed(self, question: list[int], expected: int, verify: bool, cold: bool) -> ResumeTime:
        """Measure the first token after the saved context."""
        gc.collect()
        if cold:
            drop_pages(self.path)
        before, caches, tokens = bytes_read(), [], []
        loading = seconds(lambda: caches.append(HeteroCache.load(self.path, self.model, verify=verify)))
        asking = seconds(lambda: tokens.append(self.ask(caches[0], question)))
        if tokens != [expected]:
            raise RuntimeError(f"the first token is {tokens[0]}, and without saving and loading it is {expected}")
        return ResumeTime(loading + asking, loading, bytes_read() - before)


class Llama(LlamaCpp):
    """llama.cpp, with its state file."""

    def __init__(self, python: str, model: str, threads: int, path: Path) -> None:
        super().__init__(python, model, threads)
        self.state = path

    def first(self, document: list[int], question: list[int]) -> float:
        """Seconds to the first token with an empty cache. Also saves the document's state."""
        took = self.prefill(document)
        self.ask(save=str(self.state), tokens=document)
        return took + self.ask(eval=question)

    def resumed(self, question: list[int], cold: bool) -> ResumeTime:
        """Measure the first token after the saved state; the model stays loaded."""
        if cold:
            drop_pages(self.state)
        loading = self.ask(load=str(self.state))
        return ResumeTime(loading + self.ask(eval=question), loading, None)


def drop_pages(path: Path) -> None:
    """Drop a file's pages from the page cache; no process may have it mapped."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def bytes_read() -> int:
    """Bytes that this process has read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])


def measure(
    ours: SavedContextEngine, llama: Llama | None, document: list[int], question: list[int], repeats: int
) -> list[FirstTokenTime]:
    """Measure every way at one length."""
    length = len(document)
    took, token = ours.prefill(document, question)
    measured = [FirstTokenTime("hetero-kv", length, PREFILL, took)]
    measured.append(FirstTokenTime("hetero-kv", length, SAVE, ours.saved(document), written=ours.path.stat().st_size))
    ways: dict[tuple[str, str], Callable[[], ResumeTime]] = {
        ("hetero-kv", f"{way}, {'cold' if cold else 'warm'}"): partial(ours.resumed, question, token, verify, cold)
        for way, verify in ((CHECKED, True), (UNCHECKED, False))
        for cold in (True, False)
    }
    if llama is not None:
        measured.append(FirstTokenTime(LLAMA, length, PREFILL, llama.first(document, question)))
        measured.append(FirstTokenTime(LLAMA, length, SAVE, None, written=llama.state.stat().st_size))
        ways |= {(LLAMA, f"resumed, {'cold' if cold else 'warm'}"): partial(llama.resumed, question, cold)
                 for cold in (True, False)}  # fmt: skip
    names = {f"{engine}/{way}": (engine, way) for engine, way in ways}
    samples = interleaved_samples({name: ways[key] for name, key in names.items()}, repeats)  # type: ignore[arg-type]
    for name, (engine, way) in names.items():
        middle = sorted(samples[name])[repeats // 2]
        measured.append(FirstTokenTime(engine, length, way, *middle))  # type: ignore[misc]
    return measured


def show(measured: Sequence[FirstTokenTime]) -> None:
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
    parser.add_argument("--llama_python", default=own, help="a Python with llama-cpp-python; none: skip llama.cpp")
    parser.add_argument("--folder", default=None, help="folder for contexts, on the disk to be measured")
    parser.add_argument("--json", default=None)
    flags = parser.parse_args(arguments)
    lengths = [int(length) for length in flags.lengths.split(",")]
    set_threads(flags.threads)
    text = source_tokens(flags.model, max(lengths) + QUESTION)
    measured: list[FirstTokenTime] = []
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        ours = SavedContextEngine(flags.model, flags.config, max(lengths) + 512, Path(folder) / "context")
        llama = None
        if flags.llama_python:
            llama = Llama(flags.llama_python, flags.model, flags.threads, Path(folder) / "state")
        for length in lengths:
            document, question = text[:length], text[length : length + QUESTION]
            measured += measure(ours, llama, document, question, flags.repeats)
    show(measured)
    if flags.json:
        Path(flags.json).write_text(json.dumps([asdict(each) for each in measured], indent=1))


if __name__ == "__main__":
    main()
