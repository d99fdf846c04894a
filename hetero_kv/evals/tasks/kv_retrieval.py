"""Key-value retrieval: one value of a JSON object of random UUIDs (Lost in the middle, Liu et al., 2023, section 4)."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_kv.evals.sample import Sample, Score
from hetero_kv.evals.scorers import contains
from hetero_kv.evals.tasks.drawing import Cell, Different, uuid4
from hetero_kv.evals.tasks.fitting import adjusted
from hetero_kv.evals.tasks.generated import GeneratedTask
from hetero_kv.evals.tasks.registry import TaskRequest, register

MAX_NEW_TOKENS = 100
QUESTION_BEGINS_BEHIND = "\n\n"


def kv_prompt(records: Sequence[tuple[str, str]], key: str) -> str:
    """The benchmark's prompt for `records` of keys and values."""
    pairs = ",\n ".join(f'"{name}": "{value}"' for name, value in records)
    return (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n"
        f'JSON data:\n{{{pairs}}}\n\nKey: "{key}"\nCorresponding value:'
    )


class KVRetrieval(GeneratedTask):
    """As many pairs as fit into the length, the queried one at the depth; scored 1 if its value occurs in the answer.

    A pair takes some 50 to 80 tokens. Some pairs are drawn again until UUIDs of more or fewer tokens make up the
    difference, so that short prompts hit their length too.
    """

    name = "kv_retrieval"
    meaning = "one value of a JSON object of random UUIDs; as many pairs as the length holds"
    uses_depth = True
    max_new_tokens = MAX_NEW_TOKENS
    question_begins_behind = QUESTION_BEGINS_BEHIND

    def make(self, cell: Cell, request: TaskRequest) -> Sample:
        """The sample of one cell; `metadata` has the number of pairs and the queried one's index."""
        rng = cell.random("pairs")
        ids = Different(lambda: uuid4(rng))
        target = (ids.next(), ids.next())
        others: list[tuple[str, str]] = []
        assert cell.depth is not None
        depth = cell.depth

        def draw() -> tuple[str, str]:
            return ids.next(), ids.next()

        def prompt_with(others: Sequence[tuple[str, str]]) -> str:
            at = _index(depth, len(others) + 1)
            return kv_prompt([*others[:at], target, *others[at:]], target[0])

        def build(pairs: int) -> str:
            others.extend(draw() for _ in range(pairs - 1 - len(others)))
            return prompt_with(others[: pairs - 1])

        def tokens(pair: tuple[str, str]) -> int:
            return request.count_tokens(f'"{pair[0]}": "{pair[1]}"')

        prompt = self.fitted(cell, request, build, least=2)
        pairs, missing = prompt.units, cell.length - prompt.tokens
        chosen = adjusted(others[: pairs - 1], missing, cell.length, draw, tokens)
        text = prompt_with(chosen)
        return self.sample(cell, (text,), ((target[1],),), pairs=pairs, index=_index(depth, pairs))

    def score(self, sample: Sample, predictions: Sequence[str]) -> Score:
        """Whether the value occurs in the answer."""
        return Score(contains(predictions[0], sample.answers[0][0]))


def _index(depth: float, pairs: int) -> int:
    return round(depth / 100 * (pairs - 1))


register(KVRetrieval())
