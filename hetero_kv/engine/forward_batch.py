"""A forward batch: what passes through the model in one forward, built once and read by every layer."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Protocol

import torch

from hetero_kv.cpu_ops.kernel_queue import KernelQueue
from hetero_kv.engine.batch_slice import BatchSlice
from hetero_kv.engine.deferred_readback import read_back
from hetero_kv.engine.forward_request import ForwardRequest
from hetero_kv.engine.step import Step


class Recording(Protocol):
    """The recording of a decoded token's forward, or its rehearsal (`adapter.graph_recording`)."""

    def read_length(self) -> None:
        """Called when the model reads the number of stored tokens, other than for a mask.

        Raises RuntimeError where the recorded forward would keep the number.
        """

    def record_arguments(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments for the wrapped module of an operator that changes them."""

    def attended(self, operator: Any, call: Any) -> torch.Tensor:
        """The attention of an `AttentionCall`, [batch, heads, tokens, v_dim]."""


class ForwardKind(Enum):
    """The kind of a forward."""

    PREFILL = "tokens of a prompt, or of a part of one"
    DECODE = "one token of each sequence"
    MIXED = "decoded tokens and parts of prompts, one token per row"
    DRAFT = "one token of each sequence, for a guess, by attention to few blocks"
    VERIFY = "drafted tokens, one per row"


@dataclass(frozen=True)
class ForwardBatch:
    """One forward's tokens.

    Attributes:
        kind: PREFILL has one step per group; a draft in VERIFY or MIXED has one step per token.
        request: what the caller requests.
        slices: the rows and columns of the call that belong to each group.
        steps: slots, lengths, block tables and finalized blocks, in the order of the rows; parts of prompts are last.
        recording: of this forward as CUDA graphs, if any.
        queue: kernels of its layers that wait until something needs their results.
        placed: positions of the rows that the guard has put on the device.
    """

    kind: ForwardKind
    request: ForwardRequest
    slices: tuple[BatchSlice, ...]
    steps: tuple[Step, ...]
    recording: Recording | None = None
    queue: KernelQueue = field(default_factory=KernelQueue)
    placed: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def begin(cls, request: ForwardRequest, slices: Rows[BatchSlice], *, is_decode: bool) -> ForwardBatch:
        """Begin the steps of these slices: every layer reserves room for their tokens.

        Args:
            is_decode: whether tokens without a part of a prompt are generated ones.

        Raises MemoryError as `EqualLengthGroup.begin`; the caller rolls back.
        """
        part, stores = request.part, request.stores
        is_several = len(slices) > 1
        steps: list[Step] = []
        for number, each in enumerate(slices):
            if each.is_draft:
                steps += each.group.begin_draft(each.rows)
                continue
            # The only group of a call is called with its own rows; the tokens of a part of a prompt may be rows.
            rows = each.rows if is_several or each.part is not None else slice(0, len(each.group.sequences))
            step = each.group.begin(
                each.tokens, rows, is_decode=is_decode and each.part is None, part=each.part or part, stores=stores
            )
            step.pause = None if step.is_decode else request.pause
            if request.draft_blocks:
                step.draft_blocks = request.draft_blocks[number]
            steps.append(step)
        if request.draft_blocks:
            kind = ForwardKind.DRAFT
        elif request.rows is None:
            kind = ForwardKind.DECODE if is_decode else ForwardKind.PREFILL
        else:
            kind = ForwardKind.VERIFY if slices[-1].part is None else ForwardKind.MIXED
        return cls(kind, request, tuple(slices), tuple(steps))

    @property
    def positions(self) -> list[int]:
        """The position in its sequence of each row's first new token, in the order of the rows."""
        found: list[int] = []
        for step in self.steps:
            is_by_row = step.part.is_mixed
            found += range(step.past, step.length) if is_by_row else [step.past] * len(step.group.sequences)
        return found

    @property
    def sequences(self) -> int:
        """The number of sequences of all steps."""
        return sum(len(step.group.sequences) for step in self.steps)

    @cached_property
    def decoded_rows(self) -> int:
        """How many of the first rows are decoded or drafted tokens; parts of prompts follow."""
        return next((each.rows.start for each in self.slices if each.part is not None), self.slices[-1].rows.stop)

    @property
    def kept_rows(self) -> list[int]:
        """The rows whose logits are needed: all that decode, and the last one of each part of a prompt."""
        return [
            row
            for each in self.slices
            for row in range(each.rows.start if each.part is None else each.rows.stop - 1, each.rows.stop)
        ]

    def end(self) -> None:
        """Make the tokens part of their sequences; before that, raise the errors of deferred readbacks."""
        self.queue.run()
        checked_numbers = [each for step in self.steps for each in step.checked_numbers]
        read_back(checked_numbers, [each for step in self.steps for each in step.host_copies])
        for step in self.steps:
            step.group.end(step)
        if self.request.rows is not None:
            self.request.rows.steps = self.steps
