"""RULER's question answering, built from files in the formats of SQuAD and HotpotQA."""

from __future__ import annotations

import json
import re

import pytest

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.tasks import registry
from hetero_kv.evals.tasks.registry import TaskRequest


def request(data_file, length=600, samples=3, seed=1) -> TaskRequest:
    return TaskRequest((length,), (), samples, seed, None, lambda text: len(text.split()), data_file=data_file)


@pytest.fixture
def squad(tmp_path):
    articles = [
        {
            "paragraphs": [
                {
                    "context": f"River {a}-{p} flows to sea-{a}-{p}. " + "It is long. " * (p + a % 5),
                    "qas": [
                        {
                            "question": f"Where does river {a}-{p} flow?",
                            "is_impossible": False,
                            "answers": [
                                {"text": f"sea-{a}-{p}"},
                                {"text": f"to sea-{a}-{p}"},
                                {"text": f"sea-{a}-{p}"},
                            ],
                        },
                        {"question": f"Who owns river {a}-{p}?", "is_impossible": True, "answers": []},
                    ],
                }
                for p in range(4)
            ]
        }
        for a in range(30)
    ]
    path = tmp_path / "dev-v2.0.json"
    path.write_text(json.dumps({"version": "v2.0", "data": articles}))
    return path


@pytest.fixture
def hotpot(tmp_path):
    records = [
        {
            "question": f"Which of the twins of {n} is older?",
            "answer": f"twin {n}A",
            "context": [[f"Twin {n}A", ["Born first.", f" Lives in {n}."]], [f"Twin {n}B", ["Born last."]]],
        }
        for n in range(80)
    ]
    path = tmp_path / "hotpot_dev_distractor_v1.json"
    path.write_text(json.dumps(records))
    return path


def documents(sample) -> list[str]:
    context = sample.turns[0].split("The following are given documents.\n\n")[1].split("\n\nAnswer the question")[0]
    parts = re.split(r"(?:^|\n\n)Document (\d+):\n", context)
    assert [int(number) for number in parts[1::2]] == list(range(1, len(parts) // 2 + 1))
    return parts[2::2]


def test_a_question_stands_with_its_paragraph_once_among_others(squad):
    for sample in registry.get("ruler/qa_1").generate(request(squad)):
        river = re.search(r"river (\S+) flow", sample.metadata["question"])[1]
        texts = documents(sample)
        assert sum(f"River {river} flows" in text for text in texts) == 1
        assert len(texts) == len(set(texts)) > 10
        assert sample.answers == ((f"sea-{river}", f"to sea-{river}"),)
        assert sample.turns[0].endswith(f"\n\nQuestion: {sample.metadata['question']}")
        assert sample.turns[0].count("Only give me the answer and do not output any other words.") == 2
        assert sample.answer_prefix == " Answer:"
        assert sample.max_new_tokens == 32


def test_paragraphs_of_the_same_article_come_before_those_of_others(squad):
    for sample in registry.get("ruler/qa_1").generate(request(squad)):
        article = re.search(r"river (\d+)-", sample.metadata["question"])[1]
        assert sum(text.startswith(f"River {article}-") for text in documents(sample)) == 4


def test_unanswerable_questions_are_left_out(squad):
    found = [sample.metadata["question"] for sample in registry.get("ruler/qa_1").generate(request(squad, samples=40))]
    assert len(set(found)) == 40
    assert all(question.startswith("Where") for question in found)


def test_every_length_asks_the_same_questions(squad):
    short, long = (
        [sample.metadata["question"] for sample in registry.get("ruler/qa_1").generate(request(squad, length))]
        for length in (400, 900)
    )
    assert short == long


def test_documents_are_repeated_where_there_are_too_few(squad):
    (sample,) = registry.get("ruler/qa_1").generate(request(squad, length=20_000, samples=1))
    texts = documents(sample)
    assert len(texts) > len(set(texts)) == 120
    river = re.search(r"river (\S+) flow", sample.metadata["question"])[1]
    assert sum(f"River {river} flows" in text for text in texts) == 1


def test_a_question_of_several_paragraphs_stands_with_all_of_them(hotpot):
    for sample in registry.get("ruler/qa_2").generate(request(hotpot)):
        twins = re.search(r"of (\d+) is", sample.metadata["question"])[1]
        texts = documents(sample)
        assert texts.count(f"Twin {twins}A\nBorn first. Lives in {twins}.") == 1
        assert texts.count(f"Twin {twins}B\nBorn last.") == 1
        assert sample.answers == ((f"twin {twins}A",),)


def test_one_of_several_right_answers_is_enough(squad):
    task = registry.get("ruler/qa_1")
    sample = next(task.generate(request(squad)))
    assert task.score(sample, [f"Into the {sample.answers[0][0].upper()}!"]).value == 1
    assert task.score(sample, ["the sea"]).value == 0


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
def test_without_its_file_the_task_names_the_file_it_needs(name):
    with pytest.raises(HeteroKVError, match=r"dev-v2\.0\.json|hotpot_dev_distractor_v1\.json"):
        next(registry.get(f"ruler/{name}").generate(request(None)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "is not SQuAD"),
        ('[{"question": "?"}]', "is not SQuAD"),
        ('{"data": []}', "no answerable question"),
    ],
)
def test_a_file_of_another_form_is_named(tmp_path, content, message):
    path = tmp_path / "squad.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(HeteroKVError, match=message) as error:
        next(registry.get("ruler/qa_1").generate(request(path)))
    assert "squad.json" in str(error.value)
