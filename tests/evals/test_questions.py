"""Evaluations mark where a prompt's text ends and its question begins."""

from __future__ import annotations

import pytest

from hetero_kv.evals import ConfiguredModel, config_specs
from hetero_kv.evals.formats.format import Line
from hetero_kv.evals.formats.infinitebench import InfiniteBench
from hetero_kv.evals.formats.longbench import LongBench
from hetero_kv.evals.formats.lost_in_the_middle import LostInTheMiddle
from hetero_kv.evals.formats.ruler import Ruler
from hetero_kv.evals.prompt import Prompt
from hetero_kv.evals.sample import Sample
from hetero_kv.evals.tasks import registry
from hetero_kv.evals.tasks.registry import TaskRequest
from tests.support.tiny_evaluation import SPARSE, tiny_loaded

QUESTIONS = {
    "needle": "What is the special magic ",
    "passkey": "What is the pass key?",
    "kv_retrieval": 'Key: "',
    "multi_turn_needle": "What is the special magic ",
    "ruler/niah_multikey_2": "What is the special magic ",
    "ruler/vt": "Question: Find all variables",
    "ruler/cwe": "Question: What are the 10 most common words",
    "ruler/fwe": "Question: Do not provide any explanation.",
}


@pytest.mark.parametrize("task", QUESTIONS)
def test_a_generated_prompt_ends_with_its_question(task):
    request = TaskRequest((3000,), (50,), 1, 0, None, lambda text: len(text.split()), 4)
    (sample,) = registry.get(task).generate(request)
    assert sample.question.startswith(QUESTIONS[task])
    assert sample.turns[0].endswith(f"\n{sample.question}")
    assert len(sample.question) < 300


def sample_of(form, path, **record):
    return form.sample(Line(record, path, 1))


def test_a_data_files_prompt_ends_with_its_question(tmp_path):
    text, niah = "Some text.\n\nMore text.", "A special magic number is hidden.\nSome text.\n"
    file = tmp_path / "hotpotqa.jsonl"
    samples = {
        "Question: Who?": sample_of(LongBench(), file, context=text, input="Who?", answers=["He"], dataset="hotpotqa"),
        "Question: Why?": sample_of(
            InfiniteBench(), tmp_path / "longbook_qa_eng.jsonl", context=text, input="Why?", answer=["So"]
        ),
        'Key: "a"\n': sample_of(LostInTheMiddle(), file, ordered_kv_records=[["a", "1"]], key="a", value="1"),
        "What is it?": sample_of(Ruler(), tmp_path / "niah.jsonl", input=f"{niah}What is it?", outputs=["1"]),
    }
    for question, sample in samples.items():
        assert question in sample.question
        assert sample.turns[0].endswith(sample.question)
        assert "text" not in sample.question.replace("above text", "")


def test_a_prompts_question_is_watched_with_its_prefix_and_by_all_who_share_its_prefill():
    loaded = tiny_loaded()
    subject = ConfiguredModel(loaded, config_specs(["kvretrieval"]), settings={**SPARSE, "preselect_block_count": 2})
    question = "What?"
    sample = Sample("a", "a", (f"{'some text ' * 40}\n\n{question}",), (("x",),), 0, None, 4, "It is", question)
    prompt = subject.prompt(sample)
    # Tokens are bytes; behind the question stand the template's two, and what the answer is to begin with.
    assert prompt.question == len("What?") + 2 + len("It is")
    raw = Sample("a", "a", sample.turns, sample.answers, 0, None, 4, raw_prompt=True)
    assert subject.prompt(raw).question is None
    chosen = []
    for kept in (prompt, Prompt(prompt.tokens, prompt.capacity)):
        with subject.prefilled("kvretrieval", kept) as ready:
            assert ready.shared
            chosen.append([layer.state.candidates.tolist() for layer in ready.cache.layers[2:]])
    assert chosen[0] != chosen[1]
