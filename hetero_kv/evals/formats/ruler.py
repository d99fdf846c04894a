"""RULER's files, as its `prepare.py` writes them: `input`, `outputs`, and in newer versions `answer_prefix`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_kv.evals.formats.format import BrokenLine, DataFileTask, DataFormat, Line, register_format
from hetero_kv.evals.sample import Sample, Score, question_after
from hetero_kv.evals.scorers import string_match_all, string_match_part
from hetero_kv.evals.tasks import registry, ruler_cwe, ruler_fwe, ruler_niah, ruler_qa, ruler_vt


@dataclass(frozen=True)
class Family:
    """Tasks with one prompt: a wording found only in their question, their prefix's beginning, and answer tokens."""

    name: str
    wording: str
    prefix: str
    max_new_tokens: int


_FAMILIES = (
    Family("niah", "special magic", " The special magic", ruler_niah.MAX_NEW_TOKENS),
    Family("vt", "variable assignment", " Answer: According to the chain(s)", ruler_vt.MAX_NEW_TOKENS),
    Family("cwe", "numbered list of words", " Answer: The top 10 words", ruler_cwe.MAX_NEW_TOKENS),
    Family("fwe", "coded word", " Answer: According to the coded text", ruler_fwe.MAX_NEW_TOKENS),
    Family("qa", "based on the given documents", " Answer:", ruler_qa.MAX_NEW_TOKENS),
)
# Beginnings of the chat templates that RULER can write into `input`.
_TEMPLATES = (
    "[INST]", "<|", "<BOS_TOKEN>", "<SPECIAL_10>", "[gMASK]", "User: hi\n", "A chat between a curious user and",
    "You are a helpful assistant. USER:",
)  # fmt: skip


class Ruler(DataFormat):
    """RULER's files; the task is the name of the file or its directory, else the wording decides."""

    name = "ruler"
    meaning = "RULER: input, outputs; the task from the directory's name"

    def recognises(self, record: Mapping[str, Any]) -> bool:
        """Whether the fields `input` and `outputs` exist."""
        return "input" in record and "outputs" in record

    def sample(self, line: Line) -> Sample:
        """The line's unchanged prompt; without the chat template if RULER wrote one into it."""
        prompt, answers = line.text("input"), line.texts("outputs")
        family = next((family for family in _FAMILIES if family.wording in prompt), None)
        if family is None:
            raise BrokenLine("field 'input' does not match any of RULER's tasks")
        if "answer_prefix" in line.record:
            prefix = line.text("answer_prefix")
        else:
            # Older files end with the prefix.
            at = prompt.rfind(family.prefix)
            prompt, prefix = (prompt[:at], prompt[at:]) if at >= 0 else (prompt, "")
        is_templated = prompt.startswith(_TEMPLATES)
        task = self._task(line, family)
        turn = prompt + prefix if is_templated else prompt
        return Sample(
            id=line.id(task),
            task=task,
            turns=(turn,),
            answers=(answers,),
            length=0,
            depth=None,
            max_new_tokens=family.max_new_tokens,
            answer_prefix="" if is_templated else prefix,
            question=question_after("\n", turn),
            raw_prompt=is_templated,
        )

    def _task(self, line: Line, family: Family) -> str:
        known = {*registry.names(), *registry.data_file_names()}
        named = (f"ruler/{name.removeprefix('ruler/')}" for name in line.names)
        return next(
            (name for name in named if name in known and name.startswith(f"ruler/{family.name}")),
            f"ruler/{family.name}",
        )


class RulerFamily(DataFileTask):
    """Needles or questions of a file whose name is not one of RULER's tasks."""

    def __init__(self, family: str, meaning: str, is_any_enough: bool) -> None:
        self.name = f"ruler/{family}"
        self.meaning = meaning
        self._match = string_match_part if is_any_enough else string_match_all

    def score(self, sample: Sample, predictions: Sequence[str]) -> Score:
        """RULER's string match: of all references for needles, of the best one for questions."""
        return Score(self._match(predictions[0], sample.answers[0]))


registry.register(RulerFamily("niah", "RULER's needles, of a data file", is_any_enough=False))
registry.register(RulerFamily("qa", "RULER's questions, of a data file", is_any_enough=True))
register_format(Ruler())
