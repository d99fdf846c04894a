"""Time to the answer of a question after a long context, in units of a decoded token's time.

    python -m benchmarks.short_turn [--model NAME] [--length 16384] [--question 30] [--recipes dense,sparse]
                                    [--repeats 5] [--threads N] [--json]

The question's forward yields the first token of the answer. The same rounds measure a decoded token, and the same
question with the context first copied into a prefill buffer, as for longer prompts. Figures are medians; the cache is
rolled back to the context after each run. Further runs with timers split the question's forward: attention to the
context, products with quantized weights, and the rest (medians, which need not add up).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.peer_engines import DECODED, HeteroKVEngine
from benchmarks.peers import source_tokens
from benchmarks.timing import interleaved_medians, seconds
from hetero_kv.families.retrieval import short_turn
from hetero_kv.models import DEFAULT_MODEL
from hetero_kv.threads import set_threads
from hetero_kv.weights import quantized_weight

GOAL = 4
"""The goal: the answer begins within this many decoded tokens' time."""


def measure(engine: HeteroKVEngine, context: list[int], question: list[int], repeats: int) -> dict[str, float]:
    """Medians in seconds: a decoded token, the question's forward, and the question's forward through a buffer."""
    engine.prefill(context)
    cache, before = engine.cache, engine.cache.snapshot()
    most = short_turn.MOST_TOKENS

    def taken_back(action: Callable[[], float]) -> float:
        try:
            return action()
        finally:
            cache.rollback(before)

    @torch.no_grad()
    def ask() -> float:
        return seconds(lambda: engine.model(torch.tensor([question]), past_key_values=cache, logits_to_keep=1))

    def ask_through_buffer() -> float:
        short_turn.MOST_TOKENS = 0
        try:
            return ask()
        finally:
            short_turn.MOST_TOKENS = most

    actions: dict[str, Callable[[], float]] = {
        "token": lambda: taken_back(lambda: engine.decode(question[:DECODED])),
        "question": lambda: taken_back(ask),
        "through_buffer": lambda: taken_back(ask_through_buffer),
    }
    for action in actions.values():
        action()
    found = interleaved_medians(actions, repeats)
    parts = [_parts(lambda: taken_back(ask)) for _ in range(repeats)]
    return found | {name: statistics.median(each[name] for each in parts) for name in parts[0]}


def _parts(action: Callable[[], float]) -> dict[str, float]:
    """Seconds of the parts of the question's forward."""
    taken: defaultdict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*flags: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*flags, **named)
            finally:
                taken[name] += time.perf_counter() - start

        return call

    with (
        patch.object(short_turn, "attend_blocks_causal", timed("attention", short_turn.attend_blocks_causal)),
        patch.object(quantized_weight, "multiply", timed("products", quantized_weight.multiply)),
    ):
        whole = action()
    return {**taken, "rest": whole - sum(taken.values())}


def main() -> None:
    """Print a line for each recipe, or with --json the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--length", type=int, default=16384, help="tokens of the context")
    parser.add_argument("--question", type=int, default=30, help="tokens of the question, from 2 on")
    parser.add_argument("--recipes", default="dense,sparse", help="of benchmarks.peers")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    flags = parser.parse_args()
    set_threads(flags.threads)
    ids = source_tokens(flags.model, flags.length + flags.question)
    context, question = ids[: flags.length], ids[flags.length : flags.length + flags.question]
    found: dict[str, Any] = {}
    for recipe in flags.recipes.split(","):
        engine = HeteroKVEngine(flags.model, recipe, flags.length + flags.question + DECODED)
        found[recipe] = figures = measure(engine, context, question, flags.repeats)
        if flags.json:
            continue
        token, answer, through = (figures[name] for name in ("token", "question", "through_buffer"))
        print(
            f"{recipe}, {flags.length} tokens: a decoded token {token * 1e3:.1f} ms; a question of {flags.question} "
            f"{answer * 1e3:.1f} ms, {answer / token:.1f} tokens' time (goal {GOAL}: "
            f"{'met' if answer <= GOAL * token else 'missed'}); through a buffer {through * 1e3:.1f} ms, "
            f"{through / token:.1f}"
        )
        print(
            "  parts: "
            + ", ".join(f"{name} {figures[name] * 1e3:.1f} ms" for name in ("attention", "products", "rest"))
        )
    if flags.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
