"""Statistics of decoded tokens, which layers compute for many tokens at a time."""

from __future__ import annotations

import pytest

from hetero_kv.families.retrieval import layer as retrieval_layer
from hetero_kv.serving.forward import ModelForward
from tests.operators.retrieval_models import injected, logits, random_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

#: Chooses another number of single tokens in every step, and estimates the share of attention that they get.
ADAPTIVE = {
    "kv_type": "FP32", "threads_num": 1, "representative_type": "MEAN", "representative_num": 1,
    "head_select_mode": "SEPARATE", "group_reduce": "softmax", "residual_attention": "estimate", "rerank": "all",
    "attend_to": "tokens", "target_mass": 0.6, "min_blocks": 1, "max_dense_blocks": 0, "top_k_blocks": 8,
}  # fmt: skip
FIXED = {"kv_type": "FP32", "threads_num": 1, "top_k_blocks": 3}
PROMPT = 60


def decoded(model, cache, count, seed=0):
    """Decode tokens."""
    logits(model, cache, *random_tokens(count, seed).split(1, dim=1))


def require_equal(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, layers in expected.items():
        for number, other in zip(found[name], layers, strict=True):
            assert number == (None if other is None else pytest.approx(other, rel=tolerance)), name


def filled(model, settings):
    cache = injected(model, **settings)
    logits(model, cache, random_tokens(PROMPT))
    return cache


@pytest.mark.parametrize("settings", [ADAPTIVE, FIXED], ids=["adaptive", "fixed"])
def test_statistics_of_many_steps_are_those_of_each(llama, settings, monkeypatch):
    cache = filled(llama, settings)
    other = cache.fork()
    decoded(llama, cache, 70)
    monkeypatch.setattr(retrieval_layer, "_COUNTED_TOGETHER", 1)
    decoded(llama, other, 70)
    assert (cache.statistics["estimated_share"][0] is not None) == (settings is ADAPTIVE)
    require_equal(cache.statistics, other.statistics, 1e-12)


def test_a_statistic_that_is_read_meanwhile_is_the_same_later(llama):
    cache = filled(llama, ADAPTIVE)
    seen = []
    for token in random_tokens(66).split(1, dim=1):
        logits(llama, cache, token)
        seen.append(cache.statistics["attended_blocks"][0])
    assert len(set(seen)) > 10
    cache.reset()
    logits(llama, cache, random_tokens(PROMPT))
    decoded(llama, cache, 66)
    assert cache.statistics["attended_blocks"][0] == pytest.approx(seen[-1], rel=1e-12)


def test_forks_count_their_own_steps(llama):
    cache = filled(llama, ADAPTIVE)
    decoded(llama, cache, 10)
    before, fork = cache.statistics, cache.fork()
    decoded(llama, fork, 5, seed=1)
    assert cache.statistics == before
    after = fork.statistics
    assert after != before
    decoded(llama, cache, 3, seed=2)
    assert fork.statistics == after


@pytest.mark.parametrize("counted", [10, 63], ids=["few", "as many as become statistics together"])
def test_a_step_that_fails_is_not_counted(llama, counted, monkeypatch):
    cache = filled(llama, ADAPTIVE)
    decoded(llama, cache, counted)
    before = cache.statistics
    with monkeypatch.context() as patched:
        patched.setattr(llama.lm_head, "forward", fail)
        with pytest.raises(ZeroDivisionError):
            decoded(llama, cache, 1)
    assert cache.statistics == before
    decoded(llama, cache, 1)
    assert cache.statistics != before


def fail(*arguments):
    raise ZeroDivisionError


def test_rows_of_several_lengths_count_their_own_steps(llama):
    caches = [filled(llama, ADAPTIVE)]
    caches.append(type(caches[0])(llama))
    logits(llama, caches[1], random_tokens(100, seed=3))
    alone = [cache.fork() for cache in caches]
    forward = ModelForward(llama)
    for token in range(2, 72):
        forward.decode(caches, [token, token + 1])
        for number, cache in enumerate(alone):
            forward.decode([cache], [token + number])
    assert caches[0].statistics["read_bytes"] != caches[1].statistics["read_bytes"]
    for cache, expected in zip(caches, alone, strict=True):
        require_equal(cache.statistics, expected.statistics, 1e-5)
