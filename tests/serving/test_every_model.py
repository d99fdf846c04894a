"""Under every recipe and in every architecture each of many requests gets the tokens that it gets alone."""

from __future__ import annotations

import pytest

from hetero_kv import SamplingParams
from tests.serving.tiny_engine import PROMPTS, alone, engine_of, pause_everywhere
from tests.support.small_recipes import RECIPES
from tests.support.tiny_models import ARCHITECTURES, HYBRIDS

pytestmark = pytest.mark.usefixtures("one_thread")

ANSWER = SamplingParams(max_new_tokens=16, ignore_eos=True)


def answered_as_alone(recipe, architecture, **settings):
    """Four requests; while the later ones' prompts are computed, the earlier ones get tokens as often as possible."""
    with engine_of(recipe, architecture, longest_gap_s=1e-6, **settings) as engine:
        pause_everywhere(engine)
        streams = [engine.generate(tokens, ANSWER) for tokens in PROMPTS[:4]]
        answers = [stream.result().tokens for stream in streams]
        assert answers == [alone(engine, tokens, ANSWER.max_new_tokens) for tokens in PROMPTS[:4]]


# In small parts beside the tokens of others, and in large ones, which pause for these.
@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"part": 8}, {}], ids=["small parts", "pauses"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_under_every_recipe(recipe, settings):
    answered_as_alone(recipe, "llama", **settings)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"part": 8}, {}], ids=["small parts", "pauses"])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *HYBRIDS])
@pytest.mark.parametrize("recipe", ["dense", "quest"])
def test_in_every_architecture(recipe, architecture, settings):
    answered_as_alone(recipe, architecture, **settings)
