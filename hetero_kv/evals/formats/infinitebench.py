"""InfiniteBench's files: `context`, `input`, `answer`, and `options` for choices (Zhang et al., 2024).

The prompts are the benchmark's for open models; the cue at their end ("The pass key is") begins the answer. The lengths
of answers and the scores are the benchmark's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_kv.evals.formats import infinitebench_scores as scores
from hetero_kv.evals.formats.format import BrokenLine, DataFileTask, DataFormat, Line, question_of, register_format
from hetero_kv.evals.sample import Sample, Score
from hetero_kv.evals.tasks.registry import register

_HIDDEN = "There is an important info hidden inside a lot of irrelevant text. Find it"
_QUIZ = "I will quiz you about the important information there.\n\n{context}\n\n{input}\n\n"
_OPTIONS = "A. {options[0]}\nB. {options[1]}\nC. {options[2]}\nD. {options[3]}\n\n"


@dataclass(frozen=True)
class Subset:
    """One of InfiniteBench's twelve tasks.

    Attributes:
        prompt: with places for `context`, `input`, and the task's other fields.
        cue: the beginning of the answer.
        max_new_tokens: the most tokens of an answer.
        score: (answer, expected answers) -> score.
    """

    prompt: str
    cue: str
    max_new_tokens: int
    score: scores.Scorer


SUBSETS = {
    "passkey": Subset(f"{_HIDDEN} and memorize them. {_QUIZ}", "The pass key is", 6, scores.first_number),
    "number_string": Subset(f"{_HIDDEN}. {_QUIZ}", "The sequence of digits is", 12, scores.first_number),
    "kv_retrieval": Subset(
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n{input}",
        "",
        50,
        scores.word,
    ),
    "longbook_sum_eng": Subset("Summarize the book below.\n\n{context}\n\n", "Summary:", 1200, scores.rouge_l_sum),
    "longbook_choice_eng": Subset(
        "Read the book and answer the question.\n\n{context}\n\nQuestion: {input}\n" + _OPTIONS,
        "The letter of the correct answer is",
        40,
        scores.choice,
    ),
    "longbook_qa_eng": Subset(
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\nQuestion: {input}\n",
        "Answer:",
        40,
        scores.qa_f1,
    ),
    "longbook_qa_chn": Subset(
        "阅读以下书籍然后回答问题。\n\n{context}\n\n问题：{input}\n",  # noqa: RUF001
        "答案：",  # noqa: RUF001
        40,
        scores.qa_f1_characters,
    ),
    "longdialogue_qa_eng": Subset(
        'Below is a dialogue script where one random occurrence of a character name is replaced with "$$MASK$$", and '
        "you should try to guess who that character is.\n\n{context}\n\n",
        "The name that has been replaced with $$MASK$$ is likely",
        40,
        scores.any_name,
    ),
    "math_find": Subset("{prefix}\n\n{context}\n\n{input}", "", 3, scores.first_value),
    "math_calc": Subset(
        "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\nValues: [1, 4, 8]\n\n"
        "Expression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: {context}\n",
        "Values:",
        30_000,
        scores.leading_values,
    ),
    "code_run": Subset(
        "There is a function called {func} in the following Python code.\n\n{context}\n\n"
        "Please compute the exact value of {func_call}. ",
        "The value of {func_call} is",
        5,
        scores.last_integer,
    ),
    "code_debug": Subset(
        "Following is a Python code where exactly one of the functions/methods has a deliberate error that makes it "
        "crash.\n\n{context}\n\nOptions:\n" + _OPTIONS,
        "The correct option is:",
        5,
        scores.choice,
    ),
}


class InfiniteBench(DataFormat):
    """InfiniteBench's files; the file's name is the task ("kv_retrieval.jsonl")."""

    name = "infinitebench"
    meaning = "InfiniteBench: context, input, answer; the task from the file's name"

    def recognises(self, record: Mapping[str, Any]) -> bool:
        """Whether the fields `context`, `input` and `answer` exist."""
        return {"context", "input", "answer"} <= record.keys()

    def sample(self, line: Line) -> Sample:
        """The task's prompt around the line's context and input."""
        name = next((name for name in line.names if name in SUBSETS), None)
        if name is None:
            raise BrokenLine(
                f"the file's name {line.path.name!r} names none of InfiniteBench's tasks; "
                f"name it <task>.jsonl after one of: {', '.join(SUBSETS)}"
            )
        subset = SUBSETS[name]
        filled = {"context": line.text("context"), "input": line.text("input"), **_extra(name, line)}
        return Sample(
            id=line.id(f"infinitebench/{name}"),
            task=f"infinitebench/{name}",
            turns=(subset.prompt.format(**filled),),
            answers=(_answers(name, line),),
            length=0,
            depth=None,
            max_new_tokens=subset.max_new_tokens,
            answer_prefix=subset.cue.format(**filled),
            question=question_of(subset.prompt, **filled),
        )


class InfiniteBenchTask(DataFileTask):
    """One of the twelve tasks, with its score from `infinitebench_scores`."""

    def __init__(self, name: str, subset: Subset) -> None:
        self.name = f"infinitebench/{name}"
        self.meaning = f"InfiniteBench's {name}, of a data file"
        self.subset = subset

    def score(self, sample: Sample, predictions: Sequence[str]) -> Score:
        """The task's score."""
        return Score(self.subset.score(predictions[0], sample.answers[0]))


def _extra(name: str, line: Line) -> dict[str, Any]:
    """A prompt's fields other than context and input."""
    if name in ("longbook_choice_eng", "code_debug"):
        return {"options": _options(line)}
    if name == "code_run":
        call = re.search(r"func_[0-9]+\(-?[0-9]+\)", line.text("input"))
        if call is None:
            raise BrokenLine("field 'input' calls no function such as func_1(2)")
        return {"func_call": call[0], "func": call[0].split("(")[0]}
    if name == "math_find":
        quantity = re.search(r"The .+ of", line.text("input"))
        if quantity is None:
            raise BrokenLine("field 'input' does not say which number, as 'The largest number of' does")
        return {"prefix": f"What is {quantity[0].lower().removesuffix(' of')} in the following list?"}
    return {}


def _options(line: Line) -> tuple[str, ...]:
    options = line.texts("options")
    if len(options) != 4:
        raise BrokenLine(f"field 'options' has {len(options)} options, not 4")
    return options


def _answers(name: str, line: Line) -> tuple[str, ...]:
    """The expected answers; for a choice the right option and its letter."""
    value = line.record["answer"]
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        return tuple(str(one) for one in value[0])
    answers = line.texts("answer")
    if name in ("longbook_choice_eng", "code_debug") and len(answers) == 1:
        options = _options(line)
        if answers[0] not in options:
            raise BrokenLine(f"the answer {answers[0]!r} is not among the options")
        return (answers[0], "ABCD"[options.index(answers[0])])
    return answers


for _name, _subset in SUBSETS.items():
    register(InfiniteBenchTask(_name, _subset))
register_format(InfiniteBench())
