"""The interactive chat."""

from __future__ import annotations

import re
import sys
from contextlib import suppress

from rich.console import Console
from rich.text import Text

from hetero_kv.chat.answer import Answer
from hetero_kv.chat.answering import answer_to
from hetero_kv.chat.display import COMMANDS, banner, ending, help_table, statistics_line, statistics_table
from hetero_kv.chat.question import Question
from hetero_kv.chat.session import ChatSession
from hetero_kv.cli import print_error
from hetero_kv.errors import HeteroKVError
from hetero_kv.printing import console, printable
from hetero_kv.settings.setting import nearest_spelling

_QUOTES = '"""'
# A path at the beginning of a question ("/etc/hosts says …") is not a command.
_COMMAND = re.compile(r"/[A-Za-z]+\s*")


class Terminal:
    """Reads questions line by line, answers them, and carries out the commands.

    Args:
        session: what answers.
        question: what was given on the command line. A prompt is sent at once; a document alone waits for the first
            question, and Enter sends it as it is.
    """

    def __init__(self, session: ChatSession, question: Question) -> None:
        self.session = session
        self.console = console()
        self.last: Answer | None = None
        self._first = question
        self._document_waits = question.document is not None
        _edit_lines(self.console)

    def run(self) -> int:
        """Chat until the user leaves; returns the exit status."""
        self.console.print(banner(self.session))
        if self._first.prompt is not None:
            self._ask(self._first)
        elif self._document_waits:
            self._note(
                f"the document has {len(self._first.text):,} characters; ask about it, or press Enter to send it"
            )
        while True:
            self.console.print()
            try:
                text = self._read()
            except KeyboardInterrupt:
                self.console.print()
                self._note("/quit or Ctrl-D leaves")
                continue
            except EOFError:
                self.console.print()
                return 0
            except UnicodeDecodeError as error:
                print_error(
                    HeteroKVError(
                        f"the line is not text in {error.encoding} (byte {error.start} is "
                        f"0x{error.object[error.start]:02x}); type it again, or set the terminal to UTF-8"
                    )
                )
                continue
            if _COMMAND.fullmatch(text):
                if not self._obey(text.strip()):
                    return 0
            elif self._document_waits:
                self._ask(self._first.with_prompt(text.strip()))
            elif text.strip():
                self._ask(Question(prompt=text))

    def _read(self) -> str:
        text = input(self._prompt(">>> "))
        if not text.lstrip().startswith(_QUOTES):
            return text
        text = text.lstrip().removeprefix(_QUOTES)
        while not text.rstrip().endswith(_QUOTES):
            text += "\n" + input(self._prompt("... "))
        return text.rstrip().removesuffix(_QUOTES).strip("\n")

    def _prompt(self, sign: str) -> str:
        # Readline must know which characters take no room on the line.
        return f"\x01\x1b[1;36m\x02{sign}\x01\x1b[0m\x02" if self.console.color_system else sign

    def _obey(self, command: str) -> bool:
        """Carry out a command; False when the chat is over."""
        match command:
            case "/quit":
                return False
            case "/help":
                self.console.print(help_table())
            case "/stats":
                self.console.print(statistics_table(self.session, self.last))
            case "/reset":
                self.session.conversation.reset()
                self.last = None
                self._document_waits = self._first.document is not None
                again = "; the document goes before the next question again" if self._document_waits else ""
                self._note(f"the conversation is forgotten{again}")
            case _:
                near = nearest_spelling(command, COMMANDS) or f"; known: {', '.join(COMMANDS)}"
                print_error(HeteroKVError(f"there is no command {command}{near}"))
        return True

    def _ask(self, question: Question) -> None:
        before = self.session.conversation.context_tokens
        try:
            self.last = answer_to(self.session, question, on_text=_write)
        except HeteroKVError as error:
            print_error(error)
            return
        except KeyboardInterrupt:
            self.console.print()
            is_kept = self.session.conversation.context_tokens > before
            self._note(
                f"stopped; the conversation {'has this answer' if is_kept else 'is as it was before this question'}"
            )
            return
        finally:
            # A document that did not get into the conversation goes before the next question.
            if self.session.conversation.context_tokens > before:
                self._document_waits = False
        self.console.print()
        reason = ending(self.last, self.session)
        if reason is not None:
            self.console.print(reason, style="yellow", markup=False, highlight=False)
        self._note(statistics_line(self.last))

    def _note(self, text: str) -> None:
        self.console.print(Text(text, style="dim"))


def _write(piece: str) -> None:
    sys.stdout.write(printable(piece))
    sys.stdout.flush()


def _edit_lines(console: Console) -> None:
    """Line editing for `input`, where the system has it; it also lifts the terminal's limit of 4,095 bytes a line."""
    with suppress(ImportError):
        import readline

        # A paste of many lines arrives as one text, not as one question per line.
        readline.parse_and_bind("set enable-bracketed-paste on")
        readline.set_completer_delims("")
        readline.set_completer(_completion)
        readline.parse_and_bind("tab: complete")


def _completion(text: str, state: int) -> str | None:
    matching = [command for command in COMMANDS if text and command.startswith(text)]
    return matching[state] if state < len(matching) else None
