"""The line editor, without a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.layout.processors import TransformationInput
from prompt_toolkit.output import DummyOutput

from hetero_kv.chat import line_editor
from hetero_kv.chat.line_editor import LineEditor, Typed
from hetero_kv.chat.line_history import MOST_OF_ENTRY, MOST_OF_FILE, LineHistory
from hetero_kv.chat.pastes import MOST_CHARACTERS, MOST_LINES, Pastes, ShownLine

LONG = "word\n" * MOST_LINES


def typed(keys: str, monkeypatch: pytest.MonkeyPatch, history: Path | None = None) -> Typed:
    """What the editor makes of the keys."""
    monkeypatch.setattr(line_editor._Output, "from_pty", lambda *_: DummyOutput())
    editor = LineEditor(history, ["/file"], ["/file"])
    with create_pipe_input() as keyboard:
        keyboard.send_text(keys)
        editor._session.app.input = keyboard
        return editor.read()


@pytest.mark.parametrize(
    ("keys", "text", "is_command"),
    [
        ("/stats\r", "/stats", True),
        (" /usr/bin\r", "/usr/bin", False),
        ("  one\r", "  one", False),
        ('"""/quit\rone"""\r', "/quit\none", False),
        ('"""\rone\r"""\r', "one", False),
        ('""""""\r', "", False),
        ("one\x1b\rtwo\r", "one\ntwo", False),
        ("\x1b[200~one\r\ntwo\x1b[201~\r", "one\ntwo", False),
        (f"\x1b[200~/{LONG}\x1b[201~\r", f"/{LONG}", False),
        (f"/file \x1b[200~{LONG}\x1b[201~\r", f"/file {LONG}", True),
    ],
)
def test_input_is_a_text_or_a_command(keys: str, text: str, is_command: bool, monkeypatch: pytest.MonkeyPatch):
    assert typed(keys, monkeypatch) == Typed(text, is_command)


def test_ctrl_c_and_ctrl_d_end_the_line(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(KeyboardInterrupt):
        typed("one\x03", monkeypatch)
    with pytest.raises(EOFError):
        typed("\x04", monkeypatch)


def completions(text: str, cls: type[line_editor._Words] = line_editor._Words) -> list[str]:
    words = cls(["/file", "/undo"], ("/file",))
    return [each.text for each in words.get_completions(Document(text), CompleteEvent(completion_requested=True))]


def test_commands_and_paths_are_completed(tmp_path: Path):
    (tmp_path / "notes.txt").touch()
    assert completions("/f") == ["/file"]
    assert completions(f"/file {tmp_path}/no") == ["tes.txt"]
    assert completions(f"/undo {tmp_path}/no") == completions("fi") == []


def test_a_short_paste_stays_and_a_long_one_is_one_character():
    pastes = Pastes()
    assert pastes.folded("one\ntwo") == "one\ntwo"
    texts = [LONG, "a" * (MOST_CHARACTERS + 1), chr(0x100000)]
    folded = [pastes.folded(text) for text in texts]
    assert [len(each) for each in folded] == [1, 1, 1]
    assert [pastes.label(each) for each in folded] == [
        "[pasted 8 lines]",
        "[pasted 1,001 characters]",
        "[pasted 1 characters]",
    ]
    assert pastes.unfolded(f"x{''.join(folded)}y") == f"x{''.join(texts)}y"
    assert pastes.unfolded(chr(0x100050)) == chr(0x100050)


def test_output_has_labels_and_no_control_characters():
    pastes = Pastes()
    line = f"a{pastes.folded(LONG)}\u202eb"
    processor, none = ShownLine(pastes), None
    shown = processor.apply_transformation(
        TransformationInput(none, Document(line), 0, lambda place: place, [("", line)], 80, 24)  # type: ignore[arg-type]
    )
    assert "".join(text for _, text, *_ in shown.fragments) == "a[pasted 8 lines]\ufffdb"
    places = [shown.source_to_display(place) for place in range(5)]
    assert places == [0, 1, 17, 18, 19]
    assert [shown.display_to_source(place) for place in (0, 1, 9, 17, 18)] == [0, 1, 1, 2, 3]


def entries(path: Path) -> list[str]:
    return list(LineHistory(path, Pastes()).load_history_strings())


def test_history_is_there_in_the_next_chat_and_long_entries_are_not(tmp_path: Path):
    path = tmp_path / "folder" / "history"
    pastes = Pastes()
    history = LineHistory(path, pastes)
    for line in ("one", f"two {pastes.folded(LONG)}", "a" * MOST_OF_ENTRY, "caf\udce9"):
        history.append_string(line)
    with path.open("ab") as file:
        file.write(b'{"no": "text"}\n"cut o')
    assert path.stat().st_mode & 0o777 == 0o600
    again = Pastes()
    loaded = [again.unfolded(line) for line in LineHistory(path, again).load_history_strings()]
    assert loaded == ["caf\udce9", f"two {LONG}", "one"]
    assert len(history.get_strings()) == 4


def test_a_history_that_grows_forgets_its_beginning(tmp_path: Path):
    path = tmp_path / "history"
    lines = [json.dumps(f"{number:06} " + "a" * 1000) for number in range(MOST_OF_FILE // 1000)]
    path.write_text("\n".join(lines) + "\n")
    assert 400 < len(entries(path)) < len(lines) // 2 + 1
    assert path.read_text() == "\n".join(lines[-len(entries(path)) :]) + "\n"


def test_a_history_that_cannot_be_written_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").touch()
    history = LineHistory(tmp_path / "file" / "history", Pastes())
    history.append_string("one")
    history.append_string("two")
    assert history.get_strings() == ["one", "two"]
    assert len(caplog.records) == 1
    assert "the history lasts only until the chat ends" in caplog.text
