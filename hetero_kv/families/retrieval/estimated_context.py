"""A layer's Context on a GPU that chooses single tokens by estimated attention masses.

All blocks' mean keys, mean values and coarse copies of keys lie on the GPU, and chosen tokens in slots; of keys in four
bits, which have no coarse copies, the keys themselves lie there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.cpu_ops.step_contract import ATTENDED, CANDIDATES, CHOSEN, EVERYTHING, SCORED, TOUCHED, WHOLE
from hetero_kv.families.retrieval.device_context import CpuTurn, LayerMemory, SentToken
from hetero_kv.families.retrieval.step_counts import DecodedGroups, StepCounts
from hetero_kv.families.retrieval.token_slot_context import (
    TokenSlotContext,
    fetched_to_slots,
    joined_parts,
    window_parts,
)
from hetero_kv.gpu_ops import token_choice
from hetero_kv.gpu_ops.estimated_masses import log_totals, mean_shares, score_codes, score_means
from hetero_kv.gpu_ops.resident_attention import CONTEXT, SPLITS
from hetero_kv.gpu_ops.row_memory import Memory, without
from hetero_kv.gpu_ops.stored_keys import score_stored_keys
from hetero_kv.gpu_ops.token_attention import (
    REST_PARTS,
    TOKEN_PARTS,
    KeyOffsets,
    Parts,
    attend_to_rest,
    attend_to_tokens,
    sum_masses,
)
from hetero_kv.gpu_ops.token_choice import Target, choose, leave
from hetero_kv.store.pool import BlockPool


class EstimatedChoice(NamedTuple):
    """How a layer chooses single tokens on a GPU.

    Attributes:
        blocks: the most tokens of a kv head, in blocks.
        times: times the blocks that reach the target whose tokens are candidates.
        by_keys: whether the coarse keys of all blocks are scored, and not only those of candidates.
        share: of the attention, to be reached by as few tokens as possible; 0 for as many as `blocks` allow.
        least: the fewest tokens, in blocks.
        covering: Contexts of up to so many blocks are attended to as a whole.
        block_size: tokens of a block.
    """

    blocks: int
    times: int
    by_keys: bool
    share: float
    least: int
    covering: int
    block_size: int

    @property
    def reads_blocks(self) -> bool:
        """Whether a GPU reads blocks of the Context."""
        return True

    @property
    def needs_cpu(self) -> bool:
        """Whether the CPU attends to some of what is chosen."""
        return False

    def candidates(self, capacity: int) -> int:
        """The most blocks whose tokens are candidates, in sequences of up to `capacity` blocks."""
        return min(max(self.blocks * self.times, self.covering), capacity)

    def slots(self, capacity: int) -> int:
        """Slots of a kv head for single tokens."""
        return min(max(self.blocks, self.covering), capacity) * self.block_size

    def targets(self, capacity: int) -> tuple[Target, Target]:
        """How many blocks are candidates, and how many of their tokens are chosen."""
        blocks, covering = min(self.blocks, capacity), min(self.covering, capacity)
        of_blocks = Target(self.share, min(self.least, capacity), blocks, self.times, covering)
        tokens = of_blocks._replace(least=of_blocks.least * self.block_size, most=blocks * self.block_size, times=1)
        return of_blocks, tokens

    def context(
        self, pool: BlockPool, capacity: int, like_keys: torch.Tensor, like_values: torch.Tensor
    ) -> EstimatedContext:
        """An empty Context; the arguments as for it."""
        return EstimatedContext(self, pool, capacity, like_keys, like_values)


class EstimatedContext(TokenSlotContext):
    """Mean keys, mean values, coarse keys and key offsets of all blocks, and slots for single tokens.

    Args:
        choice: how tokens are chosen.
        pool: the layer's blocks in DRAM.
        capacity: the most blocks of a sequence.
        like_keys, like_values: [batch, kv_heads, any, dim], for shapes, dtype and device.
    """

    # By which tokens are chosen, and by which the others are estimated.
    indexed = ("representatives", "value_means")

    def __init__(
        self, choice: EstimatedChoice, pool: BlockPool, capacity: int, like_keys: torch.Tensor,
        like_values: torch.Tensor,
    ) -> None:  # fmt: skip
        self.choice = choice
        self._has_codes, self._has_offsets = pool.key_codes is not None, pool.key_offsets is not None
        coarse, offsets = "key_codes" if self._has_codes else "keys", ("key_offsets",) if self._has_offsets else ()
        self.indexed = (*EstimatedContext.indexed, coarse, *offsets)
        super().__init__(pool, capacity, choice.slots(capacity), like_keys, like_values)
        self._width, self._targets = choice.candidates(capacity), choice.targets(capacity)

    def sent_shapes(self, rows: int) -> dict[str, tuple[int, ...]]:
        """See DeviceContext."""
        heads = rows * self._slots.ids.shape[1]
        return {"taken": (heads, 4), "shares": (heads,)}

    def attended(
        self, call: AttentionCall, memory: LayerMemory[Any], pool: BlockPool, numbers: torch.Tensor,
        table: torch.Tensor, sent: SentToken, cpu: CpuTurn | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """See DeviceContext."""
        assert sent.taken is not None
        assert sent.shares is not None
        q = call.q if call.q.stride(3) == 1 else call.q.contiguous()
        parts = window_parts(call, q, memory, numbers, sent, TOKEN_PARTS + REST_PARTS)
        number = numbers[:, CONTEXT]
        vectors, means, coarse, *further = memory.context
        offsets, of_slots = (further[0], further[1:]) if self._has_offsets else (None, further)
        scored = vectors, coarse, offsets
        chosen, counts, weights, masses = self._chosen(call, q, scored, parts, number, sent.taken)
        slots = fetched_to_slots(pool, table, of_slots, chosen, counts, sent.missed)
        differences = None if offsets is None else KeyOffsets(offsets, chosen, self.choice.block_size)
        attend_to_tokens(q, of_slots[-2], of_slots[-1], slots, counts, call.scale, call.softcap, parts, differences)
        rest = attend_to_rest(weights, masses, without(means, 3), number, parts)
        sum_masses(parts.lse, rest, sent.shares)
        return joined_parts(call, q, parts)

    def _chosen(
        self, call: AttentionCall, q: torch.Tensor, scored: tuple[Memory, Memory, Memory | None], parts: Parts,
        number: torch.Tensor, taken: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Choose tokens by the query and by what the window receives.

        scored: of all blocks representatives, coarse copies of keys or the keys, and key offsets.

        Returns them, as [batch, kv_heads, slots] int32, their numbers [batch, kv_heads] int32, and the weights and the
        masses of what remains of each block (`gpu_ops.estimated_masses.BlockMasses`). Writes `taken`.
        """
        (batch, kv_heads), count, size = call.k.shape[:2], self._slots.ids.shape[2], self.choice.block_size
        of_blocks, of_tokens = self._targets
        vectors, coarse, offsets = scored
        known = score_means(q, vectors, number, size, call.scale, call.softcap)

        def score(listed: torch.Tensor | None, token_scores: torch.Tensor | None) -> None:
            scoring = known, call.scale, call.softcap, token_scores
            if self._has_codes:
                score_codes(q, without(coarse, 3), listed, number, size, *scoring)
            else:
                score_stored_keys(q, coarse, offsets, listed, number, *scoring)

        if self.choice.by_keys:
            score(None, None)
        scores = known.masses if self.choice.by_keys else known.likely
        outside = parts.lse[:, :, :SPLITS]
        totals = log_totals(scores, known.masses, outside, number)
        # Candidates and tokens, and how many there are of both.
        places, chosen, place_counts, counts = (
            q.new_empty((batch, kv_heads, *shape), dtype=torch.int32) for shape in ((self._width,), (count,), (), ())
        )
        shares = mean_shares(scores, known.masses, totals)
        choose(*shares, totals, number, 1, None, None, of_blocks, places, place_counts)
        tokens = self._width * size
        token_scores = torch.empty(*known.masses.shape[:3], tokens, dtype=torch.float32, device=q.device)
        score(places, token_scores)
        # With the keys' masses in the places of the means'.
        totals = log_totals(known.masses, known.masses, outside, number)
        _, of_each = mean_shares(token_scores, token_scores, totals)
        is_taken = torch.empty(batch, kv_heads, tokens, dtype=torch.int8, device=q.device)
        among = places, place_counts
        choose(of_each, of_each, totals, number, size, *among, of_tokens, chosen, counts, is_taken)
        taken.zero_()
        counted = taken.view(batch, kv_heads, -1)
        counted[:, :, token_choice.TOKENS].copy_(counts)
        counted[:, :, token_choice.CANDIDATES].copy_(place_counts)
        leave(token_scores, is_taken, places, totals, known.weights, known.masses, counted)
        return chosen, counts, known.weights, known.masses

    def counts(self, length: int, context: int, rows: int, sent: SentToken) -> StepCounts:
        """See DeviceContext."""
        assert sent.taken is not None
        assert sent.shares is not None
        chooses, size = self.choice.covering < context, self.choice.block_size
        of_rows = sent.taken.view(rows, -1, 4).sum(dim=1).numpy()
        kv_heads = len(sent.taken) // rows
        taken = np.zeros((rows, WHOLE + 1), np.int64)
        columns = token_choice.TOKENS, token_choice.TOUCHED, token_choice.WHOLE
        taken[:, [ATTENDED, TOUCHED, WHOLE]] = of_rows[:, columns]
        by_keys = self.choice.by_keys
        taken[:, CANDIDATES] = context * kv_heads if by_keys else of_rows[:, token_choice.CANDIDATES]
        # Where all coarse copies are scored, the means are scored with them.
        taken[:, SCORED] = 0 if by_keys and self._has_codes else context * kv_heads
        # The share of a kv head, in logarithms, of a whole of 1.
        covered = sent.shares.view(1, rows, -1, 1).log()
        masses = torch.cat([covered, torch.zeros_like(covered)]).numpy()
        groups = DecodedGroups([length], [context], [chooses], [slice(rows)])
        most, which = min(self.choice.blocks * self.choice.times, context), CHOSEN if chooses else EVERYTHING
        varies = self.choice.share > 0
        return StepCounts(groups, which, most, kv_heads, 0, size, taken if chooses else None, masses, varies)
