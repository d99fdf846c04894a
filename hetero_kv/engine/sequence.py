"""A sequence: the tokens of one conversation, and the blocks that hold them in every layer."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_kv.store.block_table import BlockTable


@dataclass(frozen=True)
class Layout:
    """Which of a sequence's tokens lie in blocks, and how; layers of equal layouts share one block table.

    This one has all tokens in blocks. A family with other boundaries subclasses it.

    Attributes:
        block_size: tokens per block.
    """

    block_size: int

    def stored(self, before: int, length: int, *, is_prompt: bool, is_last: bool) -> int:
        """Tokens that are in blocks when the sequence has grown to `length`; `before` are already.

        Args:
            is_prompt: whether the new tokens are a prompt, or a part of one.
            is_last: whether they are its last part.
        """
        return length

    def cropped(self, before: int, length: int) -> int:
        """Tokens that are in blocks when the sequence has been cut to `length`; `before` were."""
        return length

    def closed(self, length: int) -> int:
        """Blocks from the sequence's beginning on whose contents are final when it is `length` tokens long.

        A family that derives something from whole blocks (representatives) does so when they are closed.
        """
        return 0

    #: Whether what is derived from a block that closes is the sequence's own, and not its forks' too.
    closes_alone = False


class Sequence:
    """One row of a batch.

    Attributes:
        length: tokens stored.
        tables: its blocks, by layout.
    """

    def __init__(self, tables: dict[Layout, BlockTable] | None = None, length: int = 0) -> None:
        self.length = length
        self.tables = tables or {}

    def fork(self) -> Sequence:
        """A second sequence with the same tokens, in the same blocks."""
        return Sequence({layout: table.fork() for layout, table in self.tables.items()}, self.length)

    def crop(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        for layout, table in self.tables.items():
            table.truncate(layout.cropped(table.length, length))
        self.length = length

    def free(self) -> None:
        """Forget every token and let go of the blocks."""
        for table in self.tables.values():
            table.free()
        self.length = 0
