"""An answer as it comes, in a terminal: Markdown block by block, or text whose words are whole on their lines."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol, Self

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments
from rich.text import Text

from hetero_kv.printing import printable

# A rendering is followed by this many times its own time without one, so that tokens do not wait for it.
_PAUSE, _LEAST_PAUSE_S = 20, 0.1
# Lines of the terminal that what is not finished leaves free.
_SPARED_LINES = 3
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


class AnswerView(Protocol):
    """Shows an answer; a context manager, which leaves all of it on the screen, however it ends."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def write(self, piece: str, is_thinking: bool = False) -> None:
        """Show what comes next; `is_thinking` where the model thinks, and does not answer yet."""

    def count(self, tokens: int) -> None:
        """Take note that there are so many tokens."""


def answer_view(console: Console, *, renders_markdown: bool) -> AnswerView:
    """How answers are shown on `console`."""
    if renders_markdown and console.is_terminal and not console.is_dumb_terminal:
        return MarkdownView(console)
    return WordsView(console)


class WordsView:
    """Text as it is; a word that would not fit begins a new line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._column = 0
        self._word = ""
        self._is_thinking = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flush()
        if self._column:
            self._console.print()

    def write(self, piece: str, is_thinking: bool = False) -> None:
        """Print the words that are complete."""
        if is_thinking != self._is_thinking:
            self._flush()
            self._is_thinking = is_thinking
        *words, self._word = re.split(r"(?<=\s)(?!\s)", self._word + printable(piece))
        self._print(words)

    def count(self, tokens: int) -> None:
        """Show nothing of it."""

    def _flush(self) -> None:
        self._print([self._word])
        self._word = ""

    def _print(self, words: Iterable[str]) -> None:
        shown = ""
        for word in words:
            if self._column and self._column + cell_len(word.rstrip()) > self._console.width:
                shown = shown.rstrip(" ") + "\n"
                self._column = 0
            shown += word
            line = word.rpartition("\n")[2]
            self._column = cell_len(line) + (0 if "\n" in word else self._column)
        style = "dim" if self._is_thinking else None
        self._console.print(Text(shown, style=style or ""), end="", soft_wrap=True)


class MarkdownView:
    """Finished blocks are printed for good; the last one, and how fast tokens come, are drawn anew as they grow."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._text = ""
        self._is_thinking = False
        self._has_printed = False
        self._tokens = 0
        self._first_token = self._drawn_until = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        self._print(self._text)
        self._text = ""

    def write(self, piece: str, is_thinking: bool = False) -> None:
        """Add a piece, and draw it when it is time."""
        if is_thinking != self._is_thinking:
            self._print(self._text)
            self._text, self._is_thinking = "", is_thinking
        self._text += printable(piece)
        self._draw()

    def count(self, tokens: int) -> None:
        """Take note that there are so many tokens."""
        self._tokens = tokens
        if tokens == 1:
            self._first_token = time.perf_counter()

    def _draw(self) -> None:
        began = time.perf_counter()
        if began < self._drawn_until:
            return
        if not self._live.is_started:
            self._live.start()
        finished = _last_block(self._text)
        self._print(self._text[:finished])
        self._text = self._text[finished:]
        self._live.update(_Growing(_rendered(self._text, self._is_thinking), self._speed()), refresh=True)
        now = time.perf_counter()
        self._drawn_until = now + max(_LEAST_PAUSE_S, _PAUSE * (now - began))

    def _speed(self) -> str:
        seconds = time.perf_counter() - self._first_token
        speed = f" · {(self._tokens - 1) / seconds:,.1f} tokens/s" if self._tokens > 1 and seconds > 0 else ""
        return f"{self._tokens:,} tokens{speed} · Ctrl-C stops"

    def _print(self, text: str) -> None:
        if not text.strip():
            return
        if self._has_printed:
            self._console.print()
        lines = _lines(self._console, _rendered(text, self._is_thinking))
        self._console.print(Segments([segment for line in lines for segment in (*line, Segment.line())]), end="")
        self._has_printed = True


class _Growing:
    """What is not finished: its last lines, as many as the terminal has room for, and a line about it."""

    def __init__(self, content: RenderableType, about: str) -> None:
        self._content, self._about = content, about

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = _lines(console, self._content)
        for line in lines[-max(1, console.height - _SPARED_LINES) :]:
            yield from line
            yield Segment.line()
        yield Text(self._about, style="dim", no_wrap=True, overflow="ellipsis")


def _lines(console: Console, content: RenderableType) -> list[list[Segment]]:
    """The lines of what is rendered, without the empty ones that rich puts before and behind some blocks."""
    lines = console.render_lines(content, pad=False)
    full = [number for number, line in enumerate(lines) if any(segment.text.strip() for segment in line)]
    return lines[full[0] : full[-1] + 1] if full else []


def _last_block(text: str) -> int:
    """Where the last block of a Markdown text begins, which what follows may still change."""
    starts = [token.map[0] for token in _MARKDOWN.parse(text) if token.level == 0 and token.map]
    if not starts:
        return 0
    return sum(map(len, text.splitlines(keepends=True)[: starts[-1]]))


def _rendered(text: str, is_thinking: bool) -> RenderableType:
    if is_thinking:
        return Text(text.strip("\n"), style="dim italic")
    # Links as text: as escape sequences they would show other words than where they lead.
    markdown = Markdown("", hyperlinks=False)
    markdown.parsed = _as_written(_MARKDOWN.parse(text))
    return markdown


def _as_written(tokens: list[Token]) -> list[Token]:
    """The tokens, in which line breaks stay what they are: in a model's answer they are meant."""
    for token in tokens:
        for inner in token.children or ():
            if inner.type == "softbreak":
                inner.type = "hardbreak"
    return tokens
