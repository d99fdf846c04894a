"""Which tokens of a ShadowKV layer have their values in blocks: those of the Context."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_kv.engine.sequence import Layout
from hetero_kv.families.shadowkv.partition import context_end, first_context_end
from hetero_kv.families.shadowkv.settings import ShadowKVSettings


@dataclass(frozen=True)
class ContextLayout(Layout):
    """One block per chunk of the Context; Recent is not in blocks.

    Attributes:
        settings: the operator's.
    """

    settings: ShadowKVSettings

    def stored(self, before: int, length: int, *, is_prompt: bool, is_last: bool) -> int:
        """See Layout: the Context grows at a prompt's end and, with ShadowKV+, as tokens are generated."""
        if is_prompt and is_last:
            end = context_end(length, self.settings) if before else first_context_end(length, self.settings)
        elif not is_prompt and self.settings.project_generated and before:
            end = context_end(length, self.settings)
        else:
            end = before
        # A rollback may have left fewer local chunks.
        return max(before, end)

    def cropped(self, before: int, length: int) -> int:
        return before if length >= before else min(before, context_end(length, self.settings))
