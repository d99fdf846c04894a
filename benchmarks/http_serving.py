"""Servers side by side: clients that ask about documents, hetero-kv's server and llama.cpp's, with the same file.

    python -m benchmarks.serving --http --llama_server PROGRAM [--clients 1,4,16] [--documents 4] [--context 2048]
        [--answer 32] [--recipe adaptive] [--model NAME] [--json FILE]

Each client asks a question about one of the documents of `--context` tokens, all at the same time; then each asks a
second one. Both servers start anew for every number of clients, with as many slots, the same context length and as many
threads; they run one after the other. Figures: time to the first token (median and longest), tokens per second of all
clients together, and the 99th percentile of gaps between two tokens of an answer.

Restart: hetero-kv's server is stopped and started again; a further question to a document is timed beside the first.

Overhead: the same requests through HTTP, of clients in a process of their own, and by the engine itself, in turns:
tokens per second of four at a time, and the time to the first token of one alone. `--clients ""` measures these alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.http_clients import TimedAnswer, ask, ask_all
from hetero_kv.cpus import usable_cpus
from hetero_kv.models import DEFAULT_MODEL
from hetero_kv.models.locating import locate

WORDS = "river stone garden window paper market letter engine valley copper winter signal harbour pocket meadow"


def document(tokens: int, seed: int) -> str:
    """A text of about so many tokens: a word is one, nearly."""
    drawn = random.Random(seed)
    words = WORDS.split()
    return " ".join(drawn.choice(words) for _ in range(tokens))


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def started(command: Sequence[str], port: int, log: Path) -> Iterator[str]:
    """The address of a server that runs within this context, once it is healthy."""
    address = f"http://127.0.0.1:{port}"
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        while True:
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=5) as response:
                    if response.status == 200:
                        break
            except OSError:
                if process.poll() is not None:
                    raise RuntimeError(f"{command[0]} ended: {log.read_text(errors='replace')[-2000:]}") from None
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(120)


def ours(arguments: argparse.Namespace, clients: int, port: int, folder: Path) -> list[str]:
    """The command of hetero-kv's server."""
    return [
        sys.executable, "-m", "hetero_kv", "serve", "--model", arguments.model, "--config", arguments.recipe,
        "--port", str(port), "--max_batch", str(clients), "--max_seq_len", str(room(arguments)), "--context_folder",
        str(folder), "--threads_num", str(arguments.threads),
    ]  # fmt: skip


def theirs(arguments: argparse.Namespace, clients: int, port: int) -> list[str]:
    """The command of llama.cpp's server."""
    file = locate(arguments.model, None, None).gguf
    return [
        arguments.llama_server, "-m", str(file), "--port", str(port), "-np", str(clients), "-c",
        str(clients * room(arguments)), "-t", str(arguments.threads), "-tb", str(arguments.threads),
    ]  # fmt: skip


def room(arguments: argparse.Namespace) -> int:
    """Tokens of a prompt and its answer, with something to spare."""
    return int(1.3 * arguments.context) + arguments.answer + 256


def figures(rounds: Sequence[Sequence[TimedAnswer]], seconds: Sequence[float]) -> dict[str, Any]:
    """What a server reached: for the first questions, the second ones, and both."""
    found: dict[str, Any] = {}
    for name, answers in zip(("first", "second"), rounds, strict=True):
        firsts = [each.first_s for each in answers]
        found[f"{name}_token_s"] = statistics.median(firsts)
        found[f"{name}_token_longest_s"] = max(firsts)
    everything = [each for answers in rounds for each in answers]
    gaps = sorted(gap for each in everything for gap in each.gaps_s)
    found["tokens_per_s"] = sum(len(each.times) for each in everything) / sum(seconds)
    found["gap_p99_s"] = gaps[int(0.99 * (len(gaps) - 1))]
    return found


def measured(address: str, arguments: argparse.Namespace, clients: int) -> dict[str, Any]:
    """The figures of a server that has just started."""
    ask(address, "warm", 2)
    rounds, seconds = [], []
    for question in ("What is the first word?", "Which word comes most often?"):
        prompts = [
            f"{document(arguments.context, client % arguments.documents)}\n\n{question} ({client})"
            for client in range(clients)
        ]
        began = time.perf_counter()
        rounds.append(ask_all(address, prompts, arguments.answer))
        seconds.append(time.perf_counter() - began)
    return figures(rounds, seconds)


def restart(arguments: argparse.Namespace, scratch: Path) -> dict[str, float]:
    """Seconds to the first token of a question to a new document, and of another one behind a restart."""
    folder, text = scratch / "restart", document(arguments.context, 99)
    found = {}
    for name, question in (("new_s", "What is it?"), ("restarted_s", "Who wrote it?")):
        port = free_port()
        with started(ours(arguments, 1, port, folder), port, scratch / "ours.log") as address:
            ask(address, "warm", 2)
            found[name] = ask(address, f"{text}\n\n{question}", 4).first_s
    return {**found, "ratio": found["new_s"] / found["restarted_s"]}


def overhead(arguments: argparse.Namespace, scratch: Path) -> dict[str, float]:
    """Throughput through HTTP and by the engine itself, and the time that HTTP adds to the first token."""
    import uvicorn

    from hetero_kv import SamplingParams, load_model
    from hetero_kv.models.text_encoding import PromptPiece, TextEncoder
    from hetero_kv.server.app import application
    from hetero_kv.server.host import Host
    from hetero_kv.server.limits import Gate
    from hetero_kv.server.served import ServedModel, ServedModels
    from hetero_kv.server.settings import ServerSettings
    from hetero_kv.serving.engine import Engine

    rows, count = 4, arguments.answer
    loaded = load_model(arguments.model, config=arguments.recipe, max_seq_len=1024, threads_num=arguments.threads)
    prompts = [f"{document(16, row)} {row}" for row in range(rows)]
    with (
        Engine(loaded, max_seq_len=1024, max_batch=rows, kept_prefixes=0) as engine,
        ThreadPoolExecutor(rows) as readers,
        # As clients of a server: their work is none of its own.
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as clients,
    ):
        port = free_port()
        gate = Gate(rows, 64, 600.0)
        served = ServedModel(
            loaded.name, arguments.recipe, loaded.tokenizer, loaded.context_length, engine, gate
        )  # fmt: skip
        host = Host.of(ServedModels([served]), ServerSettings(), folder=scratch)
        server = uvicorn.Server(uvicorn.Config(application(host), port=port, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        encoder, params = TextEncoder(loaded.tokenizer), SamplingParams(max_new_tokens=count, ignore_eos=True)

        def bare(some: Sequence[str]) -> tuple[float, float]:
            began, firsts = time.perf_counter(), []

            def read(prompt: str) -> None:
                asked = time.perf_counter()
                tokens = encoder.encode([PromptPiece(prompt, is_template=True)], add_special_tokens=True)
                for number, _ in enumerate(engine.generate(tokens, params)):
                    if number == 0:
                        firsts.append(time.perf_counter() - asked)

            list(readers.map(read, some))
            return len(some) * count / (time.perf_counter() - began), min(firsts)

        def through_http(some: Sequence[str]) -> tuple[float, float]:
            began = time.perf_counter()
            answers = clients.submit(ask_all, f"http://127.0.0.1:{port}", some, count).result()
            return len(some) * count / (time.perf_counter() - began), min(each.first_s for each in answers)

        ways = {"bare": bare, "http": through_http}
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        firsts: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(arguments.repeats + 1):
            for name, way in ways.items():
                speed, first = way(prompts)[0], way(prompts[:1])[1]
                # The first round compiles, and connects.
                if number:
                    speeds[name].append(speed)
                    firsts[name].append(first)
        server.should_exit = True
        thread.join(10)
    speed_of = {name: statistics.median(values) for name, values in speeds.items()}
    first_of = {name: statistics.median(values) for name, values in firsts.items()}
    return {
        "bare_tokens_per_s": speed_of["bare"],
        "http_tokens_per_s": speed_of["http"],
        "throughput_ratio": speed_of["http"] / speed_of["bare"],
        "added_first_token_ms": 1000 * (first_of["http"] - first_of["bare"]),
    }


def main() -> None:
    """Measure, print, and write a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama_server", metavar="PROGRAM")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--recipe", default="adaptive")
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {"clients": []}
    console = Console()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for clients in map(int, filter(None, arguments.clients.split(","))):
            each: dict[str, Any] = {"clients": clients}
            port = free_port()
            folder = scratch / f"contexts-{clients}"
            with started(ours(arguments, clients, port, folder), port, scratch / "ours.log") as address:
                each["hetero-kv"] = measured(address, arguments, clients)
            if arguments.llama_server:
                port = free_port()
                with started(theirs(arguments, clients, port), port, scratch / "theirs.log") as address:
                    each["llama-server"] = measured(address, arguments, clients)
            found["clients"].append(each)
            console.print(each)
        found["restart"] = restart(arguments, scratch)
        found["overhead"] = overhead(arguments, scratch)
    shown = Table("clients", "figure", "hetero-kv", "llama-server", "ratio")
    for each in found["clients"]:
        other = each.get("llama-server", {})
        for figure, value in each["hetero-kv"].items():
            peer = other.get(figure)
            better = None if peer is None else value / peer if figure == "tokens_per_s" else peer / value
            shown.add_row(
                str(each["clients"]), figure, f"{value:.3f}", "" if peer is None else f"{peer:.3f}",
                "" if better is None else f"{better:.2f}",
            )  # fmt: skip
    console.print(shown, found["restart"], found["overhead"])
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
