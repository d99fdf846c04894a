"""The input line for questions: editing, pastes, history, completion."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.styles import Style

from hetero_kv.chat.line_history import LineHistory
from hetero_kv.chat.pastes import Pastes, ShownLine

QUOTES = '"""'
_STYLE = Style.from_dict({"sign": "bold ansicyan", "paste": "reverse"})


class Typed(NamedTuple):
    """Typed text; `is_command` if it begins with / and is neither one paste nor in quotes."""

    text: str
    is_command: bool


class LineEditor:
    """Reads typed text in a terminal.

    Enter ends it; Alt-Enter, or Enter within three quotation marks, begins a new line. A long paste is shown by its
    size. Up and down browse earlier entries, also of earlier chats.

    Args:
        history: the history's file; None to keep entries only until the chat ends.
        commands: the names that Tab completes; after one of `takes_paths`, it completes paths.
    """

    def __init__(self, history: Path | None, commands: Iterable[str], takes_paths: Iterable[str] = ()) -> None:
        self._pastes = Pastes()
        self._session: PromptSession[str] = PromptSession(
            [("class:sign", ">>> ")],
            prompt_continuation=lambda width, row, is_wrapped: "" if is_wrapped else [("class:sign", "... ")],
            style=_STYLE,
            multiline=True,
            key_bindings=_bindings(self._pastes),
            input_processors=[ShownLine(self._pastes)],
            history=LineHistory(history, self._pastes),
            completer=_Words(list(commands), tuple(takes_paths)),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            enable_suspend=True,
            output=_Output.from_pty(sys.stdout),
        )

    def read(self) -> Typed:
        """The next text that the user types.

        Raises:
            KeyboardInterrupt: Ctrl-C, which drops the line.
            EOFError: Ctrl-D on an empty line, or a closed terminal.
        """
        line = self._session.prompt()
        if is_quoted(line):
            text = self._pastes.unfolded(line.strip().removeprefix(QUOTES).removesuffix(QUOTES))
            return Typed(text.strip("\n"), False)
        text = self._pastes.unfolded(line)
        return Typed(text[1:] if text.startswith(" /") else text, line.startswith("/"))


def is_quoted(line: str) -> bool:
    """Whether the line begins with three quotation marks."""
    return line.lstrip().startswith(QUOTES)


def _is_open(line: str) -> bool:
    """Whether three quotation marks are not closed yet."""
    return is_quoted(line) and not line.strip().removeprefix(QUOTES).endswith(QUOTES)


def _bindings(pastes: Pastes) -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def end(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if _is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add(Keys.BracketedPaste)
    def paste(event: KeyPressEvent) -> None:
        text = event.data.replace("\r\n", "\n").replace("\r", "\n")
        event.current_buffer.insert_text(pastes.folded(text))

    return bindings


class _Words(Completer):
    """Completes commands at the line's beginning, and paths after commands that take them."""

    def __init__(self, commands: list[str], takes_paths: tuple[str, ...]) -> None:
        self._commands, self._takes_paths = commands, takes_paths
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        typed = document.text_before_cursor
        name, behind, argument = typed.partition(" ")
        if behind and name in self._takes_paths:
            yield from self._paths.get_completions(Document(argument), complete_event)
        elif typed.startswith("/") and not behind:
            yield from (Completion(each, -len(typed)) for each in self._commands if each.startswith(typed))


class _Output(Vt100_Output):
    """Never queries the cursor position: some terminals do not answer, others mix the answer into the input."""

    responds_to_cpr = False
