"""The chat's displays other than answers: banner, statistics, and the contents of the context."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from hetero_kv.chat.answer import ChatAnswer
from hetero_kv.chat.conversation import Conversation
from hetero_kv.chat.question import ChatQuestion
from hetero_kv.chat.session import ChatSession
from hetero_kv.rules.registered import layer_statistics

# Characters per token of the context; a longer document cannot fit, and counting its tokens would waste time.
_COUNTED_PER_TOKEN = 32
#: Turns that `/context` shows one by one.
_MOST_TURNS = 10


def banner(session: ChatSession) -> RenderableType:
    """Model, mode, capacity, and the store's size per token."""
    model = session.loaded.model
    title = Text.assemble(("hetero-kv", "bold cyan"), "  ", (session.loaded.name, "bold"))
    where = f"{session.options.mode}: {session.rules_name or 'the untouched model'}"
    dtype = str(model.dtype).removeprefix("torch.")
    facts = [f"{where}  ·  {dtype} on {model.device}, {session.engine.resolved_threads()} CPU threads"]
    capacity = f"capacity {session.capacity:,} tokens"
    if session.injection is not None:
        capacity += (
            f"  ·  the store takes {decimal(round(session.injection.bytes_per_token() * 1000))} per 1,000 tokens"
        )
    facts.append(capacity)
    if session.options.context is not None:
        facts.append(f"continues {loaded_in_short(session.options.context, session.conversation)}")
    facts.append('/help lists the commands, """ begins and ends several lines, Ctrl-D leaves')
    return Group(title, *(Text(fact, style="dim") for fact in facts))


def loaded_in_short(name: str, talk: Conversation) -> str:
    """The size of a saved conversation that was loaded."""
    return f"{name}: {talk.context_tokens:,} tokens, {len(talk.turns)} turn{'s' * (len(talk.turns) != 1)}"


def ending(answer: ChatAnswer, session: ChatSession) -> str | None:
    """Why an answer is incomplete; None for a complete one."""
    return {
        "end": None,
        "stop_text": None,
        "stopped": "stopped",
        "max_new_tokens": f"cut off at --max_new_tokens {session.options.answer.max_new_tokens}",
        "full": f"cut off: the context of {session.capacity:,} tokens is full (--max_seq_len); /reset empties it",
    }[answer.finish_reason]


def statistics_line(answer: ChatAnswer) -> str:
    """One line: tokens, time to first token, prefill and decode speed."""
    statistics = answer.statistics
    if not statistics.generated_tokens:
        return f"after {statistics.prefill_s:.2f} s of prefill; the conversation is unchanged"
    parts = [
        f"{statistics.generated_tokens:,} tokens, first after {statistics.time_to_first_token_s:.2f} s",
        f"prefill {statistics.prompt_tokens:,} tokens, {statistics.prefill_tokens_per_s:,.0f} tokens/s",
    ]
    if statistics.decode_tokens_per_s is not None:
        parts.append(f"decode {statistics.decode_tokens_per_s:,.1f} tokens/s")
    return " · ".join(parts)


def statistics_table(session: ChatSession, answer: ChatAnswer | None) -> RenderableType:
    """Statistics of the last answer, how full the context is, and the settings in force."""
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim")
    if answer is not None:
        statistics = answer.statistics
        table.add_row("prompt", f"{statistics.prompt_tokens:,} tokens")
        table.add_row("answer", f"{statistics.generated_tokens:,} tokens ({answer.finish_reason})")
        if statistics.generated_tokens:
            table.add_row("time to first token", f"{statistics.time_to_first_token_s:.2f} s")
            table.add_row("prefill", f"{statistics.prefill_s:.2f} s, {statistics.prefill_tokens_per_s:,.1f} tokens/s")
        if statistics.decode_tokens_per_s is not None:
            table.add_row("decode", f"{statistics.decode_s:.2f} s, {statistics.decode_tokens_per_s:,.1f} tokens/s")
        if statistics.drafted_tokens:
            table.add_row(
                "guessed", f"{statistics.drafted_tokens:,} tokens, {statistics.accepted_tokens:,} of them right"
            )
        table.add_row("peak DRAM", decimal(statistics.peak_dram_bytes))
        if statistics.peak_vram_bytes is not None:
            table.add_row("peak VRAM", decimal(statistics.peak_vram_bytes))
        table.add_row("keys and values", decimal(statistics.kv_bytes))
        titles = {name: statistic.title for name, statistic in layer_statistics().items()}
        for name, layers in statistics.of_layers.items():
            table.add_row(titles.get(name, name), _over_layers([value for value in layers if value is not None]))
    table.add_row("weights", f"{decimal(session.weights.size)}, {session.weights.in_short}")
    table.add_row("context", f"{session.conversation.context_tokens:,} of {session.capacity:,} tokens")
    for summary in session.operators():
        table.add_row(summary.operator, Text(layer_ranges(summary.layers) + _settings_text(summary.settings)))
    return table


def context_table(session: ChatSession, questions: Sequence[ChatQuestion], waiting: ChatQuestion) -> RenderableType:
    """The contents of the context, turn by turn, the waiting documents, and the free tokens.

    Args:
        questions: the conversation's questions, at least the latest ones.
        waiting: the documents that go before the next question.
    """
    talk, capacity = session.conversation, session.capacity
    table = Table.grid(padding=(0, 3))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_row(Text("turn", style="dim"), Text("tokens", style="dim"), Text("of the context", style="dim"))

    def row(what: str, tokens: int) -> None:
        table.add_row(Text(what, no_wrap=True, overflow="ellipsis"), f"{tokens:,}", f"{tokens / capacity:.1%}")

    shown = talk.turns[-_MOST_TURNS:]
    if earlier := talk.turns[: -len(shown)]:
        row(f"1-{len(earlier)}", sum(turn.question + turn.answer for turn in earlier))
    for back in range(len(shown), 0, -1):
        prompt = f" {questions[-back].in_short}" if back <= len(questions) else ""
        row(f"{len(talk.turns) - back + 1}{prompt}", shown[-back].question)
        row("    its answer", shown[-back].answer)
    row("all", talk.context_tokens)
    row("left", capacity - talk.context_tokens)
    for document in waiting.documents:
        what = f"waits: {document.name}"
        if document.characters > _COUNTED_PER_TOKEN * capacity:
            table.add_row(what, "more than fit", "")
        else:
            row(what, talk.text_tokens(document.text))
    return table


def _over_layers(values: list[float | int]) -> str:
    """A summary of the layers' values: "0.953 on average, 0.912 to 0.998 by layer"."""
    mean, least, most = (f"{value:,.3f}".removesuffix(".000") for value in (fmean(values), min(values), max(values)))
    return least if least == most else f"{mean} on average, {least} to {most} by layer"


def layer_ranges(layers: list[int | str]) -> str:
    """A summary of layers: [0, 1, 2, 5] is "layers 0-2, 5"; paths of modules stay as they are."""
    numbers = [layer for layer in layers if isinstance(layer, int)]
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    ranges = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    numbered = [f"layer{'s' if len(numbers) > 1 else ''} {', '.join(ranges)}"] if numbers else []
    return ", ".join([*numbered, *(layer for layer in layers if isinstance(layer, str))])


def _settings_text(settings: dict[str, Any] | None) -> str:
    return "".join(f"\n{name} {value}" for name, value in (settings or {}).items())
