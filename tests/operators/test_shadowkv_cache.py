"""ShadowKV's cache: going back, forks, beams, other operators in the same model."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hetero_kv import HeteroCache, eject
from hetero_kv.engine.rollback import rollback_on_error
from hetero_kv.operators import RetrievalAttention, ShadowKVAttention, SlidingWindowAttention
from tests.operators.shadowkv_models import (
    conversation,
    injected,
    logits,
    model_of,
    random_tokens,
    relative_error,
)
from tests.support.slow_variants import combined, with_slow


def test_statistics_of_a_cache_say_how_its_layers_fare(llama):
    cache = injected(llama, sparse_budget=8, rank=16)
    logits(llama, cache, random_tokens(150), *random_tokens(20, 1).split(1, dim=1))
    assert all(0 <= rate <= 1 for rate in cache.statistics["chunk_hit_rate"])
    assert all(0 < share < 1 for share in cache.statistics["key_energy_outside"])
    again = HeteroCache(llama)
    logits(llama, again, random_tokens(150), *([random_tokens(1, 5)] * 2))
    assert again.statistics["chunk_hit_rate"] != cache.statistics["chunk_hit_rate"]
    assert again.statistics["block_recall"] == [None] * 3


@pytest.mark.parametrize("plus", with_slow([False, True], slow=[False]))
def test_going_back_after_a_failure_leaves_no_trace(llama, plus):
    settings = {"rank": 9, "sparse_budget": 12, "project_generated": plus, "refactor_above": 0.0}
    start = [random_tokens(100, 1), *random_tokens(9, 2).split(1, dim=1)]
    lost = [*random_tokens(14, 3).split(1, dim=1), random_tokens(40, 4), *random_tokens(6, 5).split(1, dim=1)]
    after = [*random_tokens(5, 6).split(1, dim=1), random_tokens(30, 7), *random_tokens(5, 8).split(1, dim=1)]
    cache = injected(llama, **settings)
    logits(llama, cache, *start)

    def failing():
        with rollback_on_error(cache):
            logits(llama, cache, *lost)
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    other = HeteroCache(llama)
    logits(llama, other, *start)
    assert cache.get_seq_length() == other.get_seq_length() == 109
    assert [layer.counted.factored for layer in cache.layers] == [layer.counted.factored for layer in other.layers]
    # The same chunks may lie in other slots, which changes the order of sums.
    assert relative_error(logits(llama, cache, *after), logits(llama, other, *after)) < 1e-5


@pytest.mark.parametrize(("back", "plus"), combined([3, 25, 90], [True, False]))
def test_cropped_tokens_are_forgotten(llama, plus, back):
    cache = injected(llama, project_generated=plus)
    parts = [random_tokens(120, 1), *random_tokens(20, 2).split(1, dim=1)]
    logits(llama, cache, *parts)
    cache.crop(-back)
    more = [*random_tokens(6, 3).split(1, dim=1), random_tokens(30, 4), *random_tokens(4, 5).split(1, dim=1)]
    actual = logits(llama, cache, *more)
    eject(llama)
    kept = torch.cat(parts, dim=1)[:, :-back]
    with torch.no_grad():
        expected = llama(torch.cat([kept, *more], dim=1)).logits[:, kept.shape[1] :]
    assert relative_error(actual, expected) < 2e-5


def test_slots_equal_the_rebuilt_keys_also_after_new_factors(llama):
    # No outliers, so that the slots outlive the prompt after which the keys are factored again.
    cache = injected(llama, rank=9, sparse_budget=24, outlier_chunks=0, refactor_above=0.0)
    logits(llama, cache, random_tokens(60, 1), *random_tokens(6, 2).split(1, dim=1))
    factored = [layer.counted.factored for layer in cache.layers]
    logits(llama, cache, random_tokens(30, 3), random_tokens(1, 4))
    assert [layer.counted.factored for layer in cache.layers] != factored
    for layer in cache.layers:
        require_current(layer)


def require_current(layer):
    """Fail unless the slots, of which none is empty, hold what their chunks' factors say."""
    residents = layer.context.outliers.residents
    resident = residents.keys.unflatten(2, (-1, 4))
    assert (residents.ids >= 0).all()
    torch.testing.assert_close(resident, layer.rebuilt(residents.ids), rtol=1e-4, atol=1e-5)


def test_slots_forget_the_chunks_of_steps_that_were_undone(llama):
    # Most chunks are chosen, those among them that the lost tokens made.
    cache = injected(llama, rank=9, sparse_budget=80, outlier_chunks=0, project_generated=True)
    logits(llama, cache, random_tokens(100, 1), *random_tokens(2, 2).split(1, dim=1))
    before, chunks = cache.snapshot(), [layer.context.length // 4 for layer in cache.layers]
    logits(llama, cache, *random_tokens(14, 3).split(1, dim=1))
    slots = [layer.context.outliers.residents.ids for layer in cache.layers]
    assert all((ids >= first).any() for ids, first in zip(slots, chunks, strict=True))
    cache.rollback(before)
    logits(llama, cache, *random_tokens(14, 4).split(1, dim=1))
    for layer in cache.layers:
        require_current(layer)


def test_forks_go_their_own_ways(llama):
    cache = injected(llama, rank=9, sparse_budget=12, project_generated=True)
    start = [random_tokens(100, 1), *random_tokens(9, 2).split(1, dim=1)]
    ways = [[*random_tokens(15, seed).split(1, dim=1), random_tokens(20, seed + 1)] for seed in (3, 5)]
    logits(llama, cache, *start)
    fork = cache.fork()
    interleaved = [[], []]
    for pair in zip(*ways, strict=True):
        for out, which, part in zip(interleaved, (cache, fork), pair, strict=True):
            out.append(logits(llama, which, part))
    for out, way in zip(interleaved, ways, strict=True):
        alone = HeteroCache(llama)
        logits(llama, alone, *start)
        assert torch.equal(torch.cat(out, dim=1), logits(llama, alone, *way))
    assert fork.shared_bytes > 0


def test_beam_search_equals_the_untouched_models(llama):
    tokens = random_tokens(90, 9)
    beam = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    expected = llama.generate(tokens, past_key_values=DynamicCache(config=llama.config), **beam)
    cache = injected(llama, project_generated=True)
    assert llama.generate(tokens, past_key_values=cache, **beam).tolist() == expected.tolist()


def test_a_reset_cache_is_empty(llama):
    cache = injected(llama, rank=9, sparse_budget=12)
    parts = conversation(90, 10, 20, 3)
    first = logits(llama, cache, *parts)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(logits(llama, cache, *parts), first)


def test_layers_may_have_different_operators(llama):
    retrieval = {
        "match": {"name": r"layers\.1\.self_attn$"},
        "replace": {"class": "RetrievalAttention", "kwargs": {"block_size": 4, "kv_type": "FP32"}},
    }
    untouched = {"match": {"name": r"layers\.2\.self_attn$"}, "replace": {"class": "default"}}
    parts = conversation(90, 20, 20, 5)
    cache = injected(llama, retrieval, untouched)
    kinds = [type(operator) for operator in llama.hetero_kv_injection.attention_operators()]
    assert kinds == [ShadowKVAttention, RetrievalAttention]
    actual = logits(llama, cache, *parts)
    eject(llama)
    with torch.no_grad():
        assert relative_error(actual, llama(torch.cat(parts, dim=1)).logits) < 2e-5


def test_the_models_own_sliding_windows_keep_theirs():
    model = model_of("gemma3_text")
    injected(model)
    try:
        kinds = [type(operator) for operator in model.hetero_kv_injection.attention_operators()]
    finally:
        eject(model)
    assert kinds == [SlidingWindowAttention, ShadowKVAttention, SlidingWindowAttention]


def test_layers_with_one_rotation_share_its_table_and_others_have_their_own(llama):
    cache = injected(llama)
    logits(llama, cache, random_tokens(90), *random_tokens(5, 1).split(1, dim=1))
    tables = {id(layer.factors.rotary) for layer in cache.layers}
    assert len(tables) == 1
    assert len(cache.layers[0].factors.rotary) == 95
