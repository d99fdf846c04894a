"""Public data files as they are published: recognised, asked in the benchmark's words, scored by its metric."""

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
from hetero_kv.evals.formats import infinitebench, longbench
from hetero_kv.evals.formats.format import formats
from hetero_kv.evals.haystack import Haystack
from hetero_kv.evals.sample import Sample
from hetero_kv.evals.tasks import registry
from hetero_kv.evals.tasks.registry import TaskRequest

KV = {"ordered_kv_records": [["k1", "v1"], ["k2", "v2"], ["k3", "v3"]], "key": "k3", "value": "v3"}
RULER = {"index": 0, "input": "A special magic number is hidden ...?", "outputs": ["1234567"], "length": 90}
QASPER = {"input": "Why?", "context": "An article {with braces}.", "answers": ["because", "so"], "dataset": "qasper"}
PASSKEY = {"id": 0, "context": "noise 71432 noise", "input": "What is the pass key?", "answer": ["71432"]}


def written(path, *records) -> object:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def only(path) -> Sample:
    (sample,) = read_data_file(path).samples
    return sample


def test_lost_in_the_middles_prompt_is_worded_and_laid_out_as_published(tmp_path):
    sample = only(written(tmp_path / "kv-retrieval-3_keys.jsonl", KV))
    assert sample.turns == (
        "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
        '{"k1": "v1",\n "k2": "v2",\n "k3": "v3"}\n\nKey: "k3"\nCorresponding value:',
    )
    assert sample.answers == (("v3",),)
    assert sample.depth == 100
    assert sample.metadata == {"pairs": 3, "index": 2}
    task = registry.get(sample.task)
    assert task.score(sample, ["It is V3."]).value == 1
    assert task.score(sample, ["It is v2."]).value == 0


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({**KV, "value": "v1"}, "is not among"),
        ({**KV, "ordered_kv_records": [["k3", "v3"], ["k3", "v4"]]}, "a key twice"),
        ({**KV, "ordered_kv_records": {"k3": "v3"}}, "not a list of"),
        ({**KV, "key": None}, "'key' is NoneType, not a string"),
        ({**RULER, "outputs": []}, "'outputs' is \\[\\], not a list of strings"),
        ({**RULER, "input": "Say hello."}, "worded like none of RULER's tasks"),
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


@pytest.mark.parametrize(
    ("directory", "wording", "task", "tokens"),
    [
        ("niah_multikey_2", "A special magic number is hidden", "ruler/niah_multikey_2", 128),
        ("vt", "track the chain(s) of variable assignment hidden", "ruler/vt", 30),
        ("cwe", "Below is a numbered list of words.", "ruler/cwe", 120),
        ("fwe", "track the frequency of each coded word.", "ruler/fwe", 50),
        ("qa_2", "Answer the question based on the given documents.", "ruler/qa_2", 32),
        ("mine", "A special magic number is hidden", "ruler/niah", 128),
        ("mine", "Answer the question based on the given documents.", "ruler/qa", 32),
        ("mine", "Below is a numbered list of words.", "ruler/cwe", 120),
    ],
)
def test_a_ruler_files_task_is_its_directorys_name_or_its_wording(tmp_path, directory, wording, task, tokens):
    record = {
        "index": 0,
        "input": f"{wording} ...",
        "outputs": ["one", "two"],
        "length": 100,
        "answer_prefix": " It is",
    }
    sample = only(written(tmp_path / directory / "validation.jsonl", record))
    assert (sample.task, sample.max_new_tokens) == (task, tokens)
    assert (sample.turns, sample.answer_prefix, sample.raw_prompt) == ((record["input"],), " It is", False)
    one_of_two = registry.get(task).score(sample, ["ONE"]).value
    assert one_of_two == (1 if "qa" in task else 0.5)


def test_an_older_ruler_files_prompt_ends_with_its_prefix_which_begins_the_answer(tmp_path):
    question = "A special magic number is hidden ...\nWhat is the special magic number for k mentioned?"
    prefix = " The special magic number for k mentioned in the provided text is"
    record = {**RULER, "input": question + prefix}
    sample = only(written(tmp_path / "niah_single_1" / "validation.jsonl", record))
    assert (sample.turns, sample.answer_prefix) == ((question,), prefix)


@pytest.mark.parametrize("opening", ["[INST] ", "<|begin_of_text|><|start_header_id|>user"])
def test_a_ruler_prompt_with_a_chat_template_in_it_gets_no_other(tmp_path, opening):
    record = {**RULER, "input": f"{opening}{RULER['input']} [/INST]", "answer_prefix": " It is"}
    sample = only(written(tmp_path / "niah_single_1" / "validation.jsonl", record))
    assert sample.raw_prompt
    assert sample.turns == (record["input"] + " It is",)
    assert sample.answer_prefix == ""


def test_longbench_is_asked_in_its_datasets_words(tmp_path):
    sample = only(written(tmp_path / "data.jsonl", QASPER))
    assert sample.task == "longbench/qasper"
    assert sample.max_new_tokens == 128
    assert sample.turns[0].startswith("You are given a scientific article and a question. Answer the question as conc")
    assert (
        "\n\nArticle: An article {with braces}.\n\n Answer the question based on the above article" in sample.turns[0]
    )
    assert sample.turns[0].endswith('"unanswerable". Do not provide any explanation.\n\nQuestion: Why?\n\nAnswer:')
    assert not sample.raw_prompt
    assert registry.get(sample.task).score(sample, ["So."]).value == 1


@pytest.mark.parametrize("name", longbench.DATASETS)
def test_every_longbench_dataset_is_asked_and_its_expected_answer_scores_one(tmp_path, name):
    expected = {
        "passage_count": "12",
        "passage_retrieval_en": "Paragraph 12",
        "passage_retrieval_zh": "段落12",
        "multifieldqa_zh": "北京",
    }.get(name, "Dusty reason")
    record = {**QASPER, "context": "CONTEXT", "input": "INPUT", "answers": [expected], "dataset": name}
    record["all_classes"] = ["Dusty reason", "Other"] if name in ("trec", "lsht") else None
    sample = only(written(tmp_path / "data.jsonl", record))
    assert sample.task == f"longbench/{name}"
    assert "CONTEXT" in sample.turns[0]
    has_no_input = name in ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")
    assert ("INPUT" in sample.turns[0]) != has_no_input
    assert "{" not in sample.turns[0]
    assert registry.get(sample.task).score(sample, [expected]).value == pytest.approx(1)
    assert registry.get(sample.task).score(sample, ["?"]).value == 0


def test_few_shot_and_code_datasets_get_no_chat_template_and_few_shot_answers_are_one_line(tmp_path):
    raw = {name for name, dataset in longbench.DATASETS.items() if dataset.is_few_shot}
    assert raw == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    record = {**QASPER, "dataset": "triviaqa"}
    sample = only(written(tmp_path / "data.jsonl", record))
    assert sample.raw_prompt
    assert registry.get(sample.task).score(sample, ["\nbecause\nPassage: more"]).value == 1
    assert registry.get(sample.task).score(sample, ["Passage: more\nbecause"]).value == 0


@pytest.mark.parametrize("name", ["qasper_e.jsonl", "qasper.jsonl.gz", "qasper.jsonl"])
def test_longbenchs_dataset_is_also_known_from_the_files_name(tmp_path, name):
    record = {field: value for field, value in QASPER.items() if field != "dataset"}
    path = written(tmp_path / name, record)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert only(path).task == "longbench/qasper"


def test_longbenchs_best_answer_counts(tmp_path):
    sample = only(written(tmp_path / "data.jsonl", {**QASPER, "answers": ["no idea at all", "green tea"]}))
    assert registry.get(sample.task).score(sample, ["green tea"]).value == 1


def infinitebench_record(name: str) -> dict[str, object]:
    record: dict[str, object] = {"id": 0, "context": "CONTEXT", "input": "INPUT", "answer": ["right"]}
    if name in ("longbook_choice_eng", "code_debug"):
        record |= {"options": ["wrong", "right", "worse", "worst"]}
    if name in ("passkey", "number_string"):
        record |= {"answer": ["71432"]}
    if name == "math_find":
        record |= {"input": "You should answer with only one number. The second largest number of is:", "answer": [37]}
    if name == "math_calc":
        record |= {"answer": [[1, 4, 8]]}
    if name == "code_run":
        record |= {"input": "Please give me the exact number of the return value of func_7(-3).", "answer": [-12]}
    return record


@pytest.mark.parametrize("name", infinitebench.SUBSETS)
def test_every_infinitebench_task_is_asked_and_its_expected_answer_scores_one(tmp_path, name):
    sample = only(written(tmp_path / f"{name}.jsonl", infinitebench_record(name)))
    assert sample.task == f"infinitebench/{name}"
    assert "CONTEXT" in sample.turns[0]
    assert "{" not in sample.turns[0] + sample.answer_prefix
    right = ", ".join(sample.answers[0]) if name == "math_calc" else f"{sample.answers[0][-1]}"
    assert registry.get(sample.task).score(sample, [f" {right}"]).value == pytest.approx(1)
    assert registry.get(sample.task).score(sample, [" ?"]).value == 0


def test_infinitebenchs_cue_begins_the_answer_instead_of_ending_the_question(tmp_path):
    sample = only(written(tmp_path / "passkey.jsonl", PASSKEY))
    assert sample.turns[0] == (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
        "about the important information there.\n\nnoise 71432 noise\n\nWhat is the pass key?\n\n"
    )
    assert (sample.answer_prefix, sample.max_new_tokens) == ("The pass key is", 6)


def test_infinitebenchs_prompts_take_what_their_tasks_add(tmp_path):
    choice = only(written(tmp_path / "longbook_choice_eng.jsonl", infinitebench_record("longbook_choice_eng")))
    assert "Question: INPUT\nA. wrong\nB. right\nC. worse\nD. worst\n" in choice.turns[0]
    assert choice.answers == (("right", "B"),)
    find = only(written(tmp_path / "math_find.jsonl", infinitebench_record("math_find")))
    assert find.turns[0].startswith("What is the second largest number in the following list?\n\nCONTEXT")
    run = only(written(tmp_path / "code_run.jsonl", infinitebench_record("code_run")))
    assert "There is a function called func_7 in" in run.turns[0]
    assert run.answer_prefix == "The value of func_7(-3) is"


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("longbook_choice_eng", {"options": ["a", "b"]}, "2 options, not 4"),
        ("longbook_choice_eng", {"answer": ["other"]}, "not among the options"),
        ("code_run", {"input": "Run it."}, "calls no function"),
        ("math_find", {"input": "Which?"}, "does not say which number"),
    ],
)
def test_an_infinitebench_line_that_lacks_what_its_task_needs_is_skipped(tmp_path, name, change, reason):
    good = infinitebench_record(name)
    data_file = read_data_file(written(tmp_path / f"{name}.jsonl", good, {**good, **change}))
    ((number, told),) = data_file.skipped
    assert number == 2
    assert reason in told


def test_the_formats_of_the_four_benchmarks_are_registered():
    assert {one.name for one in formats()} == {"lost_in_the_middle", "ruler", "longbench", "infinitebench"}
    assert all(one.meaning for one in formats())


def test_what_a_file_gives_can_be_scored_again_by_the_tasks_name_alone(tmp_path):
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
    path = bomb(tmp_path / "line.jsonl.gz", b" " * (1 << 20), 200)
    assert path.stat().st_size < 1 << 20
    text, peak = peak_bytes(lambda: read_data_file(path))
    assert "line 1 has more than 4 MiB; no prompt is as long" in text
    assert peak < 32 << 20


def test_many_lines_that_unpack_without_end_are_not_unpacked(tmp_path, small_limits):
    record = {**KV, "more": "x" * (1 << 20)}
    path = bomb(tmp_path / "lines.jsonl.gz", json.dumps(record).encode() + b"\n", 200)
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
