"""RULER's generators against the published benchmark: wording, counts, uniqueness, positions, frequencies."""

from __future__ import annotations

import re
from collections import Counter
from itertools import cycle, islice

import pytest

from hetero_kv.evals.haystack import NOISE, Haystack
from hetero_kv.evals.sample import Sample
from hetero_kv.evals.tasks import registry
from hetero_kv.evals.tasks.drawing import english_words
from hetero_kv.evals.tasks.registry import TaskRequest
from hetero_kv.evals.tasks.ruler_fwe import frequency

ESSAY = " ".join(f"Sentence {n} of the essay says {'rather ' * (n % 9)}little about anything." for n in range(400))
NEEDLE = re.compile(r"One of the special magic (\w+) for (.+?) is: (\S+)\.(?= |\n|$)")
NUMBER, WORD = r"[1-9]\d{6}", r"[^.]+-[^.]+"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"

# Of each needle task: haystack, needles that are not distractors, answers, keys, values.
NIAH = {
    "niah_single_1": ("noise", 1, 1, WORD, NUMBER),
    "niah_single_2": ("essay", 1, 1, WORD, NUMBER),
    "niah_single_3": ("essay", 1, 1, WORD, UUID),
    "niah_multikey_1": ("essay", 4, 1, WORD, NUMBER),
    "niah_multikey_2": ("needle", 1, 1, WORD, NUMBER),
    "niah_multikey_3": ("needle", 1, 1, UUID, UUID),
    "niah_multivalue": ("essay", 4, 4, WORD, NUMBER),
    "niah_multiquery": ("essay", 4, 4, WORD, NUMBER),
}


def samples(name: str, length: int = 4096, number: int = 3) -> list[Sample]:
    count = re.compile(r"\w+|[^\w\s]")
    request = TaskRequest(
        (length,), (), number, 11, Haystack(ESSAY, "essay"), lambda text: sum(1 for _ in count.finditer(text))
    )
    return list(registry.get(f"ruler/{name}").generate(request))


@pytest.mark.parametrize("name", NIAH)
def test_needles_have_the_published_number_form_and_haystack(name):
    haystack, needles, answers, key_form, value_form = NIAH[name]
    for sample in samples(name):
        context = "\n".join(sample.turns[0].split("\n")[1:-1])
        found = NEEDLE.findall(context)
        kind = "uuids" if value_form == UUID else "numbers"
        assert {one for one, _, _ in found} == {kind}
        assert all(re.fullmatch(key_form, key) and re.fullmatch(value_form, value) for _, key, value in found)
        assert len({value for _, _, value in found}) == len(found)
        assert len({key for _, key, _ in found}) == (1 if name == "niah_multivalue" else len(found))
        assert len(sample.answers[0]) == answers
        if haystack == "needle":
            assert len(found) == len(context.split("\n")) > 50
        else:
            assert len(found) == needles
            rest = re.findall(r"\w+", NEEDLE.sub("", context))
            text = re.findall(r"\w+", NOISE if haystack == "noise" else ESSAY)
            assert rest == list(islice(cycle(text), len(rest)))


@pytest.mark.parametrize("name", NIAH)
def test_the_answers_are_the_values_of_the_queried_keys_and_occur_once(name):
    for sample in samples(name):
        question = sample.turns[0].split("\n")[-1]
        values: dict[str, list[str]] = {}
        for _, key, value in NEEDLE.findall(sample.turns[0]):
            values.setdefault(key, []).append(value)
        queried = sample.metadata["queries"]
        assert [key for key in values if key in question] != []
        assert sorted(sample.answers[0]) == sorted(value for key in queried for value in values[key])
        assert all(key in question for key in queried)
        assert not [key for key in values if key not in queried and f"{key} " in question.replace(",", " ")]
        assert all((sample.turns[0] + sample.answer_prefix).count(value) == 1 for value in sample.answers[0])


def test_a_question_for_one_value_is_in_the_singular():
    sample = samples("niah_single_1", number=1)[0]
    (key,) = sample.metadata["queries"]
    lines = sample.turns[0].split("\n")
    assert lines[0] == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards."
    )
    assert lines[-1] == f"What is the special magic number for {key} mentioned in the provided text?"
    assert sample.answer_prefix == f" The special magic number for {key} mentioned in the provided text is"
    assert sample.max_new_tokens == 128


def test_a_question_for_several_values_is_in_the_plural():
    sample = samples("niah_multiquery", number=1)[0]
    first, second, third, last = sample.metadata["queries"]
    keys = f"{first}, {second}, {third}, and {last}"
    lines = sample.turns[0].split("\n")
    assert lines[0] == (
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the numbers afterwards."
    )
    assert lines[-1] == f"What are all the special magic numbers for {keys} mentioned in the provided text?"
    assert sample.answer_prefix == f" The special magic numbers for {keys} mentioned in the provided text are"


def test_noise_stands_in_whole_lines_with_the_needle_on_its_own():
    for sample in samples("niah_single_1"):
        *noise, last = [line for line in sample.turns[0].split("\n")[1:-1] if not NEEDLE.match(line)]
        assert set(noise) == {NOISE}
        assert NOISE.startswith(last)


def test_needles_lie_at_different_places_in_different_samples():
    for name in ("niah_single_1", "niah_single_2", "niah_multikey_3"):
        places = [s.turns[0].index(s.answers[0][0]) / len(s.turns[0]) for s in samples(name, length=2048, number=12)]
        assert max(places) - min(places) > 0.4


def test_variables_form_one_chain_of_four_hops_in_order_after_a_worked_example():
    for sample in samples("vt"):
        example, context = sample.turns[0].split("\n\nMemorize and track")
        names = sample.answers[0]
        value = sample.metadata["value"]
        expected = [f"VAR {names[0]} = {value}"]
        expected += [f"VAR {names[i + 1]} = VAR {names[i]}" for i in range(4)]
        assert [line for line in context.split("\n") if line.startswith("VAR")] == expected
        assert all(re.fullmatch(r"[A-Z]{5}", name) for name in names)
        assert len(set(names)) == 5
        assert re.fullmatch(r"[1-9]\d{4}", value)
        assert context.endswith(f"Question: Find all variables that are assigned the value {value} in the text above.")
        assert sample.answer_prefix == (
            " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are assigned the "
            f"value {value}, they are: "
        )
        assert sample.max_new_tokens == 30
        shown = re.search(r"they are:  ?((?:[A-Z]{3} ?){5})$", example)[1].split()
        assert re.findall(r"VAR ([A-Z]{3}) =", example) == shown
        assert value not in example
        assert not any(name in example for name in names)


def test_common_words_occur_thirty_times_and_others_three_times():
    sample = samples("cwe", number=1)[0]
    assert (sample.metadata["common"], sample.metadata["uncommon"]) == (30, 3)
    _check_common_words(sample, common=30, uncommon=3, example=(40, 10, 3))


def test_common_words_of_short_prompts_occur_six_times_and_others_once():
    _check_common_words(samples("cwe", length=2048, number=1)[0], common=6, uncommon=1, example=(20, 3, 1))


def _check_common_words(sample: Sample, common: int, uncommon: int, example: tuple[int, int, int]) -> None:
    shown, queried = (part for part in sample.turns[0].split("Below is a numbered list of words.") if part)
    words = _numbered(queried.split("\n")[1])
    counts = Counter(words)
    assert {word for word, times in counts.items() if times == common} == set(sample.answers[0])
    assert len(sample.answers[0]) == 10
    assert set(counts.values()) == {common, uncommon}
    assert set(counts) <= set(english_words())
    assert sample.max_new_tokens == 120

    example_words, example_common, example_uncommon = example
    example_counts = Counter(_numbered(shown.split("\n")[1]))
    assert len(example_counts) == example_words
    answered = _numbered(shown.split("in the list are: ")[1].strip())
    assert Counter(example_counts.values()) == {example_common: 10, example_uncommon: example_words - 10}
    assert {word for word, times in example_counts.items() if times == example_common} == set(answered)
    assert not set(example_counts) & set(counts)


def _numbered(text: str) -> list[str]:
    """The words of "1. a 2. b", whose numbers must be in order."""
    parts = re.split(r"(?:^| )(\d+)\. ", text)
    assert [int(number) for number in parts[1::2]] == list(range(1, len(parts) // 2 + 1))
    return parts[2::2]


def test_where_the_vocabulary_ends_uncommon_words_are_pairs_and_all_different():
    (sample,) = samples("cwe", length=130_000, number=1)
    queried = sample.turns[0].split("Below is a numbered list of words.")[-1]
    counts = Counter(_numbered(queried.split("\n")[1]))
    assert len(counts) > len(english_words())
    assert set(counts.values()) == {30, 3}


def test_coded_words_follow_a_zeta_distribution_whose_head_is_noise():
    for sample in samples("fwe"):
        text = re.search(r"coded words\. (.*)\nQuestion", sample.turns[0])[1]
        counts = Counter(text.split()).most_common()
        assert counts[0][0] == "..."
        assert tuple(word for word, _ in counts[1:4]) == sample.answers[0]
        assert [times for _, times in counts] == [
            frequency(rank, sample.metadata["drawn"]) for rank in range(1, len(counts) + 1)
        ]
        assert counts[3][1] > counts[4][1]
        assert all(re.fullmatch(r"[a-z]{6}", word) for word, _ in counts[1:])
        assert sample.max_new_tokens == 50


def test_the_zeta_distributions_frequencies_sum_to_the_words_drawn():
    assert sum(frequency(rank, 10**6) for rank in range(1, 2000)) == pytest.approx(10**6, rel=0.002)
    assert frequency(1, 10**6) / frequency(2, 10**6) == pytest.approx(4, rel=1e-4)
