"""A sequence: the tokens of one conversation, and their block tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hetero_kv.settings.former_names import refuse_former_methods
from hetero_kv.store.block_table import BlockTable


@dataclass(frozen=True)
class Layout:
    """Which tokens of a sequence are stored in blocks, and how; layers of equal layouts share one block table.

    This class stores all tokens in blocks. A family with other boundaries subclasses it.

    Attributes:
        block_size: tokens per block.
    """

    block_size: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_former_methods(cls, {"closed": "finalized", "closes_alone": "finalizes_per_sequence"})

    def stored(self, before: int, length: int, *, is_prompt: bool, is_last: bool) -> int:
        """Tokens in blocks once the sequence has grown to `length`.

        Args:
            before: tokens in blocks before.
            is_prompt: whether the new tokens are a prompt, or a part of one.
            is_last: whether they are its last part.
        """
        return length

    def cropped(self, before: int, length: int) -> int:
        """Tokens in blocks once the sequence is cropped to `length`; `before` were in blocks."""
        return length

    def finalized(self, length: int) -> int:
        """Number of blocks from the beginning whose contents are final at `length` tokens.

        A family that derives data from whole blocks (representatives) does so when these are finalized.
        """
        return 0

    #: Whether the data derived from a finalized block is private to the sequence, not shared with its forks.
    finalizes_per_sequence = False


class Sequence:
    """One row of a batch.

    Attributes:
        length: number of stored tokens.
        prompt_length: `length` at the end of the last prompt.
        tables: its block tables, by layout.
        finalized: by layout, the number of finalized blocks from the beginning: their contents are final, and have
            derived data.
    """

    def __init__(
        self, tables: dict[Layout, BlockTable], length: int = 0, prompt_length: int = 0,
        finalized: dict[Layout, int] | None = None,
    ) -> None:  # fmt: skip
        self.tables = tables
        self.length, self.prompt_length = length, prompt_length
        self.finalized = dict.fromkeys(tables, 0) if finalized is None else finalized

    def fork(self) -> Sequence:
        """A second sequence with the same tokens, in the same blocks."""
        tables = {layout: table.fork() for layout, table in self.tables.items()}
        return Sequence(tables, self.length, self.prompt_length, dict(self.finalized))

    def grow(self, length: int, *, is_prompt: bool, is_last: bool) -> None:
        """Take the new tokens in, `length` with the earlier ones. Arguments as for `Layout.stored`."""
        self.length = length
        if not is_last:
            return
        for layout, finalized in self.finalized.items():
            self.finalized[layout] = max(finalized, layout.finalized(length))
        if is_prompt:
            self.prompt_length = length

    def crop(self, length: int) -> None:
        """Drop the tokens from position `length` on."""
        for layout, table in self.tables.items():
            table.truncate(layout.cropped(table.length, length))
            self.finalized[layout] = min(self.finalized[layout], length // layout.block_size)
        self.length, self.prompt_length = length, min(self.prompt_length, length)

    def free(self) -> None:
        """Drop every token and free the blocks."""
        for table in self.tables.values():
            table.free()
        self.length = self.prompt_length = 0
        self.finalized = dict.fromkeys(self.tables, 0)
