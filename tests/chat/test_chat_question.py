"""The sources of the first question."""

from __future__ import annotations

import io
import os
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetero_kv.chat.options import ChatOptions, add_flags, chat_options
from hetero_kv.chat.question import ChatQuestion, question_of
from hetero_kv.errors import ConfigError
from hetero_kv.settings.flags import FlagParser


def options(*arguments: object) -> ChatOptions:
    parser = FlagParser("chat", "A chat.")
    add_flags(parser)
    return chat_options(parser.parse([str(argument) for argument in arguments]))


def pipe(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: False))


def error_of(chat: ChatOptions) -> str:
    with pytest.raises(ConfigError) as caught:
        question_of(chat, interactive=False)
    return str(caught.value)


def test_the_file_stands_before_the_question_and_a_blank_line_between_them(tmp_path: Path):
    (tmp_path / "text.txt").write_text("first line\nlast line\n")
    chat = options("--prompt_file", tmp_path / "text.txt", "--prompt", "What?")
    assert question_of(chat, interactive=False).text == "first line\nlast line\n\nWhat?"


def test_several_files_stand_under_their_names(tmp_path: Path):
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text(f"\ntext of {name}\n\n")
    chat = options("--prompt_file", tmp_path / "one.txt", "--prompt_file", tmp_path / "two.txt", "--prompt", "What?")
    question = question_of(chat, interactive=False)
    assert question.text == "File: one.txt\n\ntext of one.txt\n\nFile: two.txt\n\ntext of two.txt\n\nWhat?"
    assert question.in_short == "one.txt, two.txt · What?"


def test_a_file_alone_is_the_question(tmp_path: Path):
    (tmp_path / "text.txt").write_text("Who are you?\n")
    assert question_of(options("--prompt_file", tmp_path / "text.txt"), interactive=False).text == "Who are you?"


def test_a_byte_order_mark_and_carriage_returns_are_not_part_of_the_text(tmp_path: Path):
    (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert question_of(options("--prompt_file", tmp_path / "text.txt"), interactive=False).text == "one\ntwo"


def test_without_a_terminal_the_question_is_read_from_a_pipe(monkeypatch: pytest.MonkeyPatch):
    pipe("Grüße?\n".encode(), monkeypatch)
    assert question_of(options(), interactive=False).text == "Grüße?"


def test_a_dash_as_prompt_file_is_the_pipe(monkeypatch: pytest.MonkeyPatch):
    pipe(b"a document\n", monkeypatch)
    chat = options("--prompt_file", "-", "--prompt", "What?")
    assert question_of(chat, interactive=False).text == "a document\n\nWhat?"


def test_with_a_prompt_a_pipe_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    pipe(b"never read", monkeypatch)
    assert question_of(options("--prompt", "What?"), interactive=False).text == "What?"


def test_in_a_terminal_no_question_is_needed():
    assert question_of(options(), interactive=True) == ChatQuestion()


def test_without_terminal_prompt_and_pipe_the_error_says_what_to_give(monkeypatch: pytest.MonkeyPatch):
    pipe(b" \n", monkeypatch)
    assert "give --prompt or --prompt_file, or pipe one in" in error_of(options())


def test_an_empty_prompt_is_an_error():
    assert "--prompt is empty" in error_of(options("--prompt", " "))


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path):
    message = error_of(options("--prompt_file", tmp_path / "nowhere.txt"))
    assert f"--prompt_file '{tmp_path}/nowhere.txt' cannot be read: No such file or directory" in message


def test_a_folder_is_an_error(tmp_path: Path):
    assert "Is a directory; give a text file" in error_of(options("--prompt_file", tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; give a file with text"),
        (b" \n\t", "is empty; give a file with text"),
        (b"# PDF-1.7\n\xb5\xb6", "is not UTF-8 text (byte 10 is 0xb5); convert it to plain UTF-8 text"),
        (b"text\0text", "is binary (byte 4 is 0x00), not text"),
    ],
)
def test_a_file_that_is_empty_or_not_text_is_an_error(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "file").write_bytes(content)
    assert f"'{tmp_path}/file' {message}" in error_of(options("--prompt_file", tmp_path / "file"))


@pytest.mark.parametrize("flag", ["--prompt", "--system"])
def test_a_flag_that_is_no_text_is_an_error_that_names_the_byte(flag: str):
    with pytest.raises(
        ConfigError, match=rf"{flag} is not UTF-8 text \(character 3 is the byte 0xe9\); give it in UTF-8"
    ):
        options(flag, os.fsdecode(b"caf\xe9"))


def test_an_endless_file_is_an_error_at_its_first_bytes():
    assert "--prompt_file '/dev/zero' is binary (byte 0 is 0x00)" in error_of(options("--prompt_file", "/dev/zero"))


def test_a_file_that_no_context_holds_is_an_error_before_it_is_read(tmp_path: Path):
    with (tmp_path / "huge.txt").open("wb") as file:
        file.truncate(10 * 2**30)
    message = error_of(options("--prompt_file", tmp_path / "huge.txt"))
    assert "huge.txt' has more than 268,435,456 bytes, which exceeds any model's context" in message


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_kv.documents.reading.MOST_BYTES", 2**21)


@pytest.mark.usefixtures("short")
def test_a_pipe_is_read_to_its_end_and_no_further_than_the_limit(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")

    def write(pieces: int) -> None:
        with suppress(BrokenPipeError), (tmp_path / "pipe").open("wb") as file:
            for _ in range(pieces):
                file.write(b"word " * 2**16)

    chat = options("--prompt_file", tmp_path / "pipe")
    for pieces in (2, 1000):
        writer = threading.Thread(target=write, args=(pieces,))
        writer.start()
        if pieces == 2:
            assert len(question_of(chat, interactive=False).text) == 2 * 5 * 2**16
        else:
            assert "has more than 2,097,152 bytes" in error_of(chat)
        writer.join()


@pytest.mark.usefixtures("short")
def test_standard_input_has_the_same_limit(monkeypatch: pytest.MonkeyPatch):
    for arguments in ((), ("--prompt_file", "-")):
        pipe(b"word " * 2**20, monkeypatch)
        assert "standard input has more than 2,097,152 bytes" in error_of(options(*arguments))
