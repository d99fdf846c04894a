"""Host time of a decoded token besides the model and the kernels, compared with another commit in the same run.

    python -m benchmarks.step_cost [--against HEAD] [--recipes ktransformers,quest] [--rounds 12] [--calls]
        [--json FILE]

A random Llama with 24 layers of tiny dimensions, in float32, decodes after a prompt of 600 tokens. Its tensors are so
small that the host's work per token dominates. The commit is checked out into a temporary git worktree; a process per
tree runs the same program (`step_cost_worker.py`), and short bursts of tokens alternate between the two.

Host time of a token = T(model) - T(kernels) - T(untouched model), each as CPU time of the single computing thread:

- T(model): `model(token, past_key_values=cache)` with the recipe injected.
- T(kernels): Python's calls of compiled functions, from call to return.
- T(untouched model): the same model without rules, with an attention function that returns zeros and a cache that
  stores nothing, decoding a token after each of the others. This is the cost of the model's own modules.

Calls of torch and numpy count as the project's: at this size their time is the overhead of calling them. The goal is
half of the other commit's host time. `cProfile` gives a second estimate: a function of the project owns its time and
that of its callees, up to the next function of the project, a kernel or a function of the model. The profiler's
overhead is subtracted by the number of calls, which may make small functions negative. This estimate is noisier, and
need not equal the first: it attributes the code between the model's modules (transformers' cache and interfaces) to the
model, whatever made it necessary.

Frames: the project's Python frames that are entered in one decoded token, divided by the layers; a generator counts as
often as it is resumed. The token is the median one of a block's length, in which one token fills a block. `other`
frames are those of torch, numpy and the standard library in excess of the untouched model's. The goal for retrieval is
at most 25 of the project's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.step_cost_profile import KERNELS, MODEL

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("step_cost_worker.py")
LAYERS = 24
PROMPT = 600
#: Tokens of a block, and of a burst: one of them fills a block.
BLOCK = 16
#: Bursts under the profiler; their medians are printed.
PROFILES = 3
#: Owners of time in the profile besides the project; see `step_cost_profile.py`.
NOT_OURS = (MODEL, KERNELS)
RATIO_GOAL = 0.5
FRAMES_GOAL = 25
BEFORE, NOW = "before", "now"

_PAGED = {"block_size": BLOCK, "sink_tokens": BLOCK, "local_windows_len": 64}
_BUDGET = {"top_k_blocks": 8}
_SHADOWKV = {"rank": 16, "outlier_chunks": 8, "sparse_budget": 64}
_BOUNDED = {"budget": 128, "stride": 64}
#: Recipe -> its family, and settings that fit the prompt.
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "ktransformers": ("retrieval", {**_PAGED, **_BUDGET}),
    "quest": ("retrieval", {**_PAGED, **_BUDGET}),
    "dense": ("retrieval", _PAGED),
    "shadowkv": ("shadowkv", _SHADOWKV),
    "streaming_llm": ("bounded", _BOUNDED),
    "tova": ("bounded", _BOUNDED),
}


class Worker:
    """A process that measures one tree; see `step_cost_worker.py`."""

    def __init__(self, tree: Path, layers: int = LAYERS) -> None:
        self.tree = tree
        one_thread = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(tree), str(layers)],
            cwd=tree,
            env={**os.environ, **one_thread, "PYTHONPATH": f"{tree}{os.pathsep}{WORKER.parent}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self._process.kill()
        self._process.communicate()

    def begin(self, do: str, **arguments: Any) -> None:
        """Send a request; `answer` waits for its answer."""
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """The answer to the oldest open request. Raises RuntimeError if the process has ended."""
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(f"the worker of {self.tree} ended with exit status {self._process.wait()}; see above")
        return json.loads(line)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer to a request."""
        self.begin(do, **arguments)
        return self.answer()


@contextmanager
def checked_out(commit: str, repository: Path = ROOT) -> Iterator[Path]:
    """A temporary git worktree of `commit`. Raises CalledProcessError for an unknown commit; git prints the reason."""
    git = ["git", "-C", str(repository), "worktree"]
    with tempfile.TemporaryDirectory(prefix="step_cost_") as folder:
        tree = Path(folder) / "tree"
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def measure(workers: Mapping[str, Worker], recipe: str, rounds: int, prompt: int = PROMPT) -> dict[str, Any]:
    """Bursts, frames and attribution of one recipe by tree; `ratio` is that of host times, now by before."""
    for worker in workers.values():
        worker.begin("inject", recipe=recipe, settings=RECIPES[recipe][1], prompt=prompt)
        worker.begin("burst", tokens=BLOCK)
    for worker in workers.values():
        worker.answer()
        worker.answer()
    bursts: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    for index in range(rounds):
        # Alternate which tree goes first.
        for name in list(workers)[:: 1 if index % 2 else -1]:
            bursts[name].append(workers[name].ask("burst", tokens=BLOCK))
    frames = {name: worker.ask("frames", tokens=BLOCK) for name, worker in workers.items()}
    spent: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    for _ in range(PROFILES):
        for name, worker in workers.items():
            spent[name].append(worker.ask("attribution", tokens=BLOCK))
    found: dict[str, Any] = {"recipe": recipe, "family": RECIPES[recipe][0]}
    for name in workers:
        found[name] = {
            "ms_per_token": _medians(bursts[name]),
            "bursts": bursts[name],
            "frames": frames[name],
            "profiled_ms_per_token": _medians(spent[name]),
        }
    hosts = ([burst["host"] for burst in bursts[name]] for name in (BEFORE, NOW))
    return {**found, "ratio": ratio(*hosts)}


def _medians(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(sample.get(name, 0.0) for sample in samples) for name in samples[0]}


def ratio(before: Sequence[float], now: Sequence[float]) -> dict[str, float]:
    """Quartiles of now / before over neighbouring bursts.

    A ratio of the medians (`of_medians`) that differs shows that other processes disturbed the run.
    """
    ratios = [after / earlier for earlier, after in zip(before, now, strict=True)]
    lower, median, upper = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    of_medians = statistics.median(now) / statistics.median(before)
    return {"median": median, "lower": lower, "upper": upper, "of_medians": of_medians}


def frames_per_layer(frames: Mapping[str, Any], key: str = "per_token", layers: int = LAYERS) -> float:
    """Frames of the median token (`statistics.median_low`), divided by the layers."""
    return statistics.median_low(frames[key]) / layers


def profiled_host(row: Mapping[str, Any], tree: str) -> float:
    """Host milliseconds per token by the second estimate: all time that the profile attributes to the project."""
    return sum(ms for name, ms in row[tree]["profiled_ms_per_token"].items() if name not in NOT_OURS)


def missed(row: Mapping[str, Any], layers: int = LAYERS) -> list[str]:
    """The goals that a recipe misses: `time`, and, for retrieval `frames`."""
    found = ["time"] if row["ratio"]["median"] > RATIO_GOAL else []
    if row["family"] == "retrieval" and frames_per_layer(row[NOW]["frames"], layers=layers) > FRAMES_GOAL:
        found.append("frames")
    return found


def tables(rows: Sequence[Mapping[str, Any]], against: str, calls: bool) -> Iterator[Table]:
    """Host time, frames and, with `calls`, the project's functions of every recipe."""
    time = _table(
        f"Host time per decoded token, ms: {against} → this tree",
        *("recipe", "host", "ratio", "quartiles", "profiled", "ratio"),
    )
    frames = _table(
        "Python frames per layer; ours outside of layers per token",
        *("family", "recipe", "ours", "other", "outside", "missed"),
    )
    for row in rows:
        profiled = [profiled_host(row, tree) for tree in (BEFORE, NOW)]
        time.add_row(
            row["recipe"],
            _change([row[tree]["ms_per_token"]["host"] for tree in (BEFORE, NOW)], ".2f"),
            f"{row['ratio']['median']:.2f}",
            f"{row['ratio']['lower']:.2f} - {row['ratio']['upper']:.2f}",
            _change(profiled, ".2f"),
            f"{profiled[1] / profiled[0]:.2f}",
        )
        ours, others = (
            [frames_per_layer(row[tree]["frames"], key) for tree in (BEFORE, NOW)] for key in ("per_token", "others")
        )
        outside = [statistics.median_low(row[tree]["frames"]["outside_layers"]) for tree in (BEFORE, NOW)]
        frames.add_row(
            row["family"],
            row["recipe"],
            _change(ours, ".1f"),
            _change(others, ".0f"),
            _change(outside, "d"),
            ", ".join(missed(row)) or "none",
        )
    yield from (time, frames)
    for row in rows if calls else ():
        yield _calls_table(row)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("family", "recipe", "missed", "function") else "right")
    return table


def _change(values: Sequence[float], form: str) -> str:
    return " → ".join(format(value, form) for value in values)


def _calls_table(row: Mapping[str, Any]) -> Table:
    """The project's functions by their present cost, and the other functions that they call most."""
    table = _table(
        f"{row['recipe']}, per token: the project's functions, including callees\n→ callees, most called first",
        *("function", "calls", "µs"),
    )
    ours, others = ({tree: row[tree]["frames"][key] for tree in (BEFORE, NOW)} for key in ("calls", "called"))
    spent = {tree: row[tree]["profiled_ms_per_token"] for tree in (BEFORE, NOW)}
    for function in sorted({*spent[BEFORE], *spent[NOW]}, key=lambda name: -spent[NOW].get(name, 0)):
        called = _change([ours[tree].get(function, 0) for tree in (BEFORE, NOW)], ".4g")
        table.add_row(function, called, _change([spent[tree].get(function, 0) * 1e3 for tree in (BEFORE, NOW)], ".0f"))
    for function in sorted({*others[BEFORE], *others[NOW]}, key=lambda name: -others[NOW].get(name, 0))[:30]:
        called = _change([others[tree].get(function, 0) for tree in (BEFORE, NOW)], ".4g")
        table.add_row(f"→ {function}", called, "")
    return table


def main() -> None:
    """Print the tables; with --json write every figure besides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="HEAD", help="the commit to compare this working tree with")
    parser.add_argument("--recipes", default=",".join(RECIPES), type=lambda text: text.split(","))
    parser.add_argument("--rounds", default=12, type=int, help=f"bursts of {BLOCK} tokens per tree")
    parser.add_argument("--calls", action="store_true", help="our functions one by one, the dearest first")
    parser.add_argument("--json", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    if unknown := set(arguments.recipes) - set(RECIPES):
        parser.error(f"no recipe {', '.join(sorted(unknown))} here; there are: {', '.join(RECIPES)}")
    with ExitStack() as stack:
        trees = {BEFORE: stack.enter_context(checked_out(arguments.against)), NOW: ROOT}
        workers = {name: stack.enter_context(Worker(tree)) for name, tree in trees.items()}
        rows = [measure(workers, recipe, arguments.rounds) for recipe in arguments.recipes]
    console = Console()
    for table in tables(rows, arguments.against, arguments.calls):
        console.print(table, "")
    if arguments.json:
        arguments.json.write_text(json.dumps({"against": arguments.against, "layers": LAYERS, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
