"""A chat receives SIGTERM or SIGHUP, or loses its terminal."""

from __future__ import annotations

import errno
import re
import signal
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_kv.chat.interrupt import Terminated, exit_status_of, not_terminated, terminated_in_order
from hetero_kv.contexts.store import ContextStore
from tests.chat.chat_in_a_terminal import CTRL_C, PATIENCE_S, PROMPT, ChatInATerminal
from tests.chat.chat_server import ChatServer


@pytest.fixture
def chat(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chat_server: ChatServer
) -> Iterator[ChatInATerminal]:
    """A chat that saves its context at the end; answers end only when they are stopped."""
    monkeypatch.setenv("HETERO_KV_CONFIG", str(tmp_path / "settings.yaml"))
    settings = "--mode", "long_context", "--config", "quest", "--block_size", 4, "--max_seq_len", 60_000
    at_the_end = "--save_context", "notes", "--context_folder", tmp_path / "contexts"
    running = ChatInATerminal(tiny_model_folder, *settings, "--max_new_tokens", 50_000, *at_the_end, server=chat_server)
    running.until(PROMPT)
    running.type("one two\n")
    running.until("word")
    running.type(CTRL_C)
    running.until(PROMPT)
    yield running
    running.close()


def saved_tokens(folder: Path) -> int:
    with ContextStore(folder / "contexts") as store:
        (context,) = store.contexts()
        assert context.name == "notes"
        return context.tokens


def tokens_said(chat: ChatInATerminal) -> int:
    (said,) = re.findall(r"context +([\d,]+) of", chat.say("/stats"))
    return int(said.replace(",", ""))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_its_context_is_saved(chat: ChatInATerminal, tmp_path: Path, number: signal.Signals):
    said = tokens_said(chat)
    # It is noticed late in the moment before the editor waits for keys.
    time.sleep(0.3)
    if number == signal.SIGHUP:
        chat.hang_up()
    else:
        chat.process.send_signal(number)
    assert chat.process.wait(PATIENCE_S) == 128 + number
    assert saved_tokens(tmp_path) == said


def test_an_answer_that_is_not_finished_is_not_saved(chat: ChatInATerminal, tmp_path: Path):
    said = tokens_said(chat)
    chat.type("one\n")
    chat.until("word")
    chat.process.terminate()
    assert chat.process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert saved_tokens(tmp_path) == said


def test_the_first_signal_alone_ends_it_and_ignored_ones_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminated_in_order():
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(Terminated) as told:
                signal.raise_signal(signal.SIGTERM)
            assert told.value.status == 128 + signal.SIGTERM
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def tidied_up(error: Exception) -> Exception:
    """An error in a clean-up that runs when the program is terminated."""
    error.__context__ = Terminated(signal.SIGTERM)
    return error


def test_a_closed_terminal_ends_the_chat(monkeypatch: pytest.MonkeyPatch):
    gone = [kind(errno.EIO, "Input/output error") for kind in (OSError, termios.error)]
    monkeypatch.setattr("os.isatty", lambda _: False)
    assert [exit_status_of(each) for each in gone] == [128 + signal.SIGHUP] * 2
    others = OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), SystemExit(1)
    assert [exit_status_of(each) for each in others] == [None] * 3
    for error in (*gone, ValueError("whatever")):
        assert exit_status_of(tidied_up(error)) == 128 + signal.SIGTERM
    # A disk that fails is another matter.
    monkeypatch.setattr("os.isatty", lambda _: True)
    assert exit_status_of(OSError(errno.EIO, "Input/output error")) is None


def test_a_signal_waits_for_a_running_save():
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)]
    with not_terminated():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)] == before


def test_other_threads_take_no_signals():
    found = []

    def act() -> None:
        with terminated_in_order():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]
