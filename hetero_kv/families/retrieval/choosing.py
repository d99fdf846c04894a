"""From settings to how kernels choose blocks, and to what a pool holds for it."""

from __future__ import annotations

from typing import NamedTuple

from cpu_ops.chosen_blocks import LARGEST, LARGEST_SOFTMAX, MEAN, SOFTMAX
from cpu_ops.estimating_step import Choice
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.store.key_codes import has_key_codes

REDUCTIONS = {"mean": MEAN, "max": LARGEST, "softmax": SOFTMAX, "softmax_max": LARGEST_SOFTMAX}
"""`group_reduce` as `cpu_ops.chosen_blocks` calls it."""


class Derived(NamedTuple):
    """What is kept of a block beside its keys, values and representatives.

    Attributes:
        value_means: the mean of its values, by which the rest is estimated.
        key_codes: how its keys differ from their mean, in four bits, by which candidates are scored.
        grouped: what stands for the group of blocks that it is the last of.
    """

    value_means: bool = False
    key_codes: bool = False
    grouped: bool = False

    @classmethod
    def of(cls, settings: RetrievalSettings) -> Derived:
        """As settings ask for. Keys that are stored in few bits, and those of small blocks, are scored as they are."""
        is_coarse = settings.key_storage.for_representatives != settings.key_storage
        has_codes = settings.rerank != 1 and not is_coarse and has_key_codes(settings.block_size)
        return cls(settings.rest == "estimate", has_codes, settings.group_blocks > 1)


NONE_DERIVED = Derived()


def choice_of(settings: RetrievalSettings, budget: int) -> Choice | None:
    """How blocks are chosen where that takes an estimate, or groups of them; None where it takes the scores alone.

    budget: blocks of the Context, or as many tokens, that are attended to at most.
    """
    target = 0.0 if settings.target_mass == "none" else float(settings.target_mass)
    reduce = REDUCTIONS[settings.group_reduce]
    is_plain = reduce in (MEAN, LARGEST) and settings.rest == "drop" and settings.rerank == 1 and not target
    if is_plain and settings.representative_type != "MEANSTD" and settings.group_blocks == 1:
        return None
    groups = settings.group_blocks, settings.group_factor
    rerank = 0 if settings.rerank == "all" else int(settings.rerank)
    tokens = budget * settings.block_size if settings.attend_to == "tokens" else 0
    return Choice(reduce, rerank, target, settings.least_block_count, *groups, tokens)
