"""Shows an answer in a terminal as it grows: Markdown block by block, or text with words unbroken at line ends."""

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

# A rendering is followed by a pause of this many times its duration, so that tokens do not wait for it.
_PAUSE, _LEAST_PAUSE_S = 20, 0.1
# Lines of the terminal that an unfinished block leaves free.
_SPARED_LINES = 3
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


class AnswerView(Protocol):
    """Shows an answer; a context manager that leaves all of it on the screen, however it ends."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def write(self, piece: str, is_thinking: bool = False) -> None:
        """Show the next piece; `is_thinking` marks a model's thought, which comes before the answer."""

    def count(self, tokens: int) -> None:
        """Set the number of tokens so far."""


def answer_view(console: Console, *, renders_markdown: bool) -> AnswerView:
    """The view for answers on `console`."""
    if renders_markdown and console.is_terminal and not console.is_dumb_terminal:
        return MarkdownView(console)
    return WordsView(console)


class WordsView:
    """Shows plain text; a word that would not fit begins a new line."""

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
        """Print the complete words."""
        if is_thinking != self._is_thinking:
            self._flush()
            self._is_thinking = is_thinking
        *words, self._word = re.split(r"(?<=\s)(?!\s)", self._word + printable(piece))
        self._print(words)

    def count(self, tokens: int) -> None:
        """Ignore the count: this view shows none."""

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
    """Prints finished blocks for good, and redraws the last block and the token rate as they grow."""

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
        """Add a piece, and redraw if the pause is over."""
        if is_thinking != self._is_thinking:
            self._print(self._text)
            self._text, self._is_thinking = "", is_thinking
        self._text += printable(piece)
        self._draw()

    def count(self, tokens: int) -> None:
        """Set the number of tokens so far."""
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
    """An unfinished block: the last lines that fit into the terminal, and a status line."""

    def __init__(self, content: RenderableType, about: str) -> None:
        self._content, self._about = content, about

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = _lines(console, self._content)
        for line in lines[-max(1, console.height - _SPARED_LINES) :]:
            yield from line
            yield Segment.line()
        yield Text(self._about, style="dim", no_wrap=True, overflow="ellipsis")


def _lines(console: Console, content: RenderableType) -> list[list[Segment]]:
    """The lines of rendered content, without the empty ones that rich puts before and after some blocks."""
    lines = console.render_lines(content, pad=False)
    full = [number for number, line in enumerate(lines) if any(segment.text.strip() for segment in line)]
    return lines[full[0] : full[-1] + 1] if full else []


def _last_block(text: str) -> int:
    """Start of the last block of a Markdown text; later text may still change that block."""
    starts = [token.map[0] for token in _MARKDOWN.parse(text) if token.level == 0 and token.map]
    if not starts:
        return 0
    return sum(map(len, text.splitlines(keepends=True)[: starts[-1]]))


def _rendered(text: str, is_thinking: bool) -> RenderableType:
    if is_thinking:
        return Text(text.strip("\n"), style="dim italic")
    # Show links as text: as escape sequences they could hide their target.
    markdown = Markdown("", hyperlinks=False)
    markdown.parsed = _as_written(_MARKDOWN.parse(text))
    return markdown


def _as_written(tokens: list[Token]) -> list[Token]:
    """The tokens with line breaks preserved: a model means them."""
    for token in tokens:
        for inner in token.children or ():
            if inner.type == "softbreak":
                inner.type = "hardbreak"
    return tokens
