"""RULER's question answering: SQuAD and HotpotQA among documents of other questions (Hsieh et al., 2024, section 3.4).

The user provides the data: SQuAD 2.0's `dev-v2.0.json` and HotpotQA's `hotpot_dev_distractor_v1.json`, as published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.checked_lines import parsed
from hetero_kv.evals.sample import Sample, Score
from hetero_kv.evals.scorers import string_match_part
from hetero_kv.evals.tasks.drawing import Cell
from hetero_kv.evals.tasks.fitting import adjusted
from hetero_kv.evals.tasks.generated import GeneratedTask
from hetero_kv.evals.tasks.registry import TaskRequest, register
from hetero_kv.evals.text_files import text_of

MAX_NEW_TOKENS = 32
PREFIX = " Answer:"
_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
# Documents to try for the last place, so that a prompt hits its length although documents are long.
_TRIED_LAST = 200


@dataclass(frozen=True)
class RulerQuestion:
    """A question: its text, its right answers, the documents that answer it, and others of the same article."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    related: tuple[str, ...] = ()


class RulerQA(GeneratedTask):
    """A question among documents; scored 1 if one of its right answers occurs in the answer."""

    max_new_tokens = MAX_NEW_TOKENS
    needs_data_file = True

    def __init__(self, name: str, data: str, read: Callable[[Any], Iterator[RulerQuestion]]) -> None:
        self.name = f"ruler/{name}"
        self.meaning = f"a question of {data} among other questions' documents (needs the data file)"
        self.data = data
        self.read = read

    def make(self, cell: Cell, request: TaskRequest) -> Sample:
        """The sample of one cell; the n-th sample of every length has the same question.

        Raises:
            HeteroKVError: no data file, or one that is not in its published form.
        """
        if request.data_file is None:
            raise HeteroKVError(
                f"task {self.name}: it is built from {self.data}; give that file, as published: --task {self.name}=FILE"
            )
        questions, documents = _questions(self.name, self.data, self.read, request.data_file)
        order = Cell(self.name, cell.seed, 0, None, 0).random("questions").sample(range(len(questions)), len(questions))
        question = questions[order[cell.number % len(order)]]
        rng = cell.random("documents")
        related = rng.sample(question.related, len(question.related))
        own = {*question.documents, *question.related}
        others = [document for document in documents if document not in own]
        distractors = [*related, *rng.sample(others, len(others))]
        if not distractors:
            raise HeteroKVError(f"task {self.name}: {request.data_file} holds no document besides the question's own")
        order_seed = cell.random("order")
        ranks = [order_seed.random() for _ in range(len(question.documents) + len(distractors))]

        def prompt_with(chosen: Sequence[str]) -> str:
            placed = [*question.documents, *chosen]
            shuffled = sorted(range(len(placed)), key=lambda i: (ranks[i % len(ranks)], i))
            numbered = "\n\n".join(f"Document {n}:\n{placed[i]}" for n, i in enumerate(shuffled, start=1))
            return (
                f"{_INSTRUCTION}\n\nThe following are given documents.\n\n{numbered}\n\n"
                f"{_INSTRUCTION}\n\nQuestion: {question.text}"
            )

        def chosen(count: int) -> list[str]:
            repeats, rest = divmod(count, len(distractors))
            return [*distractors * repeats, *distractors[:rest]]

        prompt = self.fitted(cell, request, lambda count: prompt_with(chosen(count)), PREFIX)
        unused = iter(distractors[prompt.units :])
        taken = chosen(prompt.units)
        taken[-1:] = adjusted(
            taken[-1:],
            cell.length - prompt.tokens,
            cell.length,
            lambda: next(unused, None),
            request.count_tokens,
            tries=_TRIED_LAST,
        )
        return self.sample(cell, (prompt_with(taken),), (question.answers,), PREFIX, question=question.text)

    def score(self, sample: Sample, predictions: Sequence[str]) -> Score:
        """Whether one of the question's right answers occurs in the answer."""
        return Score(string_match_part(predictions[0], sample.answers[0]))


@lru_cache(maxsize=4)
def _questions(
    task: str, data: str, read: Callable[[Any], Iterator[RulerQuestion]], path: Path
) -> tuple[list[RulerQuestion], list[str]]:
    """All questions of a file, and its distinct documents, sorted."""
    text = text_of(path, f"task {task}: data file")
    try:
        questions = list(read(parsed(text)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HeteroKVError(f"task {task}: {path} is not {data} as published: {error!r}") from error
    if not questions:
        raise HeteroKVError(f"task {task}: {path} holds no answerable question; give {data}, as published")
    return questions, sorted({document for q in questions for document in (*q.documents, *q.related)})


def squad_questions(data: Any) -> Iterator[RulerQuestion]:
    """The answerable questions of SQuAD's JSON: `data[].paragraphs[].qas[]`."""
    for article in data["data"]:
        contexts = [paragraph["context"] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = paragraph["context"]
            related = tuple(dict.fromkeys(context for context in contexts if context != own))
            for qa in paragraph["qas"]:
                if not qa.get("is_impossible", False):
                    answers = tuple(dict.fromkeys(answer["text"] for answer in qa["answers"]))
                    yield RulerQuestion(qa["question"], answers, (own,), related)


def hotpot_questions(data: Any) -> Iterator[RulerQuestion]:
    """The questions of HotpotQA's JSON: a list of `question`, `answer`, `context` as [title, sentences]."""
    for record in data:
        documents = tuple(dict.fromkeys(f"{title}\n{''.join(parts)}" for title, parts in record["context"]))
        yield RulerQuestion(record["question"], (record["answer"],), documents)


register(RulerQA("qa_1", "SQuAD 2.0 (dev-v2.0.json)", squad_questions))
register(RulerQA("qa_2", "HotpotQA (hotpot_dev_distractor_v1.json)", hotpot_questions))
