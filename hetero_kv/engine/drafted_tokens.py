"""Tokens that a forward has stored behind a sequence as guesses: the first of them stay, the others are dropped."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.checkpoint import Checkpoint
from hetero_kv.engine.step import Step


class DraftedTokens:
    """The tokens of one sequence in a forward, of which all but the first were guesses.

    Args:
        cache: has the sequence, of one row.
        steps: of these tokens, in order.
    """

    def __init__(self, cache: HeteroCache, steps: Rows[Step]) -> None:
        self._cache, self._steps = cache, steps

    def keep(self, tokens: int) -> None:
        """Drop all but the first `tokens`, at least 1. Layers compute then as if the others had not passed.

        Layers' statistics count what all of them read. Repeatable after an interrupt.
        """
        if tokens == len(self._steps):
            return
        last = self._steps[tokens - 1]
        dropped = self._cache.get_seq_length() - last.length
        self._cache.crop(-dropped, Checkpoint(last.length, last.states) if last.states else None)
        group = last.group
        for layout in group.layouts:
            # What was derived from blocks for dropped tokens is derived again when tokens get there.
            group.set_finalized(layout, min(group.finalized[layout], last.blocks(layout).newly_finalized[1]))
