"""The division of a sequence into attention sink | Context | recent window, in whole blocks."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_kv.engine.sequence import Layout
from hetero_kv.families.retrieval.paged_settings import PagedSettings

#: Longer than any sequence: `local_len` where all tokens stay in the recent window.
WHOLE = 1 << 40


@dataclass(frozen=True)
class RetrievalLayout(Layout):
    """All tokens are in blocks: the first `sink_blocks`, then the Context, then at least the last `local_len` tokens.

    The division depends on the length alone: a block enters the Context, and is finalized, once `local_len` tokens
    follow it.

    Attributes:
        sink_blocks: blocks of the attention sink.
        local_len: minimum tokens of the recent window; up to a block more stay until that block enters the Context.
        finalizes_per_sequence: whether a block's representatives depend on the sequence's own queries.
    """

    sink_blocks: int
    local_len: int
    finalizes_per_sequence: bool = False

    @classmethod
    def of_settings(
        cls, settings: PagedSettings, finalizes_per_sequence: bool = False, has_whole_window: bool = False
    ) -> RetrievalLayout:
        """The layout that an operator's settings describe."""
        local_len = WHOLE if has_whole_window else settings.local_windows_len
        return cls.of(settings.block_size, settings.sink_tokens, local_len, finalizes_per_sequence)

    @classmethod
    def of(
        cls, block_size: int, sink_tokens: int, local_len: int, finalizes_per_sequence: bool = False
    ) -> RetrievalLayout:
        """A layout with `sink_tokens` tokens of attention sink, rounded up to whole blocks."""
        return cls(block_size, -(-sink_tokens // block_size), local_len, finalizes_per_sequence)

    @property
    def has_whole_window(self) -> bool:
        """Whether all tokens stay in the recent window."""
        return self.local_len == WHOLE

    def context_blocks(self, length: int) -> int:
        """The number of Context blocks in a sequence of `length` tokens."""
        return max(0, (length - self.local_len) // self.block_size - self.sink_blocks)

    def context_end(self, length: int) -> int:
        """Index of the block at which the recent window begins."""
        return min(self.sink_blocks, -(-length // self.block_size)) + self.context_blocks(length)

    def attended_tokens(self, length: int, budget: int | None) -> int:
        """The tokens, out of `length`, that a step attends to with a budget of Context blocks; None for all."""
        if budget is None:
            return length
        context = self.context_blocks(length)
        return length - (context - min(context, budget)) * self.block_size

    def finalized(self, length: int) -> int:
        """The number of blocks before the recent window."""
        return self.context_end(length)
