"""Ctrl-C at any moment of a forward: the conversation continues from the state before the forward."""

from __future__ import annotations

import random

import pytest
import torch

from tests.engine.interrupted_forwards import Moments, unobserved
from tests.support.slow_variants import with_few
from tests.support.small_families import FAMILIES, REORDERED, TOGETHER, random_tokens
from tests.support.small_recipes import injected, new_cache
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("short_turns_behind_any_past", "one_thread_and_no_collections")

#: Moments that are interrupted in each family: 300 in all of them.
LEAST = -(-300 // len(FAMILIES))


#: A prompt of several chunks, an answer longer than Local, a second turn that is chunked too, and its answer.
CONVERSATION = [
    random_tokens(45, 1),
    *random_tokens(11, 2).split(1, dim=1),
    random_tokens(21, 3),
    *random_tokens(3, 4).split(1, dim=1),
]
#: Which of its parts are prompts.
PROMPTS = 0, 12


@torch.no_grad()
def answered(model, cache, part, moments):
    """The logits of a part; its forward passes these moments."""
    return moments.run(lambda: model(part, past_key_values=cache).logits)


def whole(model, cache, parts=CONVERSATION):
    """The logits of every part of a conversation, and how many moments its forward has."""
    counted = [Moments() for _ in parts]
    logits = [answered(model, cache, part, moments) for part, moments in zip(parts, counted, strict=True)]
    return [(found, moments.passed) for found, moments in zip(logits, counted, strict=True)]


# `test_faults` has faults of every kind, Ctrl-C among them, in the suite; here are more moments.
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_interrupted_conversation_goes_on_bit_for_bit(family):
    architecture, rules = FAMILIES[family]
    model = tiny_model(architecture)
    # The first conversation fills what is looked up once per process or model.
    unobserved(model, injected(model, rules), CONVERSATION)
    expected = whole(model, new_cache(model))
    chance = random.Random(family)
    # Half of them in the prompts, which are most of a forward's code.
    parts = [chance.choice(PROMPTS) if n % 2 else chance.randrange(len(CONVERSATION)) for n in range(2 * LEAST)]
    cache, interrupted = new_cache(model), 0
    for index, (part, (logits, passed)) in enumerate(zip(CONVERSATION, expected, strict=True)):
        length, places = cache.get_seq_length(), []
        # A later try may have fewer moments than the first, which plans the cache: a moment that never comes is none.
        while len(places) < parts.count(index):
            moments = Moments(chance.randrange(passed))
            try:
                found = answered(model, cache, part, moments)
            except KeyboardInterrupt:
                places.append(moments.where)
                assert cache.get_seq_length() == length, f"part {index}, interrupted at {places}"
            else:
                assert moments.where is None, f"part {index}: nobody heard of the interrupt at {moments.where}"
                break
        else:
            found = answered(model, cache, part, Moments())
        interrupted += len(places)
        error = float((found - logits).abs().max() / logits.abs().max())
        exact = 1e-5 if family in REORDERED else 0.0
        assert error <= exact, f"part {index}, interrupted at {places}, is off by {error:.0e}"
    assert interrupted >= LEAST


# The head of the model comes behind the layers: they have stored everything by then.
@pytest.mark.parametrize("family", with_few(FAMILIES, TOGETHER))
def test_an_interrupt_in_the_last_moment_of_a_forward_undoes_all_of_it(family):
    architecture, rules = FAMILIES[family]
    model = tiny_model(architecture)
    parts = CONVERSATION[:2]
    unobserved(model, injected(model, rules), parts)
    expected = whole(model, new_cache(model), parts)
    cache = new_cache(model)
    for index, part in enumerate(parts):
        length, (logits, passed) = cache.get_seq_length(), expected[index]
        last = Moments(passed - 1)
        with pytest.raises(KeyboardInterrupt):
            answered(model, cache, part, last)
        assert cache.get_seq_length() == length, f"part {index}, interrupted at {last.where}"
        error = float((answered(model, cache, part, Moments()) - logits).abs().max())
        assert error <= (1e-5 if family in REORDERED else 0.0), f"part {index}, interrupted at {last.where}"
