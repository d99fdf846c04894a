"""Answers in a terminal."""

from __future__ import annotations

import io
import re
from itertools import pairwise

import pytest

from hetero_kv.chat.answer_view import MarkdownView, WordsView, answer_view
from hetero_kv.printing import console

ANSWER = """# Budget

It was *cut*.
By <b>half</b>, see [here](https://example.org).

| year | sum |
| ---- | --- |
| 2026 | 10  |

3. third
4. fourth

```python
def cut(): ...
```
"""


def terminal(monkeypatch: pytest.MonkeyPatch, width: int = 60):
    """A console that takes itself for a terminal, and what it was sent."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", "12")
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = console()
    shown.file = io.StringIO()
    return shown


def screen(written: str) -> list[str]:
    """The lines of the screen, after cursor movements and erasures, without colours."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\n|\r|[^\x1b\n\r]+", written):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith(("\x1b", "\r")):
            lines[row] += part
    return [line.rstrip() for line in lines]


def test_markdown_is_rendered_block_by_block_and_nothing_of_it_is_lost(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hetero_kv.chat.answer_view._LEAST_PAUSE_S", 0)
    monkeypatch.setattr("hetero_kv.chat.answer_view._PAUSE", 0)
    shown = terminal(monkeypatch)
    with answer_view(shown, renders_markdown=True) as view:
        assert isinstance(view, MarkdownView)
        for number, piece in enumerate(re.findall(r"\s*\S+", ANSWER), 1):
            view.count(number)
            view.write(piece)
    lines = screen(shown.file.getvalue())
    assert lines[0]
    assert not any(line == after == "" for line, after in pairwise(lines))
    said = "\n".join(line for line in lines if line)
    assert said.count("Budget") == 1
    assert "It was cut.\nBy <b>half</b>, see here (https://example.org)." in said
    assert re.search(r"2026 +10", said)
    assert re.search(r"3 third\n *4 fourth", said)
    assert "def cut(): ..." in said
    assert "tokens" not in said
    assert "tokens/s · Ctrl-C stops" in shown.file.getvalue()


@pytest.mark.parametrize("width", [30, 90])
def test_a_terminal_that_is_resized_shows_the_rest_in_its_width(monkeypatch: pytest.MonkeyPatch, width: int):
    monkeypatch.setattr("hetero_kv.chat.answer_view._LEAST_PAUSE_S", 0)
    monkeypatch.setattr("hetero_kv.chat.answer_view._PAUSE", 0)
    shown = terminal(monkeypatch)
    words = [f"word{number}" for number in range(60)]
    with answer_view(shown, renders_markdown=True) as view:
        for number, word in enumerate(words):
            if number == 30:
                shown.width = width
            view.write(f" {word}" if number % 20 else f"\n\n{word}")
    lines = screen(shown.file.getvalue())
    assert " ".join(lines).split() == words
    # The last paragraph began after the change.
    assert width - 8 < max(map(len, lines[-4:])) <= width


def test_a_block_that_is_longer_than_the_terminal_is_whole_in_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hetero_kv.chat.answer_view._LEAST_PAUSE_S", 0)
    shown = terminal(monkeypatch)
    with answer_view(shown, renders_markdown=True) as view:
        for number in range(40):
            view.write(f"- item {number}\n")
    said = screen(shown.file.getvalue())
    assert [line.split()[-1] for line in said if "item" in line] == [str(number) for number in range(40)]


def test_an_answer_cannot_command_the_terminal(monkeypatch: pytest.MonkeyPatch):
    for renders in (True, False):
        shown = terminal(monkeypatch)
        with answer_view(shown, renders_markdown=renders) as view:
            view.write("[\x1b]0;title\x07](http://a\x9bb) \u202e`\x1b[2J`")
        sent = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.file.getvalue().replace("\x1b[2J", "CLEARED"))
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*sent}
        assert "CLEARED" not in sent


def test_words_are_whole_on_their_lines(monkeypatch: pytest.MonkeyPatch):
    shown = terminal(monkeypatch, width=20)
    with answer_view(shown, renders_markdown=False) as view:
        assert isinstance(view, WordsView)
        for piece in ("one two thr", "ee four five", " six\n", "\n  seven eight nine ", "日本語日本語日 ten\n"):
            view.write(piece)
    lines = screen(shown.file.getvalue())
    assert lines == ["one two three four", "five six", "", "  seven eight nine", "日本語日本語日 ten", ""]


def test_thinking_is_dimmed(monkeypatch: pytest.MonkeyPatch):
    for renders in (True, False):
        shown = terminal(monkeypatch)
        with answer_view(shown, renders_markdown=renders) as view:
            view.write("Hm, *let me see* ", is_thinking=True)
            view.write("It was cut.")
        assert re.search(r"\x1b\[2(;3)?mHm, \*let me see\*", shown.file.getvalue())
        assert not re.search(r"\x1b\[2(;3)?mIt", shown.file.getvalue())
        assert "It was cut." in "".join(screen(shown.file.getvalue()))


def test_where_there_is_no_terminal_text_is_as_it_is(monkeypatch: pytest.MonkeyPatch):
    assert isinstance(answer_view(terminal(monkeypatch), renders_markdown=True), MarkdownView)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(answer_view(console(), renders_markdown=True), WordsView)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("FORCE_COLOR")
    assert isinstance(answer_view(console(), renders_markdown=True), WordsView)
