"""What a guess by attention to few blocks costs, and what verifying several tokens, behind a long context.

    python -m benchmarks.sparse_draft_cost [--model NAME] [--length 32000] [--tokens 2,3,4,5,7,9] [--repeats 7]
        [--threads N] [--cpu_time]

The rules are `dense`. Random keys and values are stored in place of a prompt, because times do not depend on them. The
figures are milliseconds, medians of interleaved forwards: of one token with full attention, of a guess (`speculation:
sparse`), and of a verifying forward of some tokens. The last lines have the tokens per second with guesses, as a
multiple of those without, if guesses are right with a probability of 0.8, 0.9, 0.95 and 1: that of the best number of
guesses.
`--cpu_time` measures the CPU time of the process, for one thread on a busy machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.timing import interleaved_medians
from hetero_kv import HeteroCache, load_model
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.engine.draft_blocks import DraftBlocks
from hetero_kv.models import DEFAULT_MODEL
from hetero_kv.serving.forward import ModelForward

ODDS = (0.8, 0.9, 0.95, 1.0)
GUESS, ONE = "guess", "1"


class RandomPrompt:
    """Random keys and values in place of a prefilled prompt (`hetero_kv.engine.recorded_prompt.RecordedPrompt`)."""

    rotation = None

    def __init__(self, shape: KVShape, tokens: int, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.length = tokens
        self.keys, self.values = (
            torch.randn(1, shape.kv_heads, tokens, dim, generator=generator, dtype=dtype)
            for dim in (shape.k_dim, shape.v_dim)
        )

    def observed_by(self, observation: Any) -> Any:
        """Raise RuntimeError: there are no queries."""
        raise RuntimeError("random keys come without queries")


def filled(model: Any, tokens: int) -> HeteroCache:
    """A cache with `tokens` tokens of random keys and values."""
    cache, shape = HeteroCache(model, tokens + 512), KVShape.of(model.config)
    with torch.no_grad(), cache.forward(cache.plan_batch([tokens], tokens), is_decode=False) as batch:
        (step,) = batch.steps
        for operator in model.hetero_kv_injection.attention_operators():
            recorded = RandomPrompt(shape, tokens, model.dtype, operator.layer_idx)
            operator.load_prefill(step.group.layers[operator.layer_idx], step, recorded)
    cache.columns = cache.columns.grown(tokens, [tokens])
    return cache


def measure(
    forward: ModelForward, cache: HeteroCache, tokens: list[int], repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Seconds of a token, of a guess after a draft's first, and of verifying so many tokens."""
    few = DraftBlocks()

    def timed(action: Callable[[], object]) -> float:
        with forward.guessing([cache]):
            began = clock()
            action()
            return clock() - began

    def verifying(count: int) -> Callable[[], float]:
        return lambda: timed(lambda: forward.verify([cache], [list(range(100, 100 + count))]))

    actions: dict[str, Callable[[], float]] = {
        ONE: lambda: timed(lambda: forward.decode([cache], [100])),
        GUESS: lambda: timed(lambda: forward.guess([cache], [100], [few])),
    }
    actions |= {str(count): verifying(count) for count in tokens}
    for action in actions.values():
        action()
    return interleaved_medians(actions, repeats)


def gain(times: dict[str, float], tokens: list[int], odds: float) -> tuple[float, int]:
    """How many times as fast the best number of guesses is, and that number."""
    found = []
    for count in tokens:
        guesses = count - 1
        expected = sum(odds**place for place in range(count))
        found.append((expected * times[ONE] / (guesses * times[GUESS] + times[str(count)]), guesses))
    return max(found)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--length", type=int, default=32000)
    parser.add_argument("--tokens", default="2,3,4,5,7,9", help="verified in one forward, with commas between")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, help="number of threads")
    parser.add_argument("--cpu_time", action="store_true", help="CPU time of the process")
    flags = parser.parse_args()
    threads = {} if flags.threads is None else {"threads_num": flags.threads}
    model = load_model(flags.model, config="dense", **threads).model
    model.hetero_kv_injection.sparse_drafts = True
    tokens = [int(each) for each in flags.tokens.split(",")]
    cache = filled(model, flags.length)
    clock = time.process_time if flags.cpu_time else time.perf_counter
    times = measure(ModelForward(model), cache, tokens, flags.repeats, clock)
    table = Table("forward", "ms", "of a token")
    for name, seconds in times.items():
        what = name if name == GUESS else f"{name} tokens, full attention"
        table.add_row(what, f"{seconds * 1000:.1f}", f"{seconds / times[ONE]:.2f}")
    Console(width=100).print(table)
    for odds in ODDS:
        best, guesses = gain(times, tokens, odds)
        print(f"right with a probability of {odds}: {best:.2f} times as fast with {guesses} guesses")


if __name__ == "__main__":
    main()
