"""A damaged, edited or read-only run folder is a HeteroKVError and loses nothing."""

from __future__ import annotations

import errno
import json
import os
import re
import stat

import pytest

from hetero_kv import HeteroKVError
from hetero_kv.cli import main
from hetero_kv.evals import compare
from hetero_kv.evals.checked_lines import with_checksum, without_checksum
from hetero_kv.evals.run_folder import read_results
from tests.evals.counting_runs import OPTIONS, Counting, go

pytestmark = pytest.mark.usefixtures("no_plots")


@pytest.fixture
def out(tmp_path):
    """The folder of a finished run."""
    go(tmp_path / "out", Counting())
    return tmp_path / "out"


def lines_of(out):
    return (out / "results.jsonl").read_text().splitlines()


def answers_of(out):
    """What the results say, but for how long it took."""
    return [(result.sample, result.method, result.predictions, result.score) for result in read_results(out)]


def write_lines(out, lines):
    (out / "results.jsonl").write_text("".join(f"{line}\n" for line in lines))


DAMAGED = (b"{}", b"[]", b"null", b"1", b'"text"', b"", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe{}", b"{", b"NaN")
FIELDS = ("settings", "environment", "settings.methods", "environment.versions", "environment.python")


def refused(out):
    """The message that going on and comparing are refused with."""
    with pytest.raises(HeteroKVError) as going:
        go(out, Counting())
    with pytest.raises(HeteroKVError):
        compare(out, out)
    return str(going.value)


@pytest.mark.parametrize("content", DAMAGED)
def test_settings_of_a_run_that_are_none_are_named(out, content):
    (out / "run.json").write_bytes(content)
    assert f"{str(out / 'run.json')!r} cannot be read" in refused(out)


@pytest.mark.parametrize("value", [None, [], 3, "text", {"full": 3}])
@pytest.mark.parametrize("field", FIELDS)
def test_a_part_of_the_settings_that_is_of_another_kind_is_named(out, field, value):
    content = json.loads((out / "run.json").read_text())
    part = content
    for name in field.split(".")[:-1]:
        part = part[name]
    part[field.split(".")[-1]] = value
    (out / "run.json").write_text(json.dumps(content))
    if (field, value) != ("environment.versions", {"full": 3}) and (field, value) != ("environment.python", "text"):
        assert field.split(".")[-1] in refused(out)


@pytest.mark.parametrize(
    "field", ["settings.baseline", *(f"environment.{name}" for name in ("cpus", "system", "processor"))]
)
def test_a_part_of_the_settings_that_is_missing_is_named(out, field):
    part, name = field.split(".")
    content = json.loads((out / "run.json").read_text())
    del content[part][name]
    (out / "run.json").write_text(json.dumps(content))
    assert f"{field} is missing; restore the file that the run wrote" in refused(out)


@pytest.mark.parametrize("name", ["run.json", "results.jsonl", ".lock", "run.json.partial"])
def test_a_folder_in_the_place_of_a_file_is_named(out, name):
    (out / name).unlink(missing_ok=True)
    (out / name).mkdir()
    with pytest.raises(HeteroKVError, match=re.escape(repr(str(out / name)))):
        go(out, Counting())


@pytest.mark.parametrize("name", ["run.json", "results.jsonl"])
def test_a_folder_in_the_place_of_a_file_is_not_compared(out, name):
    (out / name).unlink()
    (out / name).mkdir()
    with pytest.raises(HeteroKVError, match=f"{re.escape(repr(str(out / name)))} cannot be read: it is no file; "):
        compare(out, out)


def test_a_device_in_the_place_of_a_file_is_not_read_for_ever(out):
    for name in ("run.json", "results.jsonl"):
        kept = (out / name).read_bytes()
        (out / name).unlink()
        (out / name).symlink_to("/dev/zero")
        assert "it is no file" in refused(out)
        (out / name).unlink()
        (out / name).write_bytes(kept)


@pytest.mark.parametrize("content", [line for line in DAMAGED if line])
def test_a_line_that_is_no_result_is_named(out, content):
    lines = (out / "results.jsonl").read_bytes().splitlines()
    (out / "results.jsonl").write_bytes(b"\n".join([lines[0], content, *lines[2:]]) + b"\n")
    assert "line 2 is no result" in refused(out) or "cannot be read: 'utf-8'" in refused(out)


@pytest.mark.parametrize(
    "change", [('"score": 1.0', '"score": 0.5'), ('"score": 1.0', '"score":  1.0'), ("recite/200", "recite/201")]
)
def test_an_edited_line_is_noticed(out, change):
    first, second, *rest = lines_of(out)
    assert change[0] in second
    write_lines(out, [first, second.replace(*change), *rest])
    assert "line 2 is no result (its checksum does not match: it was changed after it was written)" in refused(out)


def test_a_line_that_is_there_twice_is_noticed(out):
    first, second, *rest = lines_of(out)
    write_lines(out, [first, second, *rest, first])
    assert "line 4 is no result (line 1 has this sample and method already); take it out" in refused(out)


def test_a_line_without_a_checksum_is_noticed(out):
    first, *rest = lines_of(out)
    write_lines(out, [without_checksum(first, is_required=True), *rest])
    assert "line 1 is no result (it has no checksum)" in refused(out)


def test_a_line_that_was_taken_out_is_run_again(out):
    before, lines = answers_of(out), lines_of(out)
    write_lines(out, lines[:1] + lines[2:])
    again = Counting()
    go(out, again)
    assert again.samples == ["recite/200/50/0"]
    assert sorted(answers_of(out)) == sorted(before)


def test_a_folder_from_before_there_were_checksums_goes_on(out):
    content = json.loads((out / "run.json").read_text())
    del content["line_checksums"]
    (out / "run.json").write_text(json.dumps(content))
    before = answers_of(out)
    write_lines(out, [without_checksum(line, is_required=True) for line in lines_of(out)[:2]])
    again = Counting()
    go(out, again)
    assert again.samples == ["recite/200/100/0"]
    assert answers_of(out) == before
    assert ["checksum" in line for line in lines_of(out)] == [False, False, True]
    assert len(compare(out, out)) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("score", "1.0"), ("score", None), ("score", True), ("score", 10**400), ("length", 1.5), ("sample", None),
        ("method", 3), ("predictions", "text"), ("expected", [1]), ("parts", {"a": "b"}), ("details", []),
        ("details", {"block_recall": "x"}), ("details", {"curve": {}}), ("cost", {"prefill_s": "x"}), ("cost", None),
        ("depth", "x"), ("skipped", 3), ("prompt", []), ("more", 1),
    ],
)  # fmt: skip
def test_a_line_with_a_value_of_another_kind_is_no_result_whatever_its_checksum(out, field, value):
    first, *rest = lines_of(out)
    plain = {**json.loads(without_checksum(first, is_required=True)), field: value}
    write_lines(out, [with_checksum(json.dumps(plain)), *rest])
    assert "line 1 is no result" in refused(out)


def fail_at(monkeypatch, number):
    """The disk is full at the `number`-th time that something is to be on it."""
    fsync, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    return calls


def test_a_full_disk_is_an_error_that_loses_nothing(tmp_path, monkeypatch):
    go(tmp_path / "whole", Counting())
    whole = answers_of(tmp_path / "whole")
    calls = fail_at(monkeypatch, 0)
    go(tmp_path / "counted", Counting())
    for number in range(1, len(calls) + 1):
        out = tmp_path / str(number)
        with monkeypatch.context() as patch:
            fail_at(patch, number)
            with pytest.raises(HeteroKVError, match="No space left on device; the results so far are kept: free some"):
                go(out, Counting())
        kept = answers_of(out)
        assert kept == whole[: len(kept)]
        go(out, Counting())
        assert [path.name for path in out.rglob("*.partial")] == []
        assert answers_of(out) == whole
        assert (out / "summary.json").read_bytes() == (tmp_path / "whole" / "summary.json").read_bytes()


def test_a_line_that_did_not_fit_is_not_half_there(tmp_path, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        go(out, Counting(until=1))
    (before,) = lines_of(out)
    fail_at(monkeypatch, 2)
    with pytest.raises(HeteroKVError, match="No space left"):
        go(out, Counting())
    assert (out / "results.jsonl").read_text() == f"{before}\n"


def test_files_are_the_users_alone_under_a_umask_that_says_so(tmp_path):
    before = os.umask(0o077)
    try:
        go(tmp_path / "out", Counting())
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert {mode for name, mode in modes.items() if name != ".lock"} == {0o600}


def test_a_resumed_run_removes_temporary_files_of_a_killed_one(out):
    (out / "plots").mkdir()
    for name in ("summary.json.partial", "run.json.partial", "plots/a.png.partial"):
        (out / name).write_text("half")
    go(out, Counting())
    assert list(out.rglob("*.partial")) == []


def test_half_a_character_in_an_answer_is_kept_as_it_is(tmp_path):
    def answer(sample):
        return ["\ud83d \N{SNOWMAN}", "\ude00"]

    done = go(tmp_path, answer)
    assert read_results(tmp_path) == done.results
    assert done.results[0].predictions == ("\ud83d \N{SNOWMAN}", "\ude00")


def test_the_command_ends_with_an_error_and_no_traceback(out, capsys):
    (out / "run.json").write_text("[]")
    assert main(["eval", "--compare", str(out), str(out)]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["eval", "--compare", "x" * 5000, str(out)]) == 2


def test_a_run_has_a_result_per_sample(out):
    assert len(read_results(out)) == len(OPTIONS.depths)
