"""What llama.cpp's own guesses by n-grams gain, for the questions of `benchmarks.speculation`.

    python -m benchmarks.llama_speculation --llama_server PROGRAM [--ways ngram-simple,ngram-mod] [--model NAME]
        [--length 4096] [--questions 20] [--tokens 128] [--json FILE]

A server without guesses and one for each way (`--spec-type`) run beside each other, with the same file and as many
threads, and answer every question in turns, greedily. The server without guesses computes a document; the others get
its slot from a file. A figure is the median over the questions of the ratio of tokens per second to those without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.http_serving import free_port, started
from benchmarks.speculation import questions
from hetero_kv import Engine, load_model
from hetero_kv.cpus import usable_cpus
from hetero_kv.models import DEFAULT_MODEL
from hetero_kv.models.locating import locate

# So many questions in a row are about one document (`benchmarks.speculation.questions`).
_OF_A_DOCUMENT = 4


def post(address: str, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A server's answer."""
    request = urllib.request.Request(
        f"{address}{path}", json.dumps(fields).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=3600) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def answered(address: str, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """An answer of a server, with its tokens and times."""
    fields = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0, "id_slot": 0, "return_tokens": True}
    return post(address, "/completion", fields)


def measure(addresses: dict[str, str], prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, dict[str, Any]]:
    """By way, the figures of one kind of question; `addresses[""]` guesses nothing."""
    speeds: dict[str, list[float]] = {way: [] for way in addresses}
    drafted, accepted, different = dict.fromkeys(addresses, 0), dict.fromkeys(addresses, 0), dict.fromkeys(addresses, 0)
    for number, prompt in enumerate(prompts):
        if number % _OF_A_DOCUMENT == 0:
            answered(addresses[""], prompt, 1)
            post(addresses[""], "/slots/0?action=save", {"filename": "document"})
            for way, address in addresses.items():
                if way:
                    post(address, "/slots/0?action=restore", {"filename": "document"})
        for address in addresses.values():
            # The question, so that only the answer is timed.
            answered(address, prompt, 1)
        found = {}
        for way in list(addresses)[:: 1 if number % 2 else -1]:
            found[way] = answered(addresses[way], prompt, tokens)
            timings = found[way]["timings"]
            speeds[way].append(timings["predicted_per_second"])
            drafted[way] += timings.get("draft_n", 0)
            accepted[way] += timings.get("draft_n_accepted", 0)
        for way, answer in found.items():
            different[way] += answer["tokens"] != found[""]["tokens"]
    return {
        way: {
            "ratio": statistics.median(fast / slow for fast, slow in zip(speeds[way], speeds[""], strict=True)),
            "worst": min(fast / slow for fast, slow in zip(speeds[way], speeds[""], strict=True)),
            "tokens_per_second": statistics.mean(speeds[way]),
            "without": statistics.mean(speeds[""]),
            "right_guesses": accepted[way] / drafted[way] if drafted[way] else 0.0,
            "different_answers": different[way],
        }
        for way in addresses
        if way
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama_server", metavar="PROGRAM", required=True)
    parser.add_argument("--ways", default="ngram-simple,ngram-mod", help="of `--spec-type`, with commas between")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--kinds", default="quoting,open", help="kinds of questions, with commas between")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    flags = parser.parse_args()
    loaded = load_model(flags.model, config="dense", max_seq_len=64)
    with Engine(loaded, max_batch=1, starts_thread=False) as engine:
        prompts = {
            kind: questions(flags.length, flags.questions, kind == "quoting", engine) for kind in flags.kinds.split(",")
        }
    del loaded, engine
    file, lines = locate(flags.model, None, None).gguf, []
    with tempfile.TemporaryDirectory() as name, ExitStack() as servers:
        scratch, addresses = Path(name), {}
        for way in ("", *flags.ways.split(",")):
            port = free_port()
            command = [
                flags.llama_server, "-m", str(file), "--port", str(port), "-np", "1", "-c", str(flags.length + 1024),
                "-t", str(usable_cpus()), "-tb", str(usable_cpus()), "--slot-save-path", str(scratch),
                *(("--spec-type", way) if way else ()),
            ]  # fmt: skip
            addresses[way] = servers.enter_context(started(command, port, scratch / f"log-{way}"))
        for kind, of_kind in prompts.items():
            for way, figures in measure(addresses, of_kind, flags.tokens).items():
                lines.append({"way": way, "questions": kind, "length": flags.length} | figures)
    table = Table(*lines[0])
    for line in lines:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in line.values()))
    Console(width=130).print(table)
    if flags.json:
        flags.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
