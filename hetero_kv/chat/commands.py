"""The commands of the chat, lines that begin with /, in one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hetero_kv.chat import context_commands
from hetero_kv.chat.display import context_table, statistics_table
from hetero_kv.chat.documents import documents_at
from hetero_kv.chat.question import Question
from hetero_kv.errors import HeteroKVError
from hetero_kv.settings.setting import nearest_spelling

if TYPE_CHECKING:
    from hetero_kv.chat.terminal import Terminal


class Command(NamedTuple):
    """One command.

    Attributes:
        meaning: a one-line description.
        act: carries the command out, from the terminal and the text after the command's name.
        argument: the form of that text, as `/help` shows it; "" if the command takes none.
    """

    meaning: str
    act: Callable[[Terminal, str], None]
    argument: str = ""


def obey(terminal: Terminal, line: str) -> None:
    """Carry out a line that begins with /.

    Raises HeteroKVError for an unknown command, with the nearest known one, and for what the command refuses.
    """
    words = line.split(maxsplit=1)
    name, argument = words[0], words[1].strip() if len(words) > 1 else ""
    if name not in COMMANDS:
        near = nearest_spelling(name, COMMANDS) or f"; known: {', '.join(COMMANDS)}"
        raise HeteroKVError(
            f"there is no command {name}{near}{'' if near.endswith('?') else ';'} begin the line with a space to ask "
            "what begins with /"
        )
    command = COMMANDS[name]
    if argument and not command.argument:
        raise HeteroKVError(f"{name} takes nothing behind it, and there is {argument!r}; write {name} alone")
    command.act(terminal, argument)


def help_table() -> RenderableType:
    """The commands and keys, as a table."""
    table = Table.grid(padding=(0, 3))
    for name, command in COMMANDS.items():
        table.add_row(Text(f"{name} {command.argument}".rstrip(), style="cyan"), command.meaning)
    for key, meaning in _KEYS.items():
        table.add_row(Text(key, style="cyan"), meaning)
    return table


def _help(terminal: Terminal, _: str) -> None:
    terminal.console.print(help_table())


def _stats(terminal: Terminal, _: str) -> None:
    terminal.console.print(statistics_table(terminal.session, terminal.last))


def _context(terminal: Terminal, _: str) -> None:
    terminal.console.print(context_table(terminal.session, terminal.asked, terminal.waiting))


def _system(terminal: Terminal, argument: str) -> None:
    talk = terminal.session.conversation
    if not argument:
        terminal.note("the model's own system message" if talk.system is None else f"system message: {talk.system}")
        return
    had_said = talk.context_tokens > 0
    talk.begin_anew(_unquoted(argument) or None)
    terminal.forget()
    terminal.note(f"the system message is set{'; the conversation begins anew' if had_said else ''}")


def _unquoted(text: str) -> str:
    """The text without one pair of quotation marks around all of it, as in a shell; other marks are part of it."""
    for mark in ('"', "'"):
        if len(text) > 1 and text[0] == text[-1] == mark and mark not in text[1:-1]:
            return text[1:-1].strip()
    return text


def _file(terminal: Terminal, argument: str) -> None:
    if argument:
        added = documents_at(argument)
        terminal.waiting = replace(terminal.waiting, documents=(*terminal.waiting.documents, *added))
    if not terminal.waiting.documents:
        raise HeteroKVError("no file waits for a question; add one: /file PATH")
    terminal.note_waiting()


def _drop(terminal: Terminal, _: str) -> None:
    terminal.waiting = Question()
    terminal.note("no file waits for the next question")


def _undo(terminal: Terminal, _: str) -> None:
    terminal.session.conversation.undo()
    question = terminal.taken_back()
    said = f": {question.in_short}" if question else ""
    terminal.note(f"the last question and its answer are taken back{said}")
    terminal.note_waiting()


def _retry(terminal: Terminal, _: str) -> None:
    question = terminal.unanswered
    if question is None:
        if not terminal.asked:
            raise HeteroKVError("there is no question to ask again; ask one")
        terminal.session.conversation.undo()
        question = terminal.taken_back()
    if question is not None:
        terminal.ask(question)


def _reset(terminal: Terminal, _: str) -> None:
    terminal.session.conversation.reset()
    terminal.forget()
    terminal.note("the conversation is forgotten")
    terminal.note_waiting()


def _quit(terminal: Terminal, _: str) -> None:
    terminal.is_over = True


COMMANDS: dict[str, Command] = {
    "/help": Command("this list", _help),
    "/file": Command("add documents to the next question: paths, patterns; alone, show those that wait", _file, "PATH"),
    "/drop": Command("let no document wait for the next question", _drop),
    "/retry": Command("ask the last question once more, in place of its answer", _retry),
    "/undo": Command("take the last question and its answer back", _undo),
    "/system": Command('show or set the system message ("" for the model\'s own), and begin anew', _system, "[TEXT]"),
    "/save": Command("save the conversation under a name", context_commands.save, "NAME"),
    "/load": Command("go on from a saved conversation, in place of this one", context_commands.load, "NAME"),
    "/contexts": Command("the saved conversations", context_commands.show),
    "/context": Command("what fills the context, and what is left", _context),
    "/stats": Command("what the last answer cost, and the settings in force", _stats),
    "/reset": Command("forget the conversation and start anew", _reset),
    "/quit": Command("leave (Ctrl-D does too)", _quit),
}

_KEYS = {
    '"""': "begin and end a text of several lines; Alt-Enter begins a line too",
    "Up, Down": "what was typed before, in earlier chats too; Ctrl-R searches it",
    "Tab": "complete a command, or the path behind /file",
    "Ctrl-C": "stop the answer; at the prompt, drop the line",
}
