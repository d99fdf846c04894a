"""Plans the store that several caches of a model share: the memory of many sequences, and of one prompt at a time."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_kv.adapter.footprint import FOLLOWING, MASKS, MEAN_KEYS, RESIDENT
from hetero_kv.planning.footprint import TRANSIENT, MemoryUse
from hetero_kv.planning.plan import LONGEST, Plan

#: The memory of one prompt during prefill, whatever else the store has.
_OF_A_PROMPT = TRANSIENT | {FOLLOWING, MASKS}


@dataclass(frozen=True)
class CommonPlan(Plan):
    """A plan by the tokens of `batch` sequences together, which decode together and whose prompts pass one by one.

    What a sequence keeps up to some length (windows, fixed memory) or at any length (states) counts for each of them.
    That is most when all are equally long.

    Attributes:
        longest: tokens of the longest prompt, at the most those of all sequences together.
    """

    longest: int = LONGEST

    def memory(self, tokens: int) -> MemoryUse:
        """The memory of sequences with `tokens` together, while the longest prompt passes, term by term."""
        longest = min(tokens, self.longest)
        kept = self.footprint.memory(-(-tokens // self.batch), self.batch).sizes
        passing = self.footprint.memory(longest).sizes
        sizes = {term: (passing if term in _OF_A_PROMPT else kept).get(term, 0) for term in {**kept, **passing}}
        if RESIDENT in sizes:
            # A GPU takes it for the longest sequence, whatever a sequence's length is.
            sizes[RESIDENT] = self.footprint.memory(longest, self.batch).sizes[RESIDENT]
        if MEAN_KEYS in sizes:
            # Each sequence has none for its newest tokens, so that one of all tokens takes the most.
            sizes[MEAN_KEYS] = self.footprint.memory(tokens).sizes[MEAN_KEYS]
        return MemoryUse(sizes)

    def contents(self, tokens: int) -> str:
        """See Plan."""
        return f"{self.batch} sequences with {tokens} tokens together"
