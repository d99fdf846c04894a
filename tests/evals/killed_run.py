"""Starts an evaluation repeatedly, kills every attempt but the last at a random moment, and prints what happened.

    python killed_run.py MODEL_FOLDER TEXT_FILE OUT KILLS SEED SAMPLES

First the same evaluation runs undisturbed into OUT/whole; the killed one goes into OUT/killed. Prints a JSON list: the
lines that were there at each kill. Children are forked from one process that has imported everything, so that an
attempt costs no start; it has computed nothing, so that forking it is safe.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import hetero_kv.commands.eval  # noqa: F401  what the children would import
from hetero_kv.cli import main

TASKS = "passkey,fidelity,perplexity"
SAMPLES = ("--lengths", "520,600", "--depths", "0,50,100", "--max_new_tokens", "8", "--prefill_tokens", "500")
METHODS = (
    "--config",
    "quest,streaming",
    "--local_windows_len",
    "32",
    "--top_k_blocks",
    "2",
    "--dtype",
    "float32",
)


def started(model: Path, text: Path, out: Path, samples: int) -> int:
    """A child that evaluates into `out`; its process id."""
    child = os.fork()
    if child:
        return child
    words = [
        "eval",
        "--task",
        TASKS,
        "--model",
        str(model),
        "--prompt_file",
        str(text),
        "--out",
        str(out),
        "--samples",
        str(samples),
    ]
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, sys.stdout.fileno())
    status = 1
    try:
        status = main([*words, *SAMPLES, *METHODS])
    finally:
        os._exit(status)


def finished(child: int) -> None:
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(f"an evaluation ended with {os.waitstatus_to_exitcode(status)}")


def complete_lines(results: Path) -> list[str]:
    return results.read_text().split("\n")[:-1] if results.exists() else []


def killed(child: int, results: Path, rng: random.Random) -> None:
    """Kill the child at some moment after it has written a line or two more, or none."""
    lines = len(complete_lines(results)) + rng.choice((0, 0, 1, 1, 2))
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while len(complete_lines(results)) < lines and os.waitid(os.P_PID, child, ended) is None:
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.3))
    # A child that has ended by itself is a zombie until it is waited for, so that the signal reaches no other process.
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        sys.exit("the evaluation was over before it was killed; give more SAMPLES")


def run(model: Path, text: Path, out: Path, kills: int, seed: int, samples: int) -> None:
    finished(started(model, text, out / "whole", samples))
    rng, results, seen = random.Random(seed), out / "killed" / "results.jsonl", []
    for _ in range(kills):
        killed(started(model, text, out / "killed", samples), results, rng)
        seen.append(complete_lines(results))
    finished(started(model, text, out / "killed", samples))
    print(json.dumps(seen))


if __name__ == "__main__":
    run(*map(Path, sys.argv[1:4]), *map(int, sys.argv[4:7]))
