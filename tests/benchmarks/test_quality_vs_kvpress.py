"""The recipes and presses of `benchmarks.quality_vs_kvpress` and `kept_sets_vs_kvpress`, without kvpress."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals import config_specs
from hetero_kv.families.bounded.eviction.pyramidkv import PyramidKV, PyramidKVSettings


@pytest.fixture(scope="module")
def benchmarks():
    """Both modules without kvpress, which would replace transformers' attention functions for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "kvpress", None)
        from benchmarks import kept_sets_vs_kvpress, quality_vs_kvpress
    return SimpleNamespace(quality=quality_vs_kvpress, kept=kept_sets_vs_kvpress)


def test_every_recipe_takes_its_settings_at_every_budget(benchmarks):
    words = benchmarks.quality.recipe_words(list(benchmarks.quality.RECIPES), [160, 256, 2048])
    assert len(config_specs(words)) == len(words)
    assert "pyramidkv:budget=256:recent_tokens=64:beta=4" in words


def test_every_method_of_the_kept_sets_is_a_recipe_with_its_settings(benchmarks):
    words = {
        benchmarks.quality.word(method.recipe, {"budget": budget, **method.settings(budget, 2048)})
        for method in benchmarks.kept.METHODS.values()
        for budget in (256, 512)
    }
    assert len(config_specs(sorted(words))) == 2 * len(benchmarks.kept.METHODS)


@pytest.mark.parametrize("budget", [256, 512, 1024])
def test_the_like_for_like_pyramid_keeps_in_every_layer_what_the_press_shares_out(benchmarks, budget):
    layers, tokens = 24, 8192
    method = benchmarks.kept.METHODS["PyramidKV"]
    settings = PyramidKVSettings(budget=budget, **method.settings(budget, tokens))
    # The press lets all that is kept fall linearly, the window included, to 1/beta of the mean.
    top = budget / method.press_settings(budget)["beta"]
    falling = [2 * budget - top - index * 2 * (budget - top) / (layers - 1) for index in range(layers)]
    found = [PyramidKV(settings, index, layers).budget_for(tokens) for index in range(layers)]
    assert found == [round(kept) for kept in falling]
    assert sum(found) == budget * layers


def test_names_are_chosen_from_those_that_there_are(benchmarks):
    chosen, known = benchmarks.quality.chosen, ["tova", "quest"]
    assert chosen("quest, tova", known, "recipes") == ["quest", "tova"]
    assert chosen("none", known, "recipes") == []
    with pytest.raises(HeteroKVError, match="recipes has 'h3o'; give some of tova, quest, or none"):
        chosen("tova,h3o", known, "recipes")


class Longest:
    """Keeps the tokens of the longest keys, written as presses are: it gathers keys and values by the same indices."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys.norm(dim=-1)

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        scores = self.score(module, hidden_states, keys, values, attentions, kwargs)
        indices = scores.topk(3, dim=-1).indices[..., None].expand(-1, -1, -1, keys.shape[3])
        return keys.gather(2, indices), values.gather(2, indices)


def test_a_presss_choices_are_recorded_and_nothing_is_dropped(benchmarks):
    keys, values = torch.rand(1, 2, 9, 4), torch.rand(1, 2, 9, 4)
    press = Longest()
    recording = benchmarks.kept.recorded(press)
    left = press.compress(SimpleNamespace(layer_idx=5), None, keys, values, None, {})
    assert left == (keys, values)
    lengths = keys[0].norm(dim=-1)
    assert recording.positions[5].equal(lengths.topk(3, dim=-1).indices.sort(dim=-1).values)
    assert recording.scores[5].equal(lengths)


def test_a_budget_that_covers_the_prompt_is_refused(benchmarks):
    with pytest.raises(HeteroKVError, match="give 160 or more, and less than the 512 tokens"):
        benchmarks.kept.compare("none", "float32", [], [256, 512], 512, None)
