"""Translates settings into the kernels' choice of blocks, and into the derived arrays that a pool needs for it."""

from __future__ import annotations

from typing import NamedTuple

from hetero_kv.cpu_ops.chosen_blocks import LARGEST, LARGEST_SOFTMAX, MEAN, SOFTMAX
from hetero_kv.cpu_ops.retrieval_step import BlockChoice
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.store.key_codes import has_key_codes

REDUCTIONS = {"mean": MEAN, "max": LARGEST, "softmax": SOFTMAX, "softmax_max": LARGEST_SOFTMAX}
"""`group_reduce` -> its constant in `cpu_ops.chosen_blocks`."""


class Derived(NamedTuple):
    """Which arrays a block has besides keys, values and representatives.

    Attributes:
        value_means: the mean value, for residual attention.
        key_codes: coarse copies of the keys, in four bits a number, for scoring candidates.
        grouped: the representatives of the group that ends with this block.
    """

    value_means: bool = False
    key_codes: bool = False
    grouped: bool = False

    @classmethod
    def of(cls, settings: RetrievalSettings) -> Derived:
        """The arrays that the settings need. Keys of four bits and keys of small blocks need no coarse copies."""
        has_codes = settings.rerank != 1 and not settings.key_storage.is_coarse and has_key_codes(settings.block_size)
        return cls(settings.residual_attention == "estimate", has_codes, settings.group_blocks > 1)


NONE_DERIVED = Derived()


def choice_of(settings: RetrievalSettings, budget: int) -> BlockChoice | None:
    """How to choose blocks by estimated masses or by groups; None if the representatives' scores alone decide.

    budget: the most Context blocks, or as many tokens, to attend to.
    """
    target = 0.0 if settings.target_mass == "none" else float(settings.target_mass)
    reduce = REDUCTIONS[settings.group_reduce]
    is_plain = (
        reduce in (MEAN, LARGEST) and settings.residual_attention == "drop" and settings.rerank == 1 and not target
    )
    if is_plain and settings.representative_type != "MEANSTD" and settings.group_blocks == 1:
        return None
    groups = settings.group_blocks, settings.group_factor
    rerank = 0 if settings.rerank == "all" else int(settings.rerank)
    tokens = budget * settings.block_size if settings.attend_to == "tokens" else 0
    return BlockChoice(reduce, rerank, target, settings.min_blocks, *groups, tokens)
