"""Documents of several formats become texts; others are refused."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.documents import formats
from hetero_kv.documents.reading import document_in, documents_at
from hetero_kv.errors import ConfigError
from hetero_kv.text_decoding import decoded
from tests.chat.sample_documents import HTML, docx, pdf
from tests.support.slow_variants import with_few

SAMPLES = {
    "notes.txt": (b"It was cut.\r\n", "It was cut.\n"),
    "notes.md": (b"# Budget\n\n*cut*\n", "# Budget\n\n*cut*\n"),
    "notes.json": (b'{"year": 2026}\n', '{"year": 2026}\n'),
    "page.py": (b"page = '<html></html>'\n", "page = '<html></html>'\n"),
    "notes.pdf": (pdf("It was cut.", "By half."), "It was cut.\n\nBy half.\n\n"),
    "notes.docx": (docx(), "## Budget\n\nIt was cut.\n\n- by half\n| year | 2026 |\n\n"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_documents_type_is_that_of_its_content(tmp_path: Path, name: str):
    content, text = SAMPLES[name]
    (tmp_path / name).write_bytes(content)
    document = document_in(tmp_path / name)
    assert (document.name, document.text) == (name, text)


@pytest.mark.parametrize("name", ["notes.html", "notes"])
def test_a_page_is_its_text_without_scripts_styles_and_pictures(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(HTML)
    text = document_in(tmp_path / name).text
    assert "# Budget\n\nIt was **cut** by snake_case & co." in text
    assert "| 2026 |" in text
    assert not any(unseen in text for unseen in ("never", "color", "AAAA"))


def error_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        document_in(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_pdf_without_text_says_what_to_do(tmp_path: Path):
    (tmp_path / "scan.pdf").write_bytes(pdf(""))
    assert "is empty; its pages are pictures" in error_of(tmp_path / "scan.pdf")


@pytest.mark.parametrize("share", with_few([0.02, 0.4, 0.97], quick=[0.4]))
@pytest.mark.parametrize("name", ["notes.docx", "notes.pdf"])
def test_a_document_that_is_cut_off_is_read_or_an_error_of_ours(tmp_path: Path, name: str, share: float):
    content = SAMPLES[name][0]
    (tmp_path / name).write_bytes(content[: int(share * len(content))])
    try:
        said = document_in(tmp_path / name).text
    except ConfigError as error:
        said = str(error)
    right = (SAMPLES[name][1], f"cannot be read as {name[6:].upper()}: ", "is empty", "is not UTF-8", "is binary")
    assert any(each in said for each in right)


def archive(**members: bytes) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return written.getvalue()


def test_another_archive_is_named(tmp_path: Path):
    (tmp_path / "some.zip").write_bytes(archive(text=b"word"))
    assert "cannot be read as DOCX: it is another zip archive" in error_of(tmp_path / "some.zip")


def test_a_page_nested_without_end_is_an_error_of_ours(tmp_path: Path):
    # Each end tag that nothing opened is compared with all elements that are open: minutes, for a page of this size.
    (tmp_path / "deep.html").write_bytes(b"<b>" * 100_000 + b"word" + b"</i>" * 100_000)
    assert "cannot be read as HTML: its elements are nested more than 1,000 deep" in error_of(tmp_path / "deep.html")
    (tmp_path / "less.html").write_bytes(b"<div>" * 900 + b"word" + b"</div>" * 900)
    assert document_in(tmp_path / "less.html").text.strip() == "word"


def test_a_document_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(formats, "SECONDS", -1)
    (tmp_path / "slow.html").write_bytes(b"<p>word</p>" * 200_000)
    assert "s to read as HTML; convert it" in error_of(tmp_path / "slow.html")


def test_a_document_that_takes_too_much_memory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(formats, "MEMORY", 64 << 20)
    (tmp_path / "large.html").write_bytes(b"<p>word</p>" * 200_000)
    assert "cannot be read as HTML: it takes more than 67 MB" in error_of(tmp_path / "large.html")


def test_a_document_of_too_much_text_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hetero_kv.documents.reading.MOST_BYTES", 1000)
    (tmp_path / "long.pdf").write_bytes(pdf())
    with pytest.raises(ConfigError, match="its text has more than 10 bytes"):
        formats.text_in(pdf("It was cut."), formats.PDF, "long.pdf", 10)


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(formats, "PDF", formats.Format("PDF", "no_such_module", "pypdf"))
    (tmp_path / "notes.pdf").write_bytes(SAMPLES["notes.pdf"][0])
    message = error_of(tmp_path / "notes.pdf")
    assert "is PDF, and the package pypdf that reads it is not installed; pip install 'hetero-kv[documents]'" in message


def test_paths_are_quoted_and_patterns_matched_as_a_shell_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("b.txt", "a.txt", "it's here.txt", "[x].txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "folder.txt").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    found = {
        words: [document.text for document in documents_at(words)]
        for words in ("?.txt", "it's here.txt", "'it'\"'s here.txt\" ~/a.txt", r"it\'s\ here.txt", "[x].txt")
    }
    assert list(found.values()) == [
        ["a.txt", "b.txt"],
        ["it's here.txt"],
        ["it's here.txt", "a.txt"],
        ["it's here.txt"],
        ["[x].txt"],
    ]


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for words, message in (
        ("nowhere.txt", "'nowhere.txt' cannot be read: No such file or directory"),
        ("*.txt", r"no file matches '\*.txt'; check the pattern"),
        (".", "'.' cannot be read: Is a directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            documents_at(words)
    monkeypatch.setattr("hetero_kv.documents.reading.MOST_FILES", 1)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    with pytest.raises(ConfigError, match=r"'\*.txt' matches 2 files, and the limit is 1"):
        documents_at("*.txt")


ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")


def marked(text: str, encoding: str) -> bytes:
    has_mark = encoding in ("utf-8-sig", "utf-16", "utf-32")
    return (text if has_mark else f"\ufeff{text}").encode(encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("text", ["It was cut.\n", "预算被削减。\n", "🙂 cut\n"])
def test_text_is_read_by_its_byte_order_mark(tmp_path: Path, encoding: str, text: str):
    (tmp_path / "notes.txt").write_bytes(marked(text.replace("\n", "\r\n"), encoding))
    assert document_in(tmp_path / "notes.txt").text == text


@pytest.mark.parametrize("encoding", with_few(ENCODINGS, quick=["utf-8-sig", "utf-16-le", "utf-32-be"]))
def test_a_page_is_read_by_its_byte_order_mark(tmp_path: Path, encoding: str):
    (tmp_path / "notes").write_bytes(marked("<!doctype html><p>Cut <b>by half</b>", encoding))
    assert document_in(tmp_path / "notes").text.strip() == "Cut **by half**"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_wide_text_without_a_mark_is_refused_as_such(tmp_path: Path, encoding: str):
    (tmp_path / "notes.txt").write_bytes("It was cut.\n".encode(encoding))
    assert "without a byte order mark, so its encoding is unknown; convert it to UTF-8" in error_of(
        tmp_path / "notes.txt"
    )


def test_wide_text_that_is_damaged_is_an_error_that_names_the_place(tmp_path: Path):
    (tmp_path / "cut.txt").write_bytes("It was cut.".encode("utf-16")[:-1])
    assert "is not UTF-16 text (byte 22 is 0x2e)" in error_of(tmp_path / "cut.txt")
    (tmp_path / "zero.txt").write_bytes("It\0was".encode("utf-16"))
    assert "is binary (byte 6 is 0x00)" in error_of(tmp_path / "zero.txt")


TEXTS = st.tuples(st.text(max_size=20), st.sampled_from(ENCODINGS)).map(lambda each: marked(*each))


@settings(max_examples=8)
@given(st.binary(max_size=64) | TEXTS)
def test_any_bytes_are_text_without_zeros_or_an_error_that_names_the_file(content: bytes):
    _are_text_or_an_error(content)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.binary(max_size=64) | TEXTS)
def test_more_bytes_are_text_without_zeros_or_an_error_that_names_the_file(content: bytes):
    _are_text_or_an_error(content)


@pytest.mark.slow
@given(st.binary(max_size=64) | TEXTS)
def test_any_more_bytes_are_text_without_zeros_or_an_error_that_names_the_file(content: bytes):
    _are_text_or_an_error(content)


def _are_text_or_an_error(content: bytes) -> None:
    try:
        said = decoded(content, "notes")
    except ConfigError as error:
        said = str(error)
        if not said.startswith("notes "):
            raise
    assert "\0" not in said


def test_a_pipe_is_read_once_as_a_file_is(tmp_path: Path):
    os.mkfifo(tmp_path / "notes")
    writer = threading.Thread(target=(tmp_path / "notes").write_bytes, args=("It was cut.\n".encode("utf-16"),))
    writer.start()
    assert document_in(tmp_path / "notes").text == "It was cut.\n"
    writer.join()


def test_process_substitutions_are_read():
    program = (
        "from pathlib import Path; from hetero_kv.documents.reading import document_in;"
        "print([document_in(Path(path)).text for path in ('/dev/stdin', __import__('sys').argv[1])])"
    )
    script = f'exec {sys.executable} -c "{program}" <(echo second)'
    done = subprocess.run(["bash", "-c", script], input="first\n", capture_output=True, text=True, check=True)
    assert done.stdout == "['first\\n', 'second\\n']\n"


@pytest.mark.parametrize("path", ["/dev/zero", "/tmp", "/nowhere"])
def test_a_file_without_text_is_an_error_that_names_it(path: str):
    assert any(words in error_of(Path(path)) for words in ("is binary", "Is a directory", "No such file"))
