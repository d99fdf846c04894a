"""Where the first question comes from."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetero_kv.chat.options import ChatOptions, add_flags, chat_options
from hetero_kv.chat.question import Question, question_of
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
    assert question_of(options(), interactive=True) == Question()


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
        (b"", "is empty; give a file with text in it"),
        (b" \n\t", "is empty; give a file with text in it"),
        (b"%PDF-1.7\n\xb5\xb6", "is not UTF-8 text (byte 9 is 0xb5); convert it to plain text"),
        (b"text\0text", "is binary (byte 4 is 0x00), not text"),
    ],
)
def test_a_file_that_is_empty_or_not_text_is_an_error(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "file").write_bytes(content)
    assert f"'{tmp_path}/file' {message}" in error_of(options("--prompt_file", tmp_path / "file"))
