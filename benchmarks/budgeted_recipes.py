"""The recipes of the results page, at equal numbers of attended tokens and with their default settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.equal_budgets import settings_for_budget
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.families.token_retrieval.choosers.magicpig import sampling_chance

SHIPPED = "as shipped"
FRACTIONS = (32, 16, 8)
"""A method attends to one of this many prompt tokens."""

# Blocks of at most 32 tokens: with the recipes' 128, a sixteenth of 4,096 tokens would leave one block to choose.
_PAGED: dict[str, dict[str, Any]] = {
    "adaptive": {"block_size": 16, "sink_tokens": 16},
    "adaptive_lean": {"block_size": 32, "sink_tokens": 0},
    "quest": {"block_size": 16, "sink_tokens": 16},
    "ktransformers": {"block_size": 32, "sink_tokens": 32},
    "infllm": {"block_size": 32, "sink_tokens": 32},
    "snapkv": {"block_size": 1, "sink_tokens": 0},
    "streaming": {"block_size": 4, "sink_tokens": 4, "top_k_blocks": 0},
}
_ESTIMATING = ("adaptive", "adaptive_lean")
# Recipes that choose single tokens have small blocks, so that the window has its nominal length.
_TOKENS = {"block_size": 16, "sink_tokens": 16}
_CLUSTER = 16
# MagicPIG's hash bits and maximum number of tables (its paper has 8 to 11 bits, and 75 to 200 tables).
_BITS, _MOST_TABLES = (10, 9, 8, 7), 200
_BY_TOKENS = ("sparq", "loki", "magicpig", "retroinfer", "infinigen")
# Recipes that keep as many entries as the budget, and drop the others.
_BOUNDED = ("cam", "bigbird")
RECIPES = (*_PAGED, "shadowkv", *_BY_TOKENS, *_BOUNDED)
_CHUNK, _LOCAL_CHUNKS = 8, 4


@dataclass(frozen=True)
class RecipeBudget:
    """A recipe at one budget.

    Attributes:
        fraction: prompt tokens per attended token; `SHIPPED` for the recipe's own budget.
        spec: the method in the notation of `--config`, which results use too.
    """

    recipe: str
    fraction: int | str
    spec: str


def cells(
    length: int, fractions: tuple[int, ...] = FRACTIONS, shipped: tuple[str, ...] = ("adaptive",)
) -> list[RecipeBudget]:
    """Every recipe at every share of a prompt of `length` tokens, and those of `shipped` with their own settings."""
    found = [
        RecipeBudget(recipe, fraction, at_budget(recipe, length // fraction, length))
        for recipe in RECIPES
        for fraction in fractions
    ]
    return found + [RecipeBudget(recipe, SHIPPED, _as_shipped(recipe)) for recipe in shipped]


def _as_shipped(recipe: str) -> str:
    """A recipe with its own settings; this project's choose from the first block on, instead of being exact there."""
    return _spec(recipe, {"max_dense_blocks": 0}) if recipe in _ESTIMATING else recipe


def at_budget(recipe: str, budget: int, length: int) -> str:
    """A recipe with settings by which it attends to `budget` tokens of `length` in every layer, on average.

    The sink, Local and blocks share the budget as `settings_for_budget` says. ShadowKV's local chunks are the recipe's;
    a quarter goes to outliers. Where single tokens are chosen a quarter is Local. Ours have no target and no
    groups: every list of blocks gets the same number, of all that there are. What MagicPIG samples is up to the keys:
    the budget is met where they are at right angles to the queries. InfiniGen takes the best, wherever its threshold
    would be. No layer is dense.
    """
    if recipe == "shadowkv":
        outliers = budget // 4 // _CHUNK
        sparse = budget - _CHUNK * (_LOCAL_CHUNKS + outliers)
        return _spec(recipe, {"outlier_chunks": outliers, "sparse_budget": max(_CHUNK, sparse // _CHUNK * _CHUNK)})
    if recipe in _BY_TOKENS:
        return _spec(recipe, _token_settings(recipe, budget, length))
    if recipe in _BOUNDED:
        return _spec(recipe, {"budget": budget})
    own = _PAGED[recipe]
    found = settings_for_budget(RetrievalSettings(**own), budget)
    preselected = found.pop("preselect_block_count")
    settings = {"block_size": own["block_size"], **found}
    if recipe == "snapkv":
        settings["preselect_block_count"] = preselected
    if recipe == "quest":
        settings["dense_layer_num"] = 0
    if recipe in _ESTIMATING:
        settings |= {"target_mass": "none", "min_blocks": 1, "group_blocks": 1}
    return _spec(recipe, settings)


def _token_settings(recipe: str, budget: int, length: int) -> dict[str, Any]:
    # Local is longer by up to a block less a token, by half of it on average.
    excess = _TOKENS["block_size"] // 2
    local = max(1, budget // 4 - excess)
    initial = settings_for_budget(RetrievalSettings(**_TOKENS), budget)["sink_tokens"]
    settings = {**_TOKENS, "sink_tokens": initial, "local_windows_len": local}
    chosen = max(1, budget - initial - local - excess)
    if recipe == "magicpig":
        return settings | {"dense_layer_num": 0, **_hashes(chosen / (length - initial - local - excess))}
    if recipe == "retroinfer":
        return settings | {"exact_clusters": max(1, round(chosen / _CLUSTER))}
    own = {"dense_layer_num": 0, "alpha": 1000.0} if recipe == "infinigen" else {}
    return settings | own | {"token_budget": chosen}


def _hashes(share: float) -> dict[str, int]:
    """Hash bits and tables with which a token is sampled with probability `share`."""
    for bits in _BITS:
        for tables in range(2, _MOST_TABLES + 1):
            if float(sampling_chance(torch.zeros(()), bits, tables)) >= share:
                return {"hash_bits": bits, "hash_tables": tables}
    raise ValueError(f"{share} of all tokens is more than {_MOST_TABLES} tables of {_BITS[-1]} bits sample")


def _spec(recipe: str, settings: dict[str, Any]) -> str:
    return ":".join((recipe, *(f"{name}={value}" for name, value in settings.items())))
