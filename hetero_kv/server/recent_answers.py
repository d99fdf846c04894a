"""The tokens of recent answers, about which a client may ask further questions."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from hetero_kv.server.errors import ApiError
from hetero_kv.server.served import ServedModel

#: The largest number of answers, and of tokens of all their prompts and answers; the oldest are dropped first.
MOST_ANSWERS, MOST_TOKENS = 256, 8_000_000


@dataclass(frozen=True)
class RecentAnswer:
    """An answer.

    Attributes:
        tokens: ids of the prompt, then of the answer so far.
        prompt_tokens: the prompt's number of tokens.
        key: the name of the request's API key.
    """

    served: ServedModel
    tokens: array[int]
    prompt_tokens: int
    key: str


class RecentAnswers:
    """Recent answers by the id of their response. Only the event loop's thread uses it."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, RecentAnswer] = OrderedDict()

    def add(self, response_id: str, served: ServedModel, prompt: Sequence[int], key: str) -> array[int]:
        """Record a new answer. Returns the prompt's tokens, to which the caller appends the answer's."""
        tokens = array("i", prompt)
        self._found[response_id] = RecentAnswer(served, tokens, len(prompt), key)
        while len(self._found) > MOST_ANSWERS or sum(len(each.tokens) for each in self._found.values()) > MOST_TOKENS:
            self._found.popitem(last=False)
        return tokens

    def get(self, response_id: str, key: str) -> RecentAnswer:
        """An answer of this key. Raises ApiError 404 for unknown ones and those of other keys alike."""
        found = self._found.get(response_id)
        if found is None or found.key != key:
            raise ApiError(
                404, f"there is no recent answer {response_id!r}; the server remembers the last {MOST_ANSWERS}, until "
                "it stops", param="response_id", code="answer_not_found",
            )  # fmt: skip
        return found
