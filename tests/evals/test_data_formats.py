"""Published data files become prompts in the benchmark's words, scored by its metric."""

from __future__ import annotations

import gzip

import pytest

from hetero_kv.evals.data_files import read_data_file
from hetero_kv.evals.formats import infinitebench, longbench
from hetero_kv.evals.formats.format import formats
from hetero_kv.evals.tasks import registry
from tests.evals.data_records import KV, PASSKEY, QASPER, RULER, only, written


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


def test_longbench_prompts_have_the_datasets_words(tmp_path):
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
def test_every_longbench_dataset_loads_and_its_expected_answer_scores_one(tmp_path, name):
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
def test_every_infinitebench_task_loads_and_its_expected_answer_scores_one(tmp_path, name):
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


def test_infinitebenchs_prompts_use_the_fields_of_their_tasks(tmp_path):
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
