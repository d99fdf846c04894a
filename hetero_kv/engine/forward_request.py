"""What a caller requests of a cache's next forwards, beyond the arguments of the model's call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetero_kv.engine.draft_blocks import DraftBlocks
from hetero_kv.engine.likeliest import LikeliestRequest
from hetero_kv.engine.step import PromptPart
from hetero_kv.engine.token_rows import TokenRows


@dataclass(frozen=True)
class ForwardRequest:
    """What a caller requests of the next forwards; a forward's `ForwardBatch` has it.

    Attributes:
        question: number of last tokens of the whole prompt that are the question; None when unknown.
        stride: (start, stop, tokens of the prompt) of the part of a prompt that passes through all layers; None for a
            whole prompt, and for decoded tokens.
        stores: whether the tokens are stored; else they attend and are dropped (a catalyst).
        logits_to_keep: number of last tokens of each row whose hidden states the model's head reads; 0 for all.
        likeliest: where a forward leaves the likeliest next tokens instead of logits, if it can; None: logits.
        rows: the rows of a mixed or verifying forward; None where the call determines them.
        draft_blocks: of a drafting forward, what each sequence's token attends to; else empty.
        pause: called where a prompt's forward can wait within a layer; None for nowhere.
    """

    question: int | None = None
    stride: tuple[int, int, int] | None = None
    stores: bool = True
    logits_to_keep: int = 0
    likeliest: LikeliestRequest | None = None
    rows: TokenRows | None = None
    draft_blocks: tuple[DraftBlocks, ...] = ()
    pause: Callable[[], None] | None = None

    @property
    def part(self) -> PromptPart:
        """The part of a prompt that the next forward computes."""
        if self.stride is None:
            return PromptPart(question=self.question)
        start, stop, total = self.stride
        return PromptPart(start == 0, stop == total, self.question)
