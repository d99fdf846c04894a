"""The interactive chat."""

from __future__ import annotations

from functools import partial

from rich.text import Text

from hetero_kv.chat.answer import ChatAnswer
from hetero_kv.chat.answer_view import answer_view
from hetero_kv.chat.answering import answer_to
from hetero_kv.chat.commands import COMMANDS, run_command
from hetero_kv.chat.display import banner, ending, statistics_line
from hetero_kv.chat.interrupt import Terminated
from hetero_kv.chat.keyboard import keep_typeahead
from hetero_kv.chat.line_editor import LineEditor, Typed
from hetero_kv.chat.question import ChatQuestion
from hetero_kv.chat.session import ChatSession
from hetero_kv.cli import print_error
from hetero_kv.errors import HeteroKVError
from hetero_kv.printing import console
from hetero_kv.rules.settings_file import settings_path


class Terminal:
    """Reads questions line by line, answers them, and carries out the commands.

    Args:
        session: answers the questions.
        question: the question of the command line. A prompt is sent at once; documents alone wait for the first
            question, and Enter sends them without one.

    Attributes:
        last: the last answer.
        questions: the conversation's questions.
        waiting: documents that go before the next question.
        unanswered: the last question, if an error or Ctrl-C kept it out of the conversation.
        is_over: whether the user has left.
    """

    def __init__(self, session: ChatSession, question: ChatQuestion) -> None:
        self.session = session
        self.console = console()
        self._first = question
        self.forget()
        self.is_over = False
        path = settings_path()
        history = None if path is None else path.with_name("chat_history")
        self._editor = LineEditor(history, COMMANDS, takes_paths=("/file",))

    def forget(self) -> None:
        """Return to the state at the beginning of a conversation."""
        self.last: ChatAnswer | None = None
        self.questions: list[ChatQuestion] = []
        self.unanswered: ChatQuestion | None = None
        self.waiting = self._first.with_prompt("")

    def take_back(self) -> ChatQuestion | None:
        """Remove and return the question that the conversation has just undone; its documents wait again."""
        question = self.questions.pop() if self.questions else None
        self.last = self.unanswered = None
        if question is not None:
            self.waiting = question.with_prompt("")
        return question

    def run(self) -> int:
        """Chat until the user leaves; returns the exit status."""
        self.console.print(banner(self.session))
        if self._first.prompt is not None:
            self.ask(self._first)
        else:
            self.note_waiting()
        while not self.is_over:
            self.console.print()
            try:
                self._take(self._editor.read())
            except Terminated:
                raise
            except KeyboardInterrupt:
                self.console.print()
                self.note("leave with /quit or Ctrl-D")
            except EOFError:
                self.console.print()
                return 0
            except HeteroKVError as error:
                print_error(error)
        return 0

    def _take(self, typed: Typed) -> None:
        if typed.is_command:
            run_command(self, typed.text)
        elif typed.text.strip() or self.waiting.documents:
            self.ask(self.waiting.with_prompt(typed.text.rstrip()))

    def ask(self, question: ChatQuestion) -> None:
        """Send a question, and show its answer."""
        before = self.session.conversation.context_tokens
        self.unanswered = question
        try:
            # Enter this again: the line editor has switched the marking of pastes off.
            with keep_typeahead(), answer_view(self.console, renders_markdown=True) as view:
                self.last = answer_to(
                    self.session,
                    question,
                    on_text=view.write,
                    on_thought=partial(view.write, is_thinking=True),
                    on_token=view.count,
                )
        except HeteroKVError as error:
            print_error(error)
            return
        except Terminated:
            raise
        except KeyboardInterrupt:
            is_kept = self.session.conversation.context_tokens > before
            self.note(f"stopped; the conversation {'includes this answer' if is_kept else 'is unchanged'}")
            return
        finally:
            # Documents that did not enter the conversation go before the next question.
            if self.session.conversation.context_tokens > before:
                self.waiting, self.unanswered = ChatQuestion(), None
                self.questions.append(question)
        reason = ending(self.last, self.session)
        if reason is not None:
            self.console.print(reason, style="yellow", markup=False, highlight=False)
        self.note(statistics_line(self.last))

    def note(self, text: str) -> None:
        """Print a remark of the program."""
        self.console.print(Text(text, style="dim"))

    def note_waiting(self) -> None:
        """Print which documents wait, if any."""
        documents = self.waiting.documents
        if len(documents) == 1:
            length = documents[0].characters
            self.note(f"{documents[0].name} has {length:,} characters; ask about it, or press Enter to send it")
        elif documents:
            each = ", ".join(f"{document.name} {document.characters:,}" for document in documents)
            self.note(f"{each} characters; ask about them, or press Enter to send them")
