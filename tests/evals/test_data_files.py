"""Public data files: samples, skipped lines, and how much of a file is read."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals import text_files
from hetero_kv.evals.data_files import read_data_file
from hetero_kv.evals.haystack import Haystack
from hetero_kv.evals.sample import Sample
from hetero_kv.evals.tasks import registry
from hetero_kv.evals.tasks.registry import TaskRequest
from tests.evals.data_records import KV, PASSKEY, QASPER, RULER, written


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({**KV, "value": "v1"}, "is not among"),
        ({**KV, "ordered_kv_records": [["k3", "v3"], ["k3", "v4"]]}, "a key twice"),
        ({**KV, "ordered_kv_records": {"k3": "v3"}}, "not a list of"),
        ({**KV, "key": None}, "'key' is NoneType, not a string"),
        ({**RULER, "outputs": []}, "'outputs' is \\[\\], not a list of strings"),
        ({**RULER, "input": "Say hello."}, "does not match any of RULER's tasks"),
        ({**QASPER, "dataset": "squad"}, "'squad' is none of LongBench's: narrativeqa"),
        ({**QASPER, "dataset": "trec"}, "needs the field 'all_classes'"),
        ({**QASPER, "context": 3}, "'context' is int"),
        (PASSKEY, "name it <task>.jsonl after one of: passkey"),
        ({"prompt": "hello"}, "fields prompt are of no known format"),
        ([1], "not a JSON object but list"),
    ],
)
def test_an_unusable_line_is_skipped_with_its_number_and_the_reason(tmp_path, record, reason):
    data_file = read_data_file(written(tmp_path / "data.jsonl", KV, record, RULER))
    assert [sample.answers for sample in data_file.samples] == [(("v3",),), (("1234567",),)]
    ((number, told),) = data_file.skipped
    assert number == 2
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(told)


def test_broken_json_is_skipped_and_empty_lines_only_counted(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n" + json.dumps(KV).encode() + b'\n\n{"input": \n\xff\n')
    data_file = read_data_file(path)
    assert len(data_file.samples) == 1
    assert [number for number, _ in data_file.skipped] == [4, 5]
    assert all(reason.startswith("not JSON") for _, reason in data_file.skipped)


def test_a_gzipped_file_is_read_as_the_plain_one(tmp_path):
    plain = written(tmp_path / "qasper.jsonl", QASPER, QASPER)
    packed = tmp_path / "qasper.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_data_file(packed).samples == read_data_file(plain).samples


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "cannot be read"),
        ("empty.jsonl", b"", "the file is empty"),
        ("broken.jsonl.gz", b"not gzip", "cannot be read"),
        ("cut.jsonl.gz", gzip.compress(b"{}\n" * 1000, mtime=0)[:-20], "cannot be read"),
        ("text.jsonl", b"hello\n", "line 1: not JSON"),
    ],
)
def test_a_file_without_a_usable_line_is_an_error(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(HeteroKVError, match=message) as error:
        read_data_file(tmp_path / name)
    assert name in str(error.value)


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)))
def test_whatever_a_field_holds_is_a_sample_or_a_reason_and_never_a_crash(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("fields") / "passkey.jsonl"
    bent = [{**record, field: value} for record in (KV, RULER, QASPER, PASSKEY) for field in record]
    data_file = read_data_file(written(path, KV, *bent))
    assert len(data_file.samples) + len(data_file.skipped) == 1 + len(bent)


def test_identities_tell_lines_apart_and_do_not_depend_on_where_the_file_lies(tmp_path):
    here = read_data_file(written(tmp_path / "a" / "qasper.jsonl", QASPER, QASPER, {**QASPER, "input": "How?"}))
    there = read_data_file(written(tmp_path / "b" / "qasper.jsonl", QASPER, QASPER, {**QASPER, "input": "How?"}))
    ids = [sample.id for sample in here.samples]
    assert len(set(ids)) == 3
    assert ids == [sample.id for sample in there.samples]
    other = read_data_file(written(tmp_path / "other" / "qasper.jsonl", {**QASPER, "input": "When?"}))
    assert other.samples[0].id not in ids


@pytest.mark.parametrize("name", [*registry.data_file_names()])
def test_tasks_of_data_files_cannot_be_generated_and_say_so(name):
    task = registry.get(name)
    assert task.from_data_file
    assert name not in registry.names()
    with pytest.raises(HeteroKVError, match="give it with --data"):
        task.generate(TaskRequest((1024,), (), 1, 0, None, len))


def test_answers_of_a_file_can_be_scored_again_by_the_tasks_name_alone(tmp_path):
    records = [KV, RULER, QASPER]
    for sample in read_data_file(written(tmp_path / "mixed.jsonl", *records)).samples:
        again = Sample(**{field: getattr(sample, field) for field in sample.__dataclass_fields__})
        assert registry.get(again.task).score(again, [sample.answers[0][0]]).value == 1


@pytest.fixture
def small_limits(monkeypatch):
    """Limits of files that a test can reach without gigabytes."""
    monkeypatch.setattr(text_files, "LONGEST_LINE", 4 << 20)
    monkeypatch.setattr(text_files, "MOST_BYTES", 16 << 20)


def bomb(path, line, lines):
    """A gzipped file of some kilobytes that unpacks to `lines` times `line`, written piece by piece."""
    with gzip.open(path, "wb") as file:
        for _ in range(lines):
            file.write(line)
    return path


def peak_bytes(function):
    tracemalloc.start()
    try:
        with pytest.raises(HeteroKVError) as raised:
            function()
        return str(raised.value), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_line_that_unpacks_without_end_is_not_unpacked(tmp_path, small_limits):
    path = bomb(tmp_path / "line.jsonl.gz", b" " * (1 << 20), 60)
    assert path.stat().st_size < 1 << 20
    text, peak = peak_bytes(lambda: read_data_file(path))
    assert "line 1 has more than 4 MiB; no prompt is as long" in text
    assert peak < 32 << 20


def test_many_lines_that_unpack_without_end_are_not_unpacked(tmp_path, small_limits):
    record = {**KV, "more": "x" * (1 << 20)}
    path = bomb(tmp_path / "lines.jsonl.gz", json.dumps(record).encode() + b"\n", 100)
    text, peak = peak_bytes(lambda: read_data_file(path))
    assert "it has more than 16 MiB of text" in text
    assert peak < 64 << 20


def test_lines_without_content_are_text_too(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "MOST_BYTES", 1 << 20)
    path = bomb(tmp_path / "empty.jsonl.gz", b"\n" * (1 << 20), 3)
    with pytest.raises(HeteroKVError, match="it has more than 1 MiB of text"):
        read_data_file(path)


def test_a_haystack_and_a_file_without_end_have_the_same_limits(tmp_path, small_limits):
    for path in (bomb(tmp_path / "hay.txt.gz", b"A word. " * (1 << 17), 40), Path("/dev/zero")):
        assert "more than 16 MiB" in peak_bytes(lambda path=path: Haystack.from_file(path))[0]
    assert "line 1 has more than 4 MiB" in peak_bytes(lambda: read_data_file("/dev/zero"))[0]


def test_more_broken_lines_than_anyone_looks_at_end_the_reading(tmp_path):
    path = bomb(tmp_path / "broken.jsonl.gz", b"x\n" * 1000, 20)
    with pytest.raises(HeteroKVError, match=r"more than 10,000 lines cannot be used; line 1: not JSON"):
        read_data_file(path)


@pytest.mark.parametrize("line", [b"[" * 200_000, b'{"a":' * 200_000, b'{"a":' + b"1" * 5000 + b"}"])
def test_json_that_python_cannot_read_is_a_broken_line(tmp_path, line):
    (tmp_path / "kv.jsonl").write_bytes(json.dumps(KV).encode() + b"\n" + line)
    assert [number for number, _ in read_data_file(tmp_path / "kv.jsonl").skipped] == [2]


def test_the_reason_for_a_broken_line_is_short(tmp_path):
    path = written(tmp_path / "kv.jsonl", KV, {"x" * 100_000: 1, **{f"field {n}": 1 for n in range(1000)}})
    ((_, reason),) = read_data_file(path).skipped
    assert len(reason) <= 500
