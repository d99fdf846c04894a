"""Recipes accept the settings of the comparison at equal budgets."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.equal_budgets import settings_for_budget
from hetero_kv.families.retrieval.settings import RetrievalSettings


def test_at_few_blocks_a_target_asks_for_no_more_than_these():
    recipe = RetrievalSettings(block_size=16, sink_tokens=16, representative_type="MEAN", target_mass=0.9, min_blocks=4)
    few = replace(recipe, **settings_for_budget(recipe, 64))
    assert few.min_blocks == few.top_k_blocks < 4
    few.validate()
    assert "min_blocks" not in settings_for_budget(recipe, 1024)
