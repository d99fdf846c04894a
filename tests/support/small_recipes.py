"""The packaged recipes, with settings that matter for tiny models and a few hundred tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from hetero_kv import HeteroCache, inject
from hetero_kv.rules.rule_file import parse_rules
from hetero_kv.rules.rule_set import Rule, RuleFile, RuleSet

#: Every recipe that ships with the package, so that a new one is tested by itself.
RECIPES = sorted(path.stem for path in Path(str(resources.files("hetero_kv") / "injection_rules")).glob("*.yaml"))

#: At most this much of a setting that a recipe gives; what it gives in words ("all") stays.
SMALL = {
    "block_size": 8,
    "sink_tokens": 4,
    "local_windows_len": 16,
    "top_k_blocks": 3,
    "min_blocks": 3,
    "max_dense_blocks": 0,
    "preselect_block_count": 6,
    "observation_len": 12,
    "dense_layer_num": 1,
    "rank": 8,
    "landmark_chunk_size": 4,
    "outlier_chunks": 3,
    "local_chunks": 2,
    "budget": 40,
    "token_budget": 12,
    # Of few hyperplanes none is so near a key that rounding moves it to the other side.
    "hash_bits": 2,
    "hash_tables": 6,
    "cluster_tokens": 4,
    "segment_tokens": 40,
    "skew_queries": 6,
    "stride": 16,
    "recent_tokens": 8,
    "position_group": 3,
    "neighbour_window": 12,
    "stream_chunk": 8,
    "gamma": 0.9,
}
#: For every recipe: keys and values keep their computed precision, and prompts have several chunks.
ENGINE = {"chunk_size": 64, "max_seq_len": 1024, "threads_num": 1, "kv_type": "FP32"}
#: Settings that a recipe may leave to their defaults, which are for long contexts.
_ASSUMED = ("observation_len", "sink_tokens")


class Letters:
    """A tokenizer of one token per letter, for policies with a catalyst."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [(ord(letter) - 90) % 97 for letter in text]


def small(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, none of them larger than in SMALL."""
    return {
        name: min(value, SMALL[name]) if name in SMALL and isinstance(value, int | float) else value
        for name, value in settings.items()
    }


def _as_computed(rule: Rule) -> dict[str, str]:
    settings = rule.operator.settings_class_for(rule.kwargs) if rule.operator else None
    return {name: "FP32" for name in ("kv_type", "value_type") if hasattr(settings, name)}


@cache
def _packaged(name: str) -> RuleSet:
    """A packaged recipe, read once: thousands of tests take one."""
    return parse_rules({"extends": f"{name}.yaml"})


def small_recipe(name: str, **long_context: Any) -> RuleSet:
    """A packaged recipe, scaled down, with these engine settings besides."""
    rules = _packaged(name)
    assumed = {setting: SMALL[setting] for setting in _ASSUMED}
    settings = {**assumed, **small(rules.long_context), **ENGINE, **long_context}
    return replace(
        with_settings(rules, settings),
        rules=tuple(replace(rule, kwargs={**small(rule.kwargs), **_as_computed(rule)}) for rule in rules.rules),
    )


def with_settings(rules: RuleSet, settings: Mapping[str, Any]) -> RuleSet:
    """The rules with these settings instead of their `long_context:`, whichever families they are of."""
    # In a file that is extended, so that settings of families that the rules do not name are no mistake.
    return replace(rules, file=RuleFile(rules.file.name, extends=(RuleFile("settings", settings),)))


def injected(model: Any, rules: RuleSet, **kwargs: Any) -> HeteroCache:
    """The model with these rules in it, and a new cache."""
    inject(model, rules)
    return new_cache(model, **kwargs)


def new_cache(model: Any, load: Path | None = None, **kwargs: Any) -> HeteroCache:
    """A new cache of a model with rules in it, with a tokenizer; or the one that was saved at `load`."""
    if load is not None:
        return HeteroCache.load(load, model, tokenizer=Letters(), **kwargs)
    return HeteroCache(model, tokenizer=Letters(), **kwargs)
