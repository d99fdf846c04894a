"""The goals of rows, and whether they are met."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu_checks.long_prompt import LLAMA_8B
from benchmarks.gpu_speed.full_attention import FULL_ATTENTION
from benchmarks.gpu_speed.step_parts import WAITING
from benchmarks.gpu_speed.subject import UNTOUCHED, SpeedRow

K = 1024
#: Follows the recipe's name where the GPU attends to the blocks, too.
RESIDENT = ", attend_on: gpu"
#: Name and tokens of a row -> the most milliseconds per token, and bytes on the GPU, with all layers.
GOALS = {
    (f"quest{RESIDENT}", 128 * K): (12.5, 24e9),
    (f"adaptive{RESIDENT}", 128 * K): (12.5, 24e9),
    (f"adaptive_lean{RESIDENT}", K * K): (20.0, 24e9),
}
#: The most milliseconds per token that the host computes for these rows, waiting aside, with all layers.
HOST_GOAL = 1.0
#: Name and tokens of a row -> the most of the untouched model's prefill time, which is by flash attention.
PREFILL_GOALS = {("ktransformers", 128 * K): 1.2, ("minference", 128 * K): 0.5}
#: Rows and tokens of a batch, and the least of full attention's best throughput at its largest batch (ShadowKV's claim,
#: arXiv:2410.21465).
BATCH, BATCH_TOKENS, BATCH_GOAL = 16, 128 * K, 3.04
_LAYERS: int = LLAMA_8B["num_hidden_layers"]


def verdicts(rows: list[SpeedRow]) -> list[str]:
    """A line for each row that has a goal."""
    return [*_of_tokens(rows), *_of_prompts(rows), *_of_batches(rows)]


def _of_tokens(rows: list[SpeedRow]) -> Iterator[str]:
    for row in rows:
        if (goal := GOALS.get((row.name, row.tokens))) is None or row.batch > 1:
            continue
        most, memory = goal
        used = row.gpu_bytes or 0
        line = (
            f"goal: {row.name}, {row.tokens:,} tokens: at most {most} ms per token and {memory / 1e9:.0f} GB; "
            f"{row.milliseconds:.2f} ms and {used / 1e9:.1f} GB"
        )
        yield line + _verdict(row, (row.milliseconds, most), (used, memory))
        if WAITING in row.parts:
            own = sum(row.parts.values()) - row.parts[WAITING]
            yield (
                f"goal: {row.name}, {row.tokens:,} tokens: the host computes at most {HOST_GOAL} ms per token; "
                f"{own:.2f} ms{_verdict(row, (own, HOST_GOAL))}"
            )


def _verdict(row: SpeedRow, *bounded: tuple[float, float]) -> str:
    """Whether numbers are within their bounds, of a row that may have fewer layers than the goals' model."""
    if any(number > most for number, most in bounded):
        return ": missed"
    # What is no layer counts as often as the layers, so that this is the most that all layers can take.
    if all(number * _LAYERS / row.layers <= most for number, most in bounded):
        return ": met"
    return f" in {row.layers} of {_LAYERS} layers; no verdict, because the others were not measured"


def _of_prompts(rows: list[SpeedRow]) -> Iterator[str]:
    untouched = {(row.tokens, row.layers, row.batch): row.prefill for row in rows if row.name == UNTOUCHED}
    for row in rows:
        most, dense = PREFILL_GOALS.get((row.name, row.tokens)), untouched.get((row.tokens, row.layers, row.batch))
        if most is None or not row.prefill:
            continue
        goal = f"goal: {row.name}, {row.tokens:,} tokens: at most {most} times the untouched model's prefill time"
        if not dense:
            yield f"{goal}; no verdict, because that was not measured"
            continue
        share = dense / row.prefill
        yield f"{goal}; {share:.2f} times: {'met' if share <= most else 'missed'}"


def _of_batches(rows: list[SpeedRow]) -> Iterator[str]:
    full = [row for row in rows if row.name in FULL_ATTENTION and row.tokens == BATCH_TOKENS]
    for row in rows:
        if (row.batch, row.tokens) != (BATCH, BATCH_TOKENS) or row.name in (*FULL_ATTENTION, UNTOUCHED):
            continue
        goal = (
            f"goal: {row.name}, {BATCH} requests of {row.tokens:,} tokens: at least {BATCH_GOAL} times full "
            "attention's best throughput"
        )
        if not full:
            yield f"{goal}; no verdict, because that was not measured"
            continue
        best = max(full, key=lambda row: row.tokens_per_s)
        times = row.tokens_per_s / best.tokens_per_s
        yield (
            f"{goal}, {best.tokens_per_s:.1f} tokens/s ({best.name}, {best.batch} of them at once); "
            f"{row.tokens_per_s:.1f} tokens/s, {times:.2f} times: {'met' if times >= BATCH_GOAL else 'missed'}"
        )
