"""The interactive chat, in a pseudo-terminal."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from hetero_kv.chat.answer import ChatAnswer
from hetero_kv.chat.commands import COMMANDS
from hetero_kv.chat.conversation import Conversation
from hetero_kv.chat.line_editor import LineEditor, Typed
from hetero_kv.chat.question import ChatQuestion
from hetero_kv.chat.terminal import Terminal
from hetero_kv.errors import HeteroKVError
from hetero_kv.models import load_model
from tests.chat.chat_in_a_terminal import CTRL_C, CTRL_D, PATIENCE_S, PROMPT, ChatInATerminal
from tests.chat.chat_server import ChatServer
from tests.chat.sample_documents import pdf

if TYPE_CHECKING:
    from hetero_kv.chat.session import ChatSession


@pytest.fixture(scope="module")
def _running(
    tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory, chat_server: ChatServer
) -> Iterator[ChatInATerminal]:
    settings = tmp_path_factory.mktemp("home") / "settings.yaml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETERO_KV_CONFIG", str(settings))
        terminal = ChatInATerminal(tiny_model_folder, "--max_new_tokens", 50_000, server=chat_server)
    terminal.until(PROMPT)
    yield terminal
    terminal.close()


@pytest.fixture
def chat(_running: ChatInATerminal) -> ChatInATerminal:
    """A chat whose conversation is empty; answers end only when they are stopped."""
    assert "forgotten" in _running.say("/reset")
    return _running


def prompt_tokens(chat: ChatInATerminal) -> int:
    found = re.search(r"prompt +([\d,]+) tokens", chat.say("/stats"))
    assert found
    return int(found[1].replace(",", ""))


def stop_the_answer(chat: ChatInATerminal) -> str:
    """Ctrl-C once the answer has begun: only answers are of words that the model knows."""
    chat.until("word")
    chat.type(CTRL_C)
    return chat.until(PROMPT)


def drop_the_line(chat: ChatInATerminal) -> None:
    """Ctrl-C at the prompt. Python notices it late, with the next key, in the moment before it waits for keys."""
    time.sleep(0.2)
    chat.type(CTRL_C)


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(chat: ChatInATerminal):
    for _ in range(2):
        chat.type("one two\n")
        shown = stop_the_answer(chat)
        assert "stopped" in shown
        assert "tokens/s" in shown
    assert chat.process.poll() is None


def test_quotes_begin_and_end_a_text_of_several_lines(chat: ChatInATerminal):
    chat.type('"""one two\n')
    chat.until("... ")
    chat.type("/quit\n")
    chat.until("... ")
    chat.type('three"""\n')
    stop_the_answer(chat)
    # <begin> user (4 words) <end> <begin> assistant
    assert prompt_tokens(chat) == 9


def test_ctrl_c_drops_a_text_of_several_lines(chat: ChatInATerminal):
    chat.type('"""one two\n')
    chat.until("... ")
    drop_the_line(chat)
    assert "leave with /quit or Ctrl-D" in chat.until(PROMPT)
    chat.type("three\n")
    stop_the_answer(chat)
    assert prompt_tokens(chat) == 6


def test_a_paste_of_several_lines_is_one_question(chat: ChatInATerminal):
    chat.type("\x1b[200~one\ntwo\nthree\x1b[201~")
    chat.until("three")
    chat.type("\n")
    stop_the_answer(chat)
    assert prompt_tokens(chat) == 8


def test_a_long_paste_is_shown_by_its_size_and_sent_unchanged(chat: ChatInATerminal):
    chat.type("one \x1b[200~" + "two three\n/quit\n" * 1000 + "\x1b[201~")
    shown = chat.until("[pasted 2,000 lines]")
    assert "quit" not in shown
    chat.type("\n")
    stop_the_answer(chat)
    assert prompt_tokens(chat) == 5 + 1 + 3000
    # Up brings it back, and the paste is one character, which goes with one key.
    chat.type("\x1b[A\x1b[A\x7f\n")
    stop_the_answer(chat)
    assert prompt_tokens(chat) == 1 + 6 + 1


def test_input_during_an_answer_is_the_next_question(chat: ChatInATerminal):
    chat.type("one two\n")
    chat.until("word")
    chat.type("three \x1b[200~four\nfive\x1b[201~\n")
    time.sleep(0.2)
    chat.type(CTRL_C)
    shown = chat.until("three four")
    assert "^C" not in shown
    stop_the_answer(chat)
    assert prompt_tokens(chat) == 1 + 6 + 3


def test_a_line_may_be_longer_than_the_terminal_takes_by_itself(chat: ChatInATerminal):
    chat.type("seven " * 1000)
    chat.type("\n")
    stop_the_answer(chat)
    assert prompt_tokens(chat) == 1005


def test_help_lists_every_command(chat: ChatInATerminal):
    shown = chat.say("/help")
    assert all(command in shown for command in (*COMMANDS, '"""', "Ctrl-C"))


def test_an_unknown_command_is_answered_with_the_nearest(chat: ChatInATerminal):
    assert "there is no command /stast; did you mean /stats?" in chat.say("/stast")


def test_a_leading_slash_is_a_command_and_a_space_before_it_makes_a_question(chat: ChatInATerminal):
    assert "there is no command /usr/bin/env; known: /help, " in chat.say("/usr/bin/env is what?")
    assert "/quit takes no argument, and the line has 'now'" in chat.say("/quit now")
    assert "0 of 65,536 tokens" in chat.say("/stats")
    chat.type(" /usr/bin/env is what?\n")
    stop_the_answer(chat)
    assert prompt_tokens(chat) == 5 + 3


def test_a_question_is_undone_and_repeated(chat: ChatInATerminal):
    assert "error: there is no question to take back: the conversation is empty" in chat.say("/undo")
    assert "error: there is no question to repeat" in chat.say("/retry")
    chat.type("one two\n")
    stop_the_answer(chat)
    chat.type("/retry\n")
    stop_the_answer(chat)
    assert prompt_tokens(chat) == 5 + 2
    assert "1 one two" in (shown := chat.say("/context"))
    assert re.search(r"1 one two +7 +0\.0%\s+its answer +\d", shown)
    assert "taken back: one two" in chat.say("/undo")
    assert "0 of 65,536 tokens" in chat.say("/stats")
    assert re.search(r"left +65,536 +100\.0%", chat.say("/context"))


def test_setting_the_system_message_restarts_the_conversation(chat: ChatInATerminal):
    assert "the model's own system message" in chat.say("/system")
    chat.type("one\n")
    stop_the_answer(chat)
    assert "the system message is set; the conversation restarts" in chat.say("/system be brief")
    assert "system message: be brief" in chat.say("/system")
    chat.type("one\n")
    stop_the_answer(chat)
    assert prompt_tokens(chat) == 6 + 5
    chat.say('/system "be brief"')
    assert "system message: be brief" in chat.say("/system")
    chat.say('/system say "yes" or "no"')
    assert 'system message: say "yes" or "no"' in chat.say("/system")
    chat.say('/system "yes" or "no"')
    assert 'system message: "yes" or "no"' in chat.say("/system")
    chat.say('/system ""')
    assert "the model's own system message" in chat.say("/system")


def test_files_go_before_the_next_question_and_wait_again_when_it_is_taken_back(chat: ChatInATerminal, tmp_path: Path):
    (tmp_path / "first.pdf").write_bytes(pdf("one two three"))
    (tmp_path / "second.md").write_text("one two three\n")
    assert "error: no document waits for a question; add one: /file PATH" in chat.say("/file")
    assert "error: '/nowhere.txt' cannot be read: No such file" in chat.say("/file /nowhere.txt")
    assert "first.pdf has 13 characters; ask about it" in chat.say(f"/file {tmp_path}/first.pdf")
    assert "first.pdf 13, second.md 13 characters; ask about them" in chat.say(f"/file {tmp_path}/*.md")
    assert re.search(r"waits: second.md +3 ", chat.say("/context"))
    chat.type("four\n")
    stop_the_answer(chat)
    # Each under its name: File: first.pdf
    assert prompt_tokens(chat) == 5 + 2 * (2 + 3) + 1
    assert "1 first.pdf, second.md · four" in chat.say("/context")
    shown = chat.say("/undo")
    assert "taken back: first.pdf, second.md · four" in shown
    assert "first.pdf 13, second.md 13 characters" in shown
    chat.type("\n")
    stop_the_answer(chat)
    assert prompt_tokens(chat) == 5 + 2 * (2 + 3)
    chat.say("/undo")
    assert "no document waits for the next question" in chat.say("/drop")


def test_ctrl_c_at_the_prompt_drops_the_line(chat: ChatInATerminal):
    chat.type("half a question")
    chat.until("half a question")
    drop_the_line(chat)
    assert "leave with /quit or Ctrl-D" in chat.until(PROMPT)
    assert "context" in chat.say("/stats")


def test_the_document_goes_before_the_first_question_alone(
    tiny_model_folder: Path, tmp_path: Path, chat_server: ChatServer
):
    (tmp_path / "document.txt").write_text("one two three\n")
    chat = ChatInATerminal(
        tiny_model_folder, "--prompt_file", tmp_path / "document.txt", "--max_new_tokens", 3, server=chat_server
    )
    try:
        banner = chat.until(PROMPT)
        assert "capacity 65,536 tokens" in banner
        assert "document.txt has 13 characters; ask about it" in banner
        assert "cut off at --max_new_tokens 3" in chat.say("four")
        assert prompt_tokens(chat) == 5 + 4
        chat.say("five")
        # The last token of the answer before is processed with it: … <end> <begin> user (word) <end> <begin> assistant
        assert prompt_tokens(chat) == 1 + 7
        assert "document.txt has 13 characters; ask about it" in chat.say("/reset")
        chat.say("")
        assert prompt_tokens(chat) == 5 + 3
        chat.type(CTRL_D)
        assert chat.process.wait(PATIENCE_S) == 0
    finally:
        chat.close()


def test_a_question_that_does_not_fit_is_an_error_and_the_chat_goes_on(
    tiny_model_folder: Path, tmp_path: Path, chat_server: ChatServer
):
    (tmp_path / "document.txt").write_text("one " * 30)
    chat = ChatInATerminal(
        tiny_model_folder, "--mode", "long_context", "--config", "ktransformers", "--max_seq_len", 20,
        "--prompt_file", tmp_path / "document.txt", server=chat_server,
    )  # fmt: skip
    try:
        assert "capacity 20 tokens · the store takes 136.5 kB per 1,000 tokens" in " ".join(chat.until(PROMPT).split())
        for _ in range(2):
            shown = chat.say("two")
            assert "error: " in shown
            assert "max_seq_len" in shown
        assert "0 of 20 tokens" in chat.say("/stats")
    finally:
        chat.close()


# By a fork, or by an interpreter of its own, as users start it.
@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_prompt_runs_at_once_and_the_history_has_earlier_chats_questions(
    tiny_model_folder: Path, tmp_path: Path, chat_server: ChatServer, forked: bool
):
    (tmp_path / "chat_history").write_text('"word2 word3"\n')
    server = chat_server if forked else None
    chat = ChatInATerminal(tiny_model_folder, "--prompt", "word1", "--max_new_tokens", 3, server=server)
    try:
        assert "cut off at --max_new_tokens 3" in chat.until(PROMPT)
        assert "cut off at --max_new_tokens 3" in chat.say("\x1b[A")
        assert prompt_tokens(chat) == 1 + 6 + 2
        chat.type("/quit\n")
        assert chat.process.wait(PATIENCE_S) == 0
    finally:
        chat.close()
    history = (tmp_path / "chat_history").read_text().splitlines()
    assert [json.loads(line) for line in history] == ["word2 word3", "/stats", "/quit"]


def test_the_chat_goes_on_after_errors_of_ours_and_lines_that_are_no_text(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class OutOfMemory(HeteroKVError):
        """An error of ours that the terminal knows nothing of."""

    loaded = load_model(str(tiny_model_folder), dtype="float32")
    talk = Conversation(loaded.model, loaded.tokenizer)
    questions: list[str] = []

    def answer(session: object, question: ChatQuestion, **_: object) -> ChatAnswer:
        questions.append(question.text)
        if question.text == "too much":
            raise OutOfMemory("no memory for the cache; shorten the question")
        return talk.ask(question.text, max_new_tokens=2)

    lines = iter(["word1", "too much", "caf\udce9", "word2", EOFError()])

    def read(_: object) -> Typed:
        line = next(lines)
        if isinstance(line, Exception):
            raise line
        return Typed(line, is_command=False)

    monkeypatch.setattr("hetero_kv.chat.terminal.answer_to", answer)
    monkeypatch.setattr("hetero_kv.chat.terminal.banner", lambda session: "")
    monkeypatch.setattr(LineEditor, "read", read)
    options = SimpleNamespace(answer=SimpleNamespace(max_new_tokens=2))
    session = cast("ChatSession", SimpleNamespace(conversation=talk, options=options, capacity=99))
    assert Terminal(session, ChatQuestion()).run() == 0
    assert questions == ["word1", "too much", "caf\udce9", "word2"]
    errors = capsys.readouterr().err
    assert "no memory for the cache" in errors
    assert "the text is not Unicode" in errors
    assert talk.context_tokens == 2 * (6 + 2) + 1
