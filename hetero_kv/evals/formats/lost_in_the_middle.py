"""Lost in the middle's key-value retrieval files: `ordered_kv_records`, `key`, `value` (Liu et al., 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetero_kv.evals.formats.format import BrokenLine, DataFileTask, DataFormat, Line, register_format
from hetero_kv.evals.sample import Sample, Score, question_after
from hetero_kv.evals.scorers import contains
from hetero_kv.evals.tasks.kv_retrieval import MAX_NEW_TOKENS, QUESTION_BEGINS_BEHIND, kv_prompt
from hetero_kv.evals.tasks.registry import register


class LostInTheMiddle(DataFormat):
    """Files with one list of UUID pairs per line, in the order of the prompt."""

    name = "lost_in_the_middle"
    meaning = "key-value retrieval: ordered_kv_records, key, value"

    def recognises(self, record: Mapping[str, Any]) -> bool:
        """Whether the field `ordered_kv_records` exists."""
        return "ordered_kv_records" in record

    def sample(self, line: Line) -> Sample:
        """The benchmark's prompt; the depth is the queried pair's place among the pairs."""
        records = line.record["ordered_kv_records"]
        if not isinstance(records, list) or not all(
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)
            for pair in records
        ):
            raise BrokenLine("field 'ordered_kv_records' is not a list of [key, value] pairs")
        key, value = line.text("key"), line.text("value")
        if [key, value] not in records:
            raise BrokenLine(f"the pair of key {key!r} and value {value!r} is not among 'ordered_kv_records'")
        if len({pair[0] for pair in records}) < len(records):
            raise BrokenLine("field 'ordered_kv_records' has a key twice")
        index = records.index([key, value])
        prompt = kv_prompt([(name, of) for name, of in records], key)
        return Sample(
            id=line.id(_TASK.name),
            task=_TASK.name,
            turns=(prompt,),
            answers=((value,),),
            length=0,
            depth=100 * index / max(1, len(records) - 1),
            max_new_tokens=MAX_NEW_TOKENS,
            question=question_after(QUESTION_BEGINS_BEHIND, prompt),
            metadata={"pairs": len(records), "index": index},
        )


class LostInTheMiddleKV(DataFileTask):
    """Scored 1 if the value occurs in the answer."""

    name = "lost_in_the_middle/kv_retrieval"
    meaning = "key-value retrieval of a data file"

    def score(self, sample: Sample, predictions: Sequence[str]) -> Score:
        """Whether the value occurs in the answer."""
        return Score(contains(predictions[0], sample.answers[0][0]))


_TASK = register(LostInTheMiddleKV())
register_format(LostInTheMiddle())
