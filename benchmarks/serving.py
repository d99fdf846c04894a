"""Many requests to one model at a time: tokens per second by rows, gaps while a prompt passes, shared beginnings.

    python -m benchmarks.serving [--model NAME] [--recipes dense,adaptive] [--context 1024] [--rows 8]
        [--prompt 16384] [--repeats 5] [--llama_batched_bench PROGRAM] [--json FILE] [--plot FILE]

Rows: requests of different lengths near `--context` are answered at a time, and leave one after the other; a figure is
the median time of a step, the repeats interleaved. Gaps: four requests are answered while a prompt of `--prompt` tokens
passes; a gap is the time between two tokens of one of them. Beginnings: a second prompt has the same first 8,192 tokens
(or half of `--prompt`, if that is less).

`--http` with the flags of `benchmarks.http_serving` measures the server instead.

llama.cpp's `llama-batched-bench`, built from its source, decodes as many rows of `--context` tokens each, with the same
file and as many threads, behind the first recipe. The plot shows tokens per second by rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import http_serving
from benchmarks.figures import Label, label_lines, new_figure, save
from hetero_kv import Engine, SamplingParams, load_model
from hetero_kv.models import DEFAULT_MODEL
from hetero_kv.models.locating import locate
from hetero_kv.serving.stream import Piece, Stream

STEPS = 12
"""Steps of decoding per number of rows and repeat."""
GAP_ROWS = 4
GOALS = {"speedup": 5.0, "gap_ms": 250.0, "prompt_ratio": 1.15, "first_token_steps": 3.0}


def ids(count: int, seed: int) -> list[int]:
    """Token ids of ordinary words, the same for a seed."""
    return [1000 + (index * 7919 + seed * 104_729) % 20_000 for index in range(count)]


def endless(engine: Engine, prompt: Sequence[int]) -> Stream:
    """A request that is answered until it is cancelled."""
    return engine.generate(prompt, SamplingParams(max_new_tokens=engine.max_seq_len, ignore_eos=True))


def begun(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Stream]:
    """Requests whose prompts have all passed."""
    streams = [endless(engine, prompt) for prompt in prompts]
    while len(engine._scheduler.queues.running) < len(streams):
        engine.step()
    return streams


def timed_step(engine: Engine) -> float:
    """Seconds of a step."""
    began = time.perf_counter()
    engine.step()
    return time.perf_counter() - began


def timed_tokens(stream: Stream) -> list[float]:
    """When each of the stream's next tokens comes, seconds of `time.perf_counter`."""
    put, times = stream.put, []

    def timed(piece: Piece) -> None:
        times.append(time.perf_counter())
        put(piece)

    stream.put = timed
    return times


def end(engine: Engine, streams: Sequence[Stream]) -> None:
    """Cancel these requests."""
    for stream in streams:
        stream.cancel()
    engine.step()


def row_counts(most: int) -> list[int]:
    """The numbers of rows that are timed, the largest first."""
    return [count for count in (8, 4, 2, 1) if count <= most]


def by_rows(engine: Engine, context: int, most: int, repeats: int) -> dict[int, float]:
    """Tokens per second by number of rows, each of another length."""
    prompts = [ids(context - 37 * row, row) for row in range(most)]
    counts = row_counts(most)
    times: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(repeats):
        streams = begun(engine, prompts)
        for count in counts:
            end(engine, streams[count:])
            streams = streams[:count]
            times[count] += [timed_step(engine) for _ in range(STEPS)]
        end(engine, streams)
    return {count: count / statistics.median(found) for count, found in times.items()}


def llama_by_rows(program: str, model: str, context: int, most: int) -> dict[int, float]:
    """llama.cpp's tokens per second by number of rows, of `context` tokens each, by its own benchmark.

    It computes one prompt and copies its cache for each row.
    """
    counts, file = sorted(row_counts(most)), locate(model, None, None).gguf
    room = most * (context + STEPS) + 64
    command = [
        program, "-m", str(file), "-c", str(room), "-npp", str(context), "-ntg", str(STEPS),
        "-pps", "-npl", ",".join(map(str, counts)), "-t", str(torch.get_num_threads()), "--output-format", "jsonl",
    ]  # fmt: skip
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return {line["pl"]: line["speed_tg"] for line in lines}


def gaps(engine: Engine, context: int, prompt: int) -> dict[str, float]:
    """Gaps between the tokens of other requests while a prompt passes, and its time beside them and alone."""
    alone = engine.generate(ids(prompt, 90), SamplingParams(max_new_tokens=1)).result().first_token_s
    streams = begun(engine, [ids(context - 41 * row, 50 + row) for row in range(GAP_ROWS)])
    tokens_at = [timed_tokens(stream) for stream in streams]
    began = time.perf_counter()
    request = engine.generate(ids(prompt, 91), SamplingParams(max_new_tokens=1))
    while not request.is_done:
        engine.step()
    beside = time.perf_counter() - began
    end(engine, streams)
    found = sorted(after - before for each in tokens_at for before, after in itertools.pairwise([began, *each]))
    assert alone is not None
    return {
        "median_gap_ms": 1e3 * statistics.median(found),
        "gap_ms": 1e3 * found[int(0.99 * (len(found) - 1))],
        "prompt_s": beside,
        "prompt_alone_s": alone,
        "prompt_ratio": beside / alone,
    }


def shared_beginning(engine: Engine, tokens: int) -> dict[str, float]:
    """The time to the first token behind a beginning that is there, and that in decoded tokens."""
    document = ids(tokens, 70)
    (stream,) = begun(engine, [[*document, *ids(16, 71)]])
    step = statistics.median(timed_step(engine) for _ in range(STEPS))
    end(engine, [stream])
    found = engine.generate([*document, *ids(16, 72)], SamplingParams(max_new_tokens=1)).result()
    assert found.first_token_s is not None
    return {
        "cached_tokens": found.cached_tokens,
        "first_token_s": found.first_token_s,
        "first_token_steps": found.first_token_s / step,
    }


def measured(model: str, recipe: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures of a recipe."""
    room = max(arguments.prompt, arguments.context) + 1024
    loaded = load_model(model, config=recipe, max_seq_len=room)
    # Guesses would make several tokens of a step, which are not counted here.
    settings = {"max_batch": arguments.rows, "speculation": "off", "starts_thread": False}
    with Engine(loaded, max_seq_len=room, **settings) as engine:
        rows = by_rows(engine, arguments.context, arguments.rows, arguments.repeats)
        return {
            "recipe": recipe,
            "tokens_per_s": rows,
            "speedup": rows[max(rows)] / rows[1],
            **gaps(engine, arguments.context, arguments.prompt),
            **shared_beginning(engine, min(8192, arguments.prompt // 2)),
        }


def table(found: Sequence[dict[str, Any]]) -> Table:
    """The figures beside their goals."""
    shown = Table("recipe", "figure", "found", "goal")
    for each in found:
        for rows, speed in sorted(each["tokens_per_s"].items()):
            shown.add_row(each["recipe"], f"tokens/s, {rows} rows", f"{speed:.1f}", "")
        for name, number in each.items():
            if isinstance(number, int | float):
                sign = "≥" if name == "speedup" else "≤"
                shown.add_row(each["recipe"], name, f"{number:.2f}", f"{sign} {GOALS[name]:g}" if name in GOALS else "")
    return shown


def plot(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens per second by number of rows, a labelled line for each recipe and llama.cpp."""
    figure, axes = new_figure()
    labels = []
    for number, each in enumerate(found):
        points = sorted((int(rows), speed) for rows, speed in each["tokens_per_s"].items())
        axes.plot(*zip(*points, strict=True), marker="o", color=f"C{number}")
        labels.append(Label(each["recipe"], *points[-1], f"C{number}"))
    counts = sorted({int(rows) for each in found for rows in each["tokens_per_s"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, map(str, counts))
    axes.set_xlim(counts[0] / 1.2, counts[-1] * 1.8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests answered at a time")
    axes.set_ylabel("tokens per second, all requests")
    axes.set_title("Decode speed by number of requests (higher is better)", fontsize=10)
    label_lines(figure, axes, labels)
    save(figure, axes, path)


def main() -> None:
    """Measure, print, and write a record."""
    if "--http" in sys.argv:
        sys.argv.remove("--http")
        http_serving.main()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--recipes", default="dense,adaptive")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--llama_batched_bench", metavar="PROGRAM")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    for recipe in arguments.recipes.split(","):
        found.append(measured(arguments.model, recipe, arguments))
        if arguments.llama_batched_bench and len(found) == 1:
            program, context, most = arguments.llama_batched_bench, arguments.context, arguments.rows
            theirs = llama_by_rows(program, arguments.model, context, most)
            found.append({"recipe": "llama.cpp", "tokens_per_s": theirs, "speedup": theirs[max(theirs)] / theirs[1]})
        if arguments.json is not None:
            # A recipe takes a quarter of an hour.
            arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    Console().print(table(found))
    if arguments.plot is not None:
        plot(found, arguments.plot)


if __name__ == "__main__":
    main()
