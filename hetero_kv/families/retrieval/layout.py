"""How a sequence is divided: attention sink | Context | recent window, in whole blocks."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_kv.engine.sequence import Layout
from hetero_kv.families.retrieval.paged_settings import PagedSettings


@dataclass(frozen=True)
class RetrievalLayout(Layout):
    """All tokens are in blocks: the first `sink_blocks`, then the Context, then at least the last `local_len` tokens.

    A function of the length alone: a block enters the Context when `local_len` tokens follow it, and is closed then.

    Attributes:
        sink_blocks: blocks of the attention sink.
        local_len: tokens of the recent window at least; up to a block more stay until that block enters the Context.
        closes_alone: whether a block's representatives are chosen by what the sequence's own queries looked at.
    """

    sink_blocks: int
    local_len: int
    closes_alone: bool = False

    @classmethod
    def of_settings(cls, settings: PagedSettings, closes_alone: bool = False) -> RetrievalLayout:
        """As an operator's settings say."""
        return cls.of(settings.block_size, settings.initial_len, settings.local_windows_len, closes_alone)

    @classmethod
    def of(cls, block_size: int, initial_len: int, local_len: int, closes_alone: bool = False) -> RetrievalLayout:
        """With `initial_len` tokens of the attention sink, rounded up to whole blocks."""
        return cls(block_size, -(-initial_len // block_size), local_len, closes_alone)

    def context_blocks(self, length: int) -> int:
        """Blocks of the Context of a sequence of `length` tokens."""
        return max(0, (length - self.local_len) // self.block_size - self.sink_blocks)

    def context_end(self, length: int) -> int:
        """Index of the block at which the recent window begins."""
        return min(self.sink_blocks, -(-length // self.block_size)) + self.context_blocks(length)

    def attended_tokens(self, length: int, budget: int | None) -> int:
        """Tokens that a step attends to of `length`, with a budget of so many blocks of the Context; None for all."""
        if budget is None:
            return length
        context = self.context_blocks(length)
        return length - (context - min(context, budget)) * self.block_size

    def closed(self, length: int) -> int:
        """Blocks before the recent window."""
        return self.context_end(length)
