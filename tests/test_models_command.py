"""`hetero-kv models`, on a model of a few bytes."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock
from rich.console import Console

from hetero_kv.cli import main
from hetero_kv.models import fetching, progress
from hetero_kv.models.named import ModelFile, NamedModel
from hetero_kv.models.sources import BytesReport, FileSource

CONTENT = b"weights" * 1000


@dataclass(frozen=True)
class Written(FileSource):
    """A source that writes the file."""

    def fetch(self, folder: Path, size: int, report: BytesReport) -> Path:
        report("downloading", 0)
        (folder / "got").write_bytes(CONTENT)
        report("downloading", size)
        return folder / "got"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the only named model, `tiny`, is fetched to."""
    file = ModelFile("tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), (Written(),))
    models = {"tiny": NamedModel("tiny", "for tests", "Apache-2.0", 512, (file,))}
    for module in ("hetero_kv.commands.models", "hetero_kv.models.named"):
        monkeypatch.setattr(f"{module}.NAMED_MODELS", models)
    monkeypatch.setenv("HETERO_KV_HOME", str(tmp_path))
    return tmp_path / "models" / "tiny"


def said(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(["models", *words]) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def test_a_model_is_fetched_listed_and_removed(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert "tiny  7.0 kB, not here\n" in said(capsys)
    assert said(capsys, "fetch", "tiny") == f"{folder}/tiny.gguf\n"
    assert (folder / "tiny.gguf").read_bytes() == CONTENT
    assert "tiny  7.0 kB, here\n" in said(capsys, "list")
    assert json.loads(said(capsys, "list", "--json"))["models"]["tiny"] == {
        "description": "for tests",
        "licence": "Apache-2.0",
        "context_length": 512,
        "bytes": 7000,
        "fetched_bytes": 7000,
        "is_default": False,
    }
    assert said(capsys, "remove", "tiny") == "freed 7.0 kB\n"
    assert not folder.exists()
    assert "tiny is not in" in said(capsys, "remove", "tiny", status=2)


def test_a_models_pieces_are_counted_and_removed_and_other_files_stay(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "tiny.gguf.pieces" / "0").mkdir(parents=True)
    (folder / "tiny.gguf.pieces" / "0" / "part.whl").write_bytes(b"a" * 500)
    (folder / "notes.txt").touch()
    assert "500 bytes here" in said(capsys)
    assert said(capsys, "remove", "tiny") == "freed 500 bytes\n"
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_model_that_is_being_fetched_is_not_removed(folder: Path, capsys: pytest.CaptureFixture[str]):
    said(capsys, "fetch", "tiny")
    with FileLock(folder / fetching.LOCK):
        assert "tiny is being fetched by another process" in said(capsys, "remove", "tiny", status=2)
    assert (folder / "tiny.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("fetsh", "tiny"), "models has no action 'fetsh'; did you mean fetch?"),
        (("fetch",), "models fetch needs a name; give one of tiny"),
        (("remove", "tyni"), "no model is called 'tyni'; did you mean 'tiny'? Give one of tiny\n"),
        (("list", "tiny"), "models list takes no name; leave 'tiny' out"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_mistake_is_an_error_that_says_what_is_right(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
):
    assert message in said(capsys, *words, status=2)


def test_the_progress_line_has_size_and_speed_from_the_first_bytes_and_no_question_marks(
    monkeypatch: pytest.MonkeyPatch,
):
    shown = io.StringIO()
    monkeypatch.setattr(progress, "console", lambda **_: Console(file=shown, force_terminal=True, width=120))
    with progress.progress_line("tiny") as report:
        report("asking", 0, 0)
        report("downloading", 0, 2_000_000)
        report("downloading", 1_000_000, 2_000_000)
    written = shown.getvalue().replace("\x1b[?25", "")
    assert "?" not in written
    assert "1.0/2.0 MB" in written
    assert "B/s" in written
    assert "-:--:--" not in written
    assert "0:00:00" in written


def test_packed_weights_are_counted_and_cleared(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert "packed weights" not in said(capsys)
    (folder.parents[1] / "packed" / "key").mkdir(parents=True)
    (folder.parents[1] / "packed" / "key" / "weights").write_bytes(CONTENT)
    assert f"packed weights for later starts: 7.0 kB in {folder.parents[1] / 'packed'}" in said(capsys)
    assert json.loads(said(capsys, "list", "--json"))["packed_bytes"] == 7000
    assert said(capsys, "clear") == "freed 7.0 kB\n"
    assert not (folder.parents[1] / "packed").exists()
    assert "models clear takes no name; leave 'tiny' out" in said(capsys, "clear", "tiny", status=2)
