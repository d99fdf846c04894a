"""Properties of every task with generated samples: seeds, identities, lengths, errors."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from itertools import accumulate, cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.haystack import Haystack
from hetero_kv.evals.sample import Sample
from hetero_kv.evals.tasks import registry
from hetero_kv.evals.tasks.fitting import adjusted, fit
from hetero_kv.evals.tasks.generated import GeneratedTask
from hetero_kv.evals.tasks.registry import TaskRequest
from tests.support.slow_variants import with_few

GENERATED = [name for name in registry.names() if isinstance(registry.get(name), GeneratedTask)]
TEMPLATE_TOKENS = 17
ESSAY = " ".join(f"Sentence {n} of the essay says {'rather ' * (n % 9)}little about anything." for n in range(400))


def count(text: str) -> int:
    """Words and punctuation marks: finer than white space, and fast."""
    return len(re.findall(r"\w+|[^\w\s]", text))


@pytest.fixture(scope="module")
def squad(tmp_path_factory):
    """SQuAD's form with made-up content, good for both readers' tests of lengths."""
    paragraphs = [
        {
            "context": f"Paragraph {n} tells that the answer to riddle {n} is solution-{n}. "
            + "It goes on. " * (n % 30),
            "qas": [
                {"question": f"What solves riddle {n}?", "is_impossible": False, "answers": [{"text": f"solution-{n}"}]}
            ],
        }
        for n in range(200)
    ]
    path = tmp_path_factory.mktemp("squad") / "dev-v2.0.json"
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs[at : at + 10]} for at in range(0, 200, 10)]}))
    return path


@pytest.fixture(scope="module")
def hotpot(tmp_path_factory):
    """HotpotQA's form with made-up content."""
    records = [
        {
            "question": f"Who built tower {n}?",
            "answer": f"builder-{n}",
            "context": [[f"Tower {n}.{i}", [f"Tower {n}.{i} is old.", " It stands."] * (1 + i)] for i in range(3)],
        }
        for n in range(120)
    ]
    path = tmp_path_factory.mktemp("hotpot") / "hotpot_dev_distractor_v1.json"
    path.write_text(json.dumps(records))
    return path


@pytest.fixture
def generate(squad, hotpot):
    """Samples of a task by name, with sensible defaults for all else."""

    def samples(name: str, **changes) -> list[Sample]:
        data_file = {"ruler/qa_1": squad, "ruler/qa_2": hotpot}.get(name)
        request = {
            "lengths": (4096,),
            "depths": (0.0, 50.0, 100.0),
            "samples": 2,
            "seed": 7,
            "haystack": None,
            "count_tokens": count,
            "template_tokens": TEMPLATE_TOKENS,
            "data_file": data_file,
        }
        return list(registry.get(name).generate(TaskRequest(**{**request, **changes})))

    return samples


def prompt_tokens(sample: Sample, count_tokens=count) -> int:
    prefix = count_tokens(sample.answer_prefix) if sample.answer_prefix else 0
    return count_tokens(sample.turns[0]) + prefix + TEMPLATE_TOKENS


def test_the_tasks_of_the_papers_are_registered():
    ruler = {f"niah_single_{n}" for n in (1, 2, 3)} | {f"niah_multikey_{n}" for n in (1, 2, 3)}
    ruler |= {"niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"}
    assert len(ruler) == 13
    assert {"needle", "passkey", "kv_retrieval", "multi_turn_needle"} | {f"ruler/{n}" for n in ruler} == set(GENERATED)


@pytest.mark.parametrize("name", GENERATED)
def test_every_task_has_a_description(name):
    task = registry.get(name)
    assert task.name == name
    assert task.meaning
    assert not task.from_data_file


@pytest.mark.parametrize("haystack", [None, Haystack(ESSAY, "essay")], ids=["noise", "essay"])
@pytest.mark.parametrize("name", GENERATED)
def test_a_prompt_has_its_length_within_one_per_cent(generate, name, haystack):
    for sample in generate(name, lengths=(2048, 4096), haystack=haystack, depths=(50.0,), samples=1):
        assert abs(prompt_tokens(sample) - sample.length) <= 0.01 * sample.length


@pytest.mark.model
@pytest.mark.parametrize("length", with_few([1024, 8192]))
@pytest.mark.parametrize("name", GENERATED)
def test_a_prompt_has_its_length_within_one_per_cent_of_a_real_tokenizers_tokens(
    generate, smollm2_tokenizer, name, length
):
    def tokens(text: str) -> int:
        return len(smollm2_tokenizer(text, add_special_tokens=False)["input_ids"])

    for sample in generate(name, lengths=(length,), depths=(30.0,), samples=2, count_tokens=tokens):
        assert abs(prompt_tokens(sample, tokens) - length) <= 0.01 * length


@pytest.mark.parametrize("name", GENERATED)
def test_the_same_seed_gives_the_same_samples_and_another_seed_others(generate, name):
    assert generate(name) == generate(name)
    others = generate(name, seed=8)
    assert all(one.turns != other.turns for one, other in zip(generate(name), others, strict=True))


@pytest.mark.parametrize("name", GENERATED)
def test_a_lengths_samples_do_not_depend_on_the_other_lengths(generate, name):
    alone = {sample.id: sample for sample in generate(name, lengths=(4096,), depths=(50.0,), samples=1)}
    among = {sample.id: sample for sample in generate(name, lengths=(2048, 4096), depths=(0.0, 50.0), samples=2)}
    assert alone.items() <= among.items()


@pytest.mark.parametrize("name", GENERATED)
def test_identities_are_unique_and_say_task_length_depth_and_number(generate, name):
    samples = generate(name, lengths=(2048, 4096))
    ids = [sample.id for sample in samples]
    depths = ["/0", "/50", "/100"] if registry.get(name).uses_depth else [""]
    assert ids == [f"{name}/{length}{depth}/{n}" for length in (2048, 4096) for depth in depths for n in (0, 1)]
    assert len({sample.turns for sample in samples}) == len(samples)
    assert {sample.task for sample in samples} == {name}


@pytest.mark.parametrize("name", GENERATED)
def test_the_expected_answer_scores_one_and_silence_nothing(generate, name):
    for sample in generate(name):
        score = registry.get(name).score(sample, [f" {', '.join(answers)}." for answers in sample.answers])
        assert score.value == 1
        assert registry.get(name).score(sample, [""] * len(sample.turns)).value == 0


@pytest.mark.parametrize("name", GENERATED)
def test_a_length_that_cannot_hold_the_task_is_refused_with_what_the_task_takes(generate, name):
    with pytest.raises(HeteroKVError, match=f"task {name}: length 20 is too small") as error:
        generate(name, lengths=(20,))
    least = int(re.search(r"has some (\d+) tokens", str(error.value))[1])
    assert generate(name, lengths=(least + least // 2,), depths=(0.0,), samples=1)


@pytest.mark.parametrize("name", [name for name in GENERATED if registry.get(name).uses_depth])
def test_samples_have_the_requested_depths(generate, name):
    with pytest.raises(HeteroKVError, match="no depth is given"):
        generate(name, depths=())
    with pytest.raises(HeteroKVError, match="depth 101"):
        generate(name, depths=(101.0,))


def test_samples_are_the_same_in_every_process():
    """Nothing depends on Python's salted hashes."""
    script = (
        "from hetero_kv.evals.tasks import registry; import hashlib; from hetero_kv.evals.tasks.registry import *\n"
        "r = TaskRequest((2048,), (50.0,), 1, 3, None, lambda text: len(text.split()))\n"
        "names = [n for n in registry.names() if not n.startswith('ruler/qa')]\n"
        "text = repr([list(registry.get(n).generate(r)) for n in names]).encode()\n"
        "print(hashlib.sha256(text).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_random_material_is_the_same_on_every_machine(generate):
    """A change of this digest means that results of earlier runs cannot be compared with later ones."""
    (sample,) = generate("kv_retrieval", lengths=(1024,), depths=(50.0,), samples=1)
    assert hashlib.sha256(sample.turns[0].encode()).hexdigest()[:16] == "7bfefb8a64af8a91"


def test_an_unknown_task_is_refused_with_the_nearest_and_all_known():
    with pytest.raises(HeteroKVError, match=r"did you mean 'passkey'.*ruler/qa_2"):
        registry.get("paskey")


@given(
    target=st.integers(100, 3000),
    around=st.integers(0, 50),
    sizes=st.lists(st.integers(1, 40), min_size=5, max_size=40),
)
def test_no_number_of_units_comes_nearer_to_the_length_than_the_one_chosen(target, around, sizes):
    total = list(accumulate(islice(cycle(sizes), 3 * target), initial=around))
    found = fit(str, lambda text: total[int(text)], target, "task")
    off = abs(found.tokens - target)
    # Either near enough to stop at, or the best there is.
    assert off <= max(1, 0.001 * target) or off == min(abs(tokens - target) for tokens in total[1:])


def test_a_long_prompt_is_fitted_in_few_tokenisations():
    calls = []

    def count_tokens(text: str) -> int:
        calls.append(len(text))
        return len(text.split())

    found = fit(lambda units: "a few words " * units, count_tokens, 120_000, "task")
    assert found.tokens == pytest.approx(120_000, rel=0.001)
    assert len(calls) <= 4


@given(st.integers(-30, 30), st.integers(0, 2**32))
def test_redrawn_units_come_nearer_to_what_is_missing_and_are_left_alone_when_nothing_is(missing, seed):
    rng = random.Random(seed)
    units = ["x" * rng.randrange(5, 15) for _ in range(12)]
    result = adjusted(units, missing, 1000, lambda: "x" * rng.randrange(5, 15), len)
    left = missing - (sum(map(len, result)) - sum(map(len, units)))
    assert abs(left) <= abs(missing)
    assert len(result) == len(units)
    if abs(missing) <= 5:
        assert result == units


def test_a_length_beyond_all_that_there_is_to_ask_about_is_an_error():
    words = ["one", "two", "three"]
    with pytest.raises(HeteroKVError, match="length 500 is too great, its longest prompt has some 3 tokens"):
        fit(lambda count: " ".join(words[:count]), lambda text: len(text.split()), 500, "words")
