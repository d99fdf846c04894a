"""A loaded cache continues bit for bit like the saved one, in every family."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contexts.conversations import goes_on, said
from tests.support.slow_variants import with_few
from tests.support.small_families import FAMILIES, TOGETHER, random_tokens
from tests.support.small_recipes import injected, new_cache
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=with_few(FAMILIES, TOGETHER))
def model(request):
    architecture, rules = FAMILIES[request.param]
    model = tiny_model(architecture)
    injected(model, rules)
    return model


turns = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 14)), min_size=1, max_size=3)


@settings(max_examples=2, deadline=None, derandomize=True)
@given(sizes=turns, batch=st.integers(1, 2), seed=st.integers(0, 99))
def test_a_loaded_cache_continues_as_the_saved_one(model, tmp_path_factory, sizes, batch, seed):
    cache = new_cache(model)
    parts = [
        (random_tokens(prompt, seed + index, batch), random_tokens(answer, seed - index - 1, batch))
        for index, (prompt, answer) in enumerate(sizes)
    ]
    tokens = said(model, cache, *parts)
    path = tmp_path_factory.mktemp("context") / "saved.safetensors"
    cache.save(path, tokens)
    loaded = new_cache(model, load=path)
    assert loaded.lengths == cache.lengths
    assert loaded.statistics == cache.statistics
    fork = loaded.fork()
    expected = goes_on(model, cache, tokens, seed)
    assert torch.equal(goes_on(model, loaded, tokens, seed), expected)
    assert loaded.statistics == cache.statistics
    assert torch.equal(
        goes_on(model, fork, tokens, seed + 1), goes_on(model, new_cache(model, load=path), tokens, seed + 1)
    )
