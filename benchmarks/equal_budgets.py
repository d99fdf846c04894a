"""Computes settings with which every recipe attends to the same number of tokens per step."""

from __future__ import annotations

from typing import Any

from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.operators import RetrievalAttention
from hetero_kv.rules.injection import Injection


def retrieval_settings(injection: Injection) -> RetrievalSettings:
    """The settings of the last retrieval layer, which is dense in no recipe."""
    return next(o.settings for o in reversed([*injection.attention_operators()]) if isinstance(o, RetrievalAttention))


def is_full(settings: RetrievalSettings) -> bool:
    """Whether these settings attend to all tokens, for any budget."""
    return settings.top_k_blocks == "all"


def settings_for_budget(recipe: RetrievalSettings, budget: int) -> dict[str, Any]:
    """Initial, Local and the number of blocks with which `recipe` attends to `budget` tokens in a layer, on average.

    The recipe keeps its `block_size`; its `sink_tokens`, if that is no more than a quarter of the budget, else it has
    none, and the first block is retrieved like any other; Local is a quarter; the rest goes to blocks, and what is
    less than a block to Local. A recipe that chooses nothing (streaming) has all of the rest in Local. Local is longer
    than `local_windows_len` by up to a block less a token, which is counted with its mean. A recipe that preselects
    attends to all that it preselected.
    """
    if is_full(recipe):
        return {}
    size = recipe.block_size
    excess = (size - 1) / 2
    initial = -(-recipe.sink_tokens // size) * size
    if initial > budget / 4:
        initial = 0
    blocks = 0
    if recipe.top_k_blocks != 0:
        local = max(1 + excess, budget / 4)
        blocks = max(1, int((budget - initial - local) / size))
    found = {
        "sink_tokens": initial,
        "local_windows_len": max(1, round(budget - initial - blocks * size - excess)),
        "top_k_blocks": blocks,
        "preselect_block_count": blocks,
    }
    if recipe.target_mass != "none" and recipe.min_blocks > blocks:
        found["min_blocks"] = blocks
    return found
