"""The command `chat`: an interactive chat in a terminal, otherwise one answer."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout, suppress
from typing import TYPE_CHECKING, TextIO

from hetero_kv.chat.options import ChatOptions, add_flags, chat_options
from hetero_kv.chat.question import ChatQuestion, question_of
from hetero_kv.errors import ConfigError
from hetero_kv.start_up.collection import collection_deferred

if TYPE_CHECKING:
    from hetero_kv.chat.session import ChatSession

__all__ = ["add_flags", "run"]


def run(flags: argparse.Namespace) -> int:
    """Run the chat as the flags say.

    Returns the exit status: 0, 130 if Ctrl-C cut the only answer short, 1 if the reader of the output closed it. When a
    signal ends the chat, or its terminal closes, the chat saves its context like on /quit and returns 128 plus the
    signal's number.

    Raises:
        HeteroKVError: a mistake in the flags or files, a model that cannot be loaded, or a question that cannot be
            answered.
    """
    options = chat_options(flags)
    interactive = not options.json and _is_terminal(sys.stdin) and _is_terminal(sys.stdout)
    # Read the question before the slow loading of the model: a mistake in a file shows at once.
    question = question_of(options, interactive=interactive)
    if not interactive:
        return _answer_once(options, question)

    from hetero_kv.chat.interrupt import Terminated, terminated_in_order

    with terminated_in_order():
        try:
            return _chat(options, question)
        except Terminated as end:
            return end.status


def _chat(options: ChatOptions, question: ChatQuestion) -> int:
    from hetero_kv.chat.interrupt import exit_status_of, not_terminated
    from hetero_kv.chat.keyboard import keep_typeahead
    from hetero_kv.printing import console

    with keep_typeahead():
        session = _opened(options)
        from hetero_kv.chat.context_commands import saved
        from hetero_kv.chat.terminal import Terminal

        try:
            status = Terminal(session, question).run()
        except BaseException as error:
            ended = exit_status_of(error)
            if ended is None:
                raise
            status = ended
    if options.save_context is not None and session.conversation.context_tokens:
        with not_terminated():
            message = saved(session, options.save_context)
        # The terminal itself may be gone.
        with suppress(OSError):
            console(stderr=True).print(message, style="dim", markup=False, highlight=False)
    return status


def _answer_once(options: ChatOptions, question: ChatQuestion) -> int:
    from hetero_kv.cli import INTERRUPTED, UNREAD
    from hetero_kv.printing import console, discard_rest, json_text, printable

    output = sys.stdout
    if output is None:
        raise ConfigError("standard output is closed, and the answer is printed there; open it, e.g. with > FILE")

    unwritten: OSError | None = None

    def write(piece: str) -> None:
        nonlocal unwritten
        try:
            output.write(piece)
            output.flush()
        except OSError as error:
            # Save the context nevertheless, whether the reader has gone or the disk is full.
            if options.save_context is None:
                raise
            discard_rest(output)
            unwritten = error

    # Only the answer may reach standard output, whatever a library prints.
    with redirect_stdout(sys.stderr):
        session = _opened(options)
        from hetero_kv.chat.answering import answer_to
        from hetero_kv.chat.context_commands import saved
        from hetero_kv.chat.display import ending, statistics_line
        from hetero_kv.chat.json_report import json_report
        from hetero_kv.chat.session import warn_of_unused_contexts

        warn_of_unused_contexts(options)
        on_text = None if options.json else lambda piece: write(printable(piece))
        answer = answer_to(session, question, on_text, should_stop=lambda: unwritten is not None)
        # Write the answer first: it remains if the context cannot be saved.
        write(json_text(json_report(session, answer)) + "\n" if options.json else "\n")
        notes = [] if options.json else [" · ".join(filter(None, (ending(answer, session), statistics_line(answer))))]
        try:
            # Save before writing to standard error, whose reader may have gone with the answer's.
            if options.save_context is not None and session.conversation.context_tokens:
                notes.append(saved(session, options.save_context))
        finally:
            for note in notes:
                console(stderr=True).print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
    if isinstance(unwritten, BrokenPipeError):
        return UNREAD
    if unwritten is not None:
        raise unwritten
    return INTERRUPTED if answer.finish_reason == "stopped" else 0


def _opened(options: ChatOptions) -> ChatSession:
    with collection_deferred():
        from hetero_kv.planning.read_ahead import read_ahead

        read_ahead(options.model, options.gguf_path, with_weights=options.mode == "long_context")
        from hetero_kv.chat.session import open_session

        return open_session(options)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()
