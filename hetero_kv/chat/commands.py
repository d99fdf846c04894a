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
from hetero_kv.chat.question import ChatQuestion
from hetero_kv.documents.reading import documents_at
from hetero_kv.errors import HeteroKVError
from hetero_kv.settings.setting import nearest_spelling

if TYPE_CHECKING:
    from hetero_kv.chat.terminal import Terminal


class ChatCommand(NamedTuple):
    """One command.

    Attributes:
        meaning: a one-line description.
        act: carries the command out, from the terminal and the text after the command's name.
        argument: the form of that text, as `/help` shows it; "" if the command takes none.
    """

    meaning: str
    act: Callable[[Terminal, str], None]
    argument: str = ""


def run_command(terminal: Terminal, line: str) -> None:
    """Carry out a line that begins with /.

    Raises HeteroKVError for an unknown command, with the nearest known one, and for what the command refuses.
    """
    words = line.split(maxsplit=1)
    name, argument = words[0], words[1].strip() if len(words) > 1 else ""
    if name not in COMMANDS:
        near = nearest_spelling(name, COMMANDS) or f"; known: {', '.join(COMMANDS)}"
        raise HeteroKVError(
            f"there is no command {name}{near}{'' if near.endswith('?') else ';'} to send text that begins with /, "
            "begin the line with a space"
        )
    command = COMMANDS[name]
    if argument and not command.argument:
        raise HeteroKVError(f"{name} takes no argument, and the line has {argument!r}; write {name} alone")
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
    terminal.console.print(context_table(terminal.session, terminal.questions, terminal.waiting))


def _system(terminal: Terminal, argument: str) -> None:
    talk = terminal.session.conversation
    if not argument:
        terminal.note("the model's own system message" if talk.system is None else f"system message: {talk.system}")
        return
    has_turns = talk.context_tokens > 0
    talk.restart(_unquoted(argument) or None)
    terminal.forget()
    terminal.note(f"the system message is set{'; the conversation restarts' if has_turns else ''}")


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
        raise HeteroKVError("no document waits for a question; add one: /file PATH")
    terminal.note_waiting()


def _drop(terminal: Terminal, _: str) -> None:
    terminal.waiting = ChatQuestion()
    terminal.note("no document waits for the next question")


def _undo(terminal: Terminal, _: str) -> None:
    terminal.session.conversation.undo()
    question = terminal.take_back()
    shown = f": {question.in_short}" if question else ""
    terminal.note(f"the last question and its answer are taken back{shown}")
    terminal.note_waiting()


def _retry(terminal: Terminal, _: str) -> None:
    question = terminal.unanswered
    if question is None:
        if not terminal.questions:
            raise HeteroKVError("there is no question to repeat; ask one")
        terminal.session.conversation.undo()
        question = terminal.take_back()
    if question is not None:
        terminal.ask(question)


def _reset(terminal: Terminal, _: str) -> None:
    terminal.session.conversation.reset()
    terminal.forget()
    terminal.note("the conversation is forgotten")
    terminal.note_waiting()


def _quit(terminal: Terminal, _: str) -> None:
    terminal.is_over = True


COMMANDS: dict[str, ChatCommand] = {
    "/help": ChatCommand("show this list", _help),
    "/file": ChatCommand(
        "add documents to the next question: paths or patterns; alone, list the waiting documents", _file, "PATH"
    ),
    "/drop": ChatCommand("remove the waiting documents", _drop),
    "/retry": ChatCommand("repeat the last question, and replace its answer", _retry),
    "/undo": ChatCommand("take back the last question and its answer", _undo),
    "/system": ChatCommand('show or set the system message ("" for the model\'s own), and restart', _system, "[TEXT]"),
    "/save": ChatCommand("save the conversation under a name", context_commands.save, "NAME"),
    "/load": ChatCommand("replace this conversation by a saved one", context_commands.load, "NAME"),
    "/contexts": ChatCommand("list the saved conversations", context_commands.show),
    "/context": ChatCommand("show the tokens of each turn, and the free ones", _context),
    "/stats": ChatCommand("show the last answer's statistics, and the settings in force", _stats),
    "/reset": ChatCommand("forget the conversation", _reset),
    "/quit": ChatCommand("leave (also Ctrl-D)", _quit),
}

_KEYS = {
    '"""': "begin and end a text of several lines; Alt-Enter also begins a line",
    "Up, Down": "recall earlier lines, also of earlier chats; Ctrl-R searches them",
    "Tab": "complete a command, or the path after /file",
    "Ctrl-C": "stop the answer; at the prompt, clear the line",
}
