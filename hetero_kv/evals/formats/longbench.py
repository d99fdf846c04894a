"""LongBench's files: `context`, `input`, `answers`, `dataset` (Bai et al., 2023).

The benchmark defines prompts, lengths of answers, metrics, and which datasets use no chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_kv.evals import scorers
from hetero_kv.evals.formats import longbench_prompts as prompts
from hetero_kv.evals.formats.format import BrokenLine, DataFileTask, DataFormat, Line, question_of, register_format
from hetero_kv.evals.sample import Sample, Score
from hetero_kv.evals.tasks.registry import register

Metric = Callable[[str, str], float]


@dataclass(frozen=True)
class Dataset:
    """One of LongBench's datasets.

    Attributes:
        prompt: with places for `context` and `input`.
        max_new_tokens: the most tokens of an answer.
        metric: (answer, expected) -> score; None for a classification among the line's `all_classes`.
        is_few_shot: whether the context shows examples of answers, or code is to be completed: no chat template.
        is_first_line: whether only the answer's first line counts.
    """

    prompt: str
    max_new_tokens: int
    metric: Metric | None
    is_few_shot: bool = False
    is_first_line: bool = False


DATASETS = {
    "narrativeqa": Dataset(prompts.NARRATIVEQA, 128, scorers.qa_f1),
    "qasper": Dataset(prompts.QASPER, 128, scorers.qa_f1),
    "multifieldqa_en": Dataset(prompts.MULTIFIELDQA_EN, 64, scorers.qa_f1),
    "multifieldqa_zh": Dataset(prompts.MULTIFIELDQA_ZH, 64, scorers.qa_f1_chinese),
    "hotpotqa": Dataset(prompts.PASSAGES_QA, 32, scorers.qa_f1),
    "2wikimqa": Dataset(prompts.PASSAGES_QA, 32, scorers.qa_f1),
    "musique": Dataset(prompts.PASSAGES_QA, 32, scorers.qa_f1),
    "dureader": Dataset(prompts.DUREADER, 128, scorers.rouge_l_chinese),
    "gov_report": Dataset(prompts.GOV_REPORT, 512, scorers.rouge_l),
    "qmsum": Dataset(prompts.QMSUM, 512, scorers.rouge_l),
    "multi_news": Dataset(prompts.MULTI_NEWS, 512, scorers.rouge_l),
    "vcsum": Dataset(prompts.VCSUM, 512, scorers.rouge_l_chinese),
    "trec": Dataset(prompts.TREC, 64, None, is_few_shot=True, is_first_line=True),
    "triviaqa": Dataset(prompts.TRIVIAQA, 32, scorers.qa_f1, is_few_shot=True, is_first_line=True),
    "samsum": Dataset(prompts.SAMSUM, 128, scorers.rouge_l, is_few_shot=True, is_first_line=True),
    "lsht": Dataset(prompts.LSHT, 64, None, is_few_shot=True, is_first_line=True),
    "passage_count": Dataset(prompts.PASSAGE_COUNT, 32, scorers.count_score),
    "passage_retrieval_en": Dataset(prompts.PASSAGE_RETRIEVAL_EN, 32, scorers.retrieval_score),
    "passage_retrieval_zh": Dataset(prompts.PASSAGE_RETRIEVAL_ZH, 32, scorers.retrieval_score),
    "lcc": Dataset(prompts.LCC, 64, scorers.edit_similarity, is_few_shot=True),
    "repobench-p": Dataset(prompts.REPOBENCH_P, 64, scorers.edit_similarity, is_few_shot=True),
}


class LongBench(DataFormat):
    """LongBench's files; the dataset is the line's `dataset`, else the file's name; also LongBench-E's names (`_e`)."""

    name = "longbench"
    meaning = "LongBench: context, input, answers, dataset"

    def recognises(self, record: Mapping[str, Any]) -> bool:
        """Whether the fields `context`, `input` and `answers` exist."""
        return {"context", "input", "answers"} <= record.keys()

    def sample(self, line: Line) -> Sample:
        """The dataset's prompt around the line's context and input."""
        candidates = [name.removesuffix("_e") for name in line.names]
        name = next((name for name in candidates if name in DATASETS), None)
        if name is None:
            raise BrokenLine(f"dataset {candidates[0]!r} is none of LongBench's: {', '.join(DATASETS)}")
        dataset = DATASETS[name]
        classes = line.record.get("all_classes") or []
        if dataset.metric is None and not classes:
            raise BrokenLine(f"dataset {name!r} needs the field 'all_classes'")
        return Sample(
            id=line.id(f"longbench/{name}"),
            task=f"longbench/{name}",
            turns=(dataset.prompt.format(context=line.text("context"), input=line.text("input")),),
            answers=(line.texts("answers"),),
            length=0,
            depth=None,
            max_new_tokens=dataset.max_new_tokens,
            question=question_of(dataset.prompt, input=line.text("input")),
            raw_prompt=dataset.is_few_shot,
            metadata={"classes": [str(name) for name in classes]},
        )


class LongBenchTask(DataFileTask):
    """One dataset; the score is the best over the expected answers."""

    def __init__(self, name: str, dataset: Dataset) -> None:
        self.name = f"longbench/{name}"
        self.meaning = f"LongBench's {name}, of a data file"
        self.dataset = dataset

    def score(self, sample: Sample, predictions: Sequence[str]) -> Score:
        """The dataset's metric with the best-fitting expected answer."""
        prediction = predictions[0]
        if self.dataset.is_first_line:
            prediction = prediction.lstrip("\n").split("\n")[0]
        return Score(max(self._metric(sample)(prediction, expected) for expected in sample.answers[0]))

    def _metric(self, sample: Sample) -> Metric:
        return self.dataset.metric or (
            lambda prediction, expected: scorers.classification(prediction, expected, sample.metadata["classes"])
        )


for _name, _dataset in DATASETS.items():
    register(LongBenchTask(_name, _dataset))
register_format(LongBench())
