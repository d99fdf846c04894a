"""Needle, passkey, key-value retrieval and multi-turn needle against their descriptions."""

from __future__ import annotations

import json
import re

import pytest

from hetero_kv.evals.haystack import Haystack
from hetero_kv.evals.sample import Sample
from hetero_kv.evals.tasks import needle, registry
from hetero_kv.evals.tasks.registry import TaskRequest

DEPTHS = (0.0, 10.0, 33.0, 50.0, 90.0, 100.0)
ESSAY = " ".join(f"Sentence {n} of the essay says {'rather ' * (n % 9)}little about anything." for n in range(400))


def samples(name: str, length: int = 3000, depths=DEPTHS, haystack: Haystack | None = None) -> list[Sample]:
    request = TaskRequest((length,), depths, 2, 5, haystack, lambda text: len(re.findall(r"\w+|[^\w\s]", text)))
    return list(registry.get(name).generate(request))


@pytest.mark.parametrize("haystack", [None, Haystack(ESSAY, "essay")], ids=["noise", "essay"])
@pytest.mark.parametrize("name", ["needle", "passkey"])
def test_the_answer_lies_at_its_depth_and_nowhere_else(name, haystack):
    for sample in samples(name, haystack=haystack):
        ((value,),) = sample.answers
        hidden = sample.metadata["needle"] if name == "needle" else f"The pass key is {value}. Remember it."
        text, opening = sample.turns[0], "There is an important info" if name == "passkey" else ""
        assert text.startswith(opening)
        assert text.count(hidden) == 1
        assert text.count(value) == (1 if name == "needle" else 2)
        start = len(text.split("\n")[0]) + 1 if name == "passkey" else 0
        end = text.rindex("\n") if name == "passkey" else text.index("\n\n")
        place = 100 * (text.index(hidden) - start) / (end - start - len(hidden))
        assert place == pytest.approx(sample.depth, abs=1.5)


def test_a_needle_stands_between_two_sentences():
    for sample in samples("needle", haystack=Haystack(ESSAY, "essay")):
        before, after = sample.turns[0].split(sample.metadata["needle"])
        assert before == "" or before.endswith(". ")
        assert after.startswith((" Sentence", "\n\n"))


def test_a_needle_is_a_citys_number_of_seven_digits_and_the_question_names_the_city():
    for sample in samples("needle"):
        city, value = re.fullmatch(
            r"The special magic ([A-Z]\w+) number is: ([1-9]\d{6})\.", sample.metadata["needle"]
        ).groups()
        assert sample.answers == ((value,),)
        assert f"What is the special magic {city} number?" in sample.turns[0].split("\n\n")[1]


def test_no_citys_name_is_part_of_anothers():
    for city in needle.CITIES:
        assert [other for other in needle.CITIES if city in other] == [city]


def test_a_passkey_prompt_is_worded_as_in_the_papers():
    (sample, _) = samples("passkey", depths=(50.0,))
    ((key,),) = sample.answers
    assert re.fullmatch(r"[1-9]\d{4}", key)
    lines = sample.turns[0].split("\n")
    assert lines[0].endswith("Find it and memorize them. I will quiz you about the important information there.")
    assert f". The pass key is {key}. Remember it. {key} is the pass key. " in lines[1]
    assert lines[1].startswith(
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    )
    assert lines[2] == "What is the pass key?"
    assert sample.answer_prefix == "The pass key is"


def test_a_passkey_is_scored_exactly_and_by_digits_in_their_place():
    task = registry.get("passkey")
    (sample, _) = samples("passkey", depths=(50.0,))
    ((key,),) = sample.answers
    wrong = str((int(key[0]) + 1) % 10) + key[1:]
    assert task.score(sample, [f" {key}. It is {wrong}."]).parts == {"exact": 1.0, "digits": 1.0}
    assert task.score(sample, [f" {wrong}, or {key}"]).value == 0
    assert task.score(sample, [f" {wrong}"]).parts["digits"] == pytest.approx(0.8)
    assert task.score(sample, [f" {key[:3]}"]).parts == {"exact": 0.0, "digits": pytest.approx(0.6)}


def test_kv_retrieval_is_a_json_object_of_distinct_uuids_with_the_queried_pair_at_its_depth():
    for sample in samples("kv_retrieval"):
        ((value,),) = sample.answers
        lines = sample.turns[0].split("\n")
        assert lines[0] == "Extract the value corresponding to the specified key in the JSON object below."
        assert lines[1:3] == ["", "JSON data:"]
        assert lines[-3:-2] == [""]
        assert lines[-1] == "Corresponding value:"
        records = json.loads("\n".join(lines[3:-3]))
        key = re.fullmatch(r'Key: "(.*)"', lines[-2])[1]
        assert records[key] == value
        assert list(records).index(key) == sample.metadata["index"]
        assert sample.metadata["index"] == round(sample.depth / 100 * (len(records) - 1))
        assert sample.metadata["pairs"] == len(records) == len(lines) - 6
        assert len({*records, *records.values()}) == 2 * len(records)
        uuid4 = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
        assert all(re.fullmatch(uuid4, one) for one in (*records, *records.values()))
        assert sample.turns[0].count(value) == 1


def test_kv_retrieval_takes_more_pairs_for_more_tokens():
    few, many = (samples("kv_retrieval", length, (50.0,))[0].metadata["pairs"] for length in (1000, 4000))
    assert many / few == pytest.approx(4, rel=0.1)


def test_each_turn_asks_for_another_needle_of_the_same_text():
    for sample in samples("multi_turn_needle"):
        text, question = sample.turns[0].split("\n\n")
        assert len(sample.turns) == len(sample.answers) == 4
        assert len({value for (value,) in sample.answers}) == 4
        assert "special magic" in question
        cities = [
            re.search(r"What is the special magic (\w+) number\?", turn)[1] for turn in (question, *sample.turns[1:])
        ]
        assert len(set(cities)) == 4
        for city, (value,) in zip(cities, sample.answers, strict=True):
            assert text.count(f"The special magic {city} number is: {value}.") == 1
            assert sum(turn.count(value) for turn in sample.turns) == 1


def test_a_multi_turn_texts_quarters_have_one_needle_each_queried_in_random_order():
    orders = set()
    for seed in range(6):
        request = TaskRequest((3000,), (), 1, seed, None, lambda text: len(text.split()))
        (sample,) = registry.get("multi_turn_needle").generate(request)
        text = sample.turns[0].split("\n\n")[0]
        places = [text.index(value) / len(text) for (value,) in sample.answers]
        assert places == pytest.approx([depth / 100 for depth in sample.metadata["depths"]], abs=0.02)
        assert sorted(int(depth // 25) for depth in sample.metadata["depths"]) == [0, 1, 2, 3]
        orders.add(tuple(int(depth // 25) for depth in sample.metadata["depths"]))
    assert len(orders) > 1


def test_the_score_of_turns_is_their_mean_and_each_is_told():
    task = registry.get("multi_turn_needle")
    sample = samples("multi_turn_needle")[0]
    values = [value for (value,) in sample.answers]
    score = task.score(sample, [f"It is {values[0]}.", values[0], values[2], ""])
    assert score.value == 0.5
    assert score.parts == {"turn_1": 1.0, "turn_2": 0.0, "turn_3": 1.0, "turn_4": 0.0}
