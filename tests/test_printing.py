"""Printed text cannot command a terminal, and always prints."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from hetero_kv import printing
from hetero_kv.cli import main, print_error
from hetero_kv.errors import HeteroKVError
from hetero_kv.printing import console, json_text, passing_line, printable

CHECKOUT = Path(__file__).parents[1]
#: Moves the cursor, renames the window, fills the clipboard, begins a sequence in C1, turns the direction around.
COMMANDS = "\x1b[2J\x1b]0;title\x07\x1b]52;c;Zm9v\x07\x9b31m\x8d\u202egnp.exe\u2066\r\x08\x7f"
UNPRINTABLE = [
    chr(code) for code in [*range(32), 127, *range(128, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
]
UNPRINTABLE = [char for char in UNPRINTABLE if char not in "\t\n"]


@given(st.text(alphabet=st.characters(exclude_categories=())))
def test_printable_text_has_no_control_characters_and_can_be_written(text):
    shown = printable(text)
    assert not {*UNPRINTABLE} & {*shown}
    assert shown.encode() or not text.translate(dict.fromkeys(map(ord, UNPRINTABLE)))
    assert printable(shown) == shown


@given(st.text(alphabet=st.characters(exclude_categories=["Cc", "Cs"], exclude_characters=UNPRINTABLE)))
def test_plain_text_is_printed_as_it_is(text):
    assert printable(text) == text


def test_marks_that_scripts_and_emoji_need_stay():
    text = "क्\u200dष \u200eא\u200f 👩\u200d💻\tx\n"
    assert printable(text) == text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])) | st.sampled_from(["\udcff", "a\ud800b"]))
def test_json_loses_nothing_and_commands_nothing(text):
    shown = json_text({"answer": text})
    assert not {*UNPRINTABLE} & {*shown}
    assert shown.encode()
    assert json.loads(shown) == {"answer": text}


def test_json_is_ascii_where_the_terminal_is(monkeypatch: pytest.MonkeyPatch):
    assert "é" in json_text("é")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert json_text("é") == '"\\u00e9"'


@pytest.mark.parametrize("stderr", [False, True])
def test_a_console_shows_texts_and_tables_without_commands(capsys: pytest.CaptureFixture[str], stderr: bool):
    shown = console(stderr=stderr)
    table = Table(title=COMMANDS)
    table.add_column(COMMANDS)
    table.add_row(Text(COMMANDS))
    table.add_row("[bold]kept[/bold]")
    shown.print(table)
    shown.print(COMMANDS, soft_wrap=True)
    captured = capsys.readouterr()
    text = captured.err if stderr else captured.out
    assert "gnp.exe" in text
    assert "kept" in text
    assert not {*UNPRINTABLE} & {*text}


def test_errors_and_warnings_are_printed_without_commands(capsys: pytest.CaptureFixture[str]):
    print_error(HeteroKVError(f"no architecture {COMMANDS}\udcff"))
    assert main([f"comm{COMMANDS}and"]) == 2
    printing.make_printing_safe()
    record = logging.LogRecord("hetero_kv", logging.WARNING, "", 0, "%s is odd", (COMMANDS,), None)
    assert logging.lastResort is not None
    logging.lastResort.handle(record)
    text = capsys.readouterr().err
    assert text.count("gnp.exe") >= 2
    assert "is odd" in text
    assert not {*UNPRINTABLE} & {*text}


SAID = """
from hetero_kv.cli import main
from hetero_kv.printing import console
status = main([chr(0x65e5)])
print(chr(0x672c))
console().print(chr(0x8a9e))
raise SystemExit(status)
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_utf_8_gets_question_marks_and_no_traceback(encoding: str):
    ended = subprocess.run(
        [sys.executable, "-c", SAID],
        cwd=CHECKOUT,
        env=os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "LC_ALL": "C"},
        capture_output=True,
        check=False,
    )
    assert ended.stderr.startswith(b"error: hetero-kv has no command '?'")
    assert b"Traceback" not in ended.stderr
    assert (ended.returncode, ended.stdout.split()) == (2, [b"?", b"?"])


def test_a_passing_line_is_gone_afterwards_and_is_not_there_where_there_is_no_terminal(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    with passing_line("preparing"):
        pass
    assert written.getvalue() == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with passing_line("preparing"):
        # Another thread writes it.
        until = time.monotonic() + 30
        while "preparing" not in written.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
    # The last that is written erases it.
    assert written.getvalue().rpartition("preparing")[2].endswith("\x1b[2K")
