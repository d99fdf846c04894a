"""The cache of a retrieval layer: its parts, its prefill, a full store, and the window on the compute device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.engine.errors import CacheFullError
from hetero_kv.engine.rollback import rollback_on_error
from hetero_kv.families.retrieval import layer as retrieval_layer
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.layout import RetrievalLayout
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.store import storage
from hetero_kv.store.pool import BlockPool
from hetero_kv.store.pool_arrays import represent_blocks
from tests.support.caches import append, forward, new_cache


def cache_of(capacity=200, block_size=4, sink_tokens=4, local_len=8):
    """A cache of one retrieval layer, and the layer."""
    layout = RetrievalLayout.of(block_size, sink_tokens, local_len)
    cache = new_cache(lambda: RetrievalLayer(layout, RetrievalSettings(kv_type="FP32")), capacity=capacity)
    return cache, cache.layers[0]


def tokens(count, seed=0, batch=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, count, 3, generator=generator), torch.randn(batch, 2, count, 5, generator=generator)


@pytest.mark.parametrize("kind", [storage.FP16, storage.Q8_0])
def test_representatives_of_huge_keys_are_finite(kind):
    pool = BlockPool(2, 1, 4, 32, 32, storage.FP32, 1, value_means=True, representative_storage=kind)
    pool.write(np.array([1], np.int32), 0, torch.full((1, 4, 32), 1e5), torch.ones(1, 4, 32))
    represent_blocks([pool], torch.tensor([1]), lambda keys: torch.full((1, 1, 1, 32), 1e5))
    assert kind.decode(pool.representatives[1]).float() == pytest.approx(torch.full((1, 1, 32), 65504.0), rel=1e-3)
    assert kind.decode(pool.value_means[1]).float() == pytest.approx(torch.ones(1, 1, 32), rel=1e-3)


@pytest.mark.parametrize("examples", [8, pytest.param(80, marks=pytest.mark.slow)])
def test_initial_context_and_local_partition_the_sequence(examples):
    settings(max_examples=examples, deadline=None)(require_a_partition)()


@given(length=st.integers(1, 150), block=st.integers(1, 9), initial=st.integers(0, 20), local=st.integers(1, 30))
def require_a_partition(length, block, initial, local):
    cache, layer = cache_of(block_size=block, sink_tokens=initial, local_len=local)
    append(cache, *tokens(length))
    blocks = len(layer.block_ids(0))
    initial_end = min(layer.layout.sink_blocks, blocks)
    assert initial_end <= layer.context_end <= blocks
    assert layer.context_end == initial_end + layer.context_blocks
    if layer.context_blocks:
        local_tokens = length - layer.context_end * block
        assert local <= local_tokens < local + block


def test_chunks_of_a_prefill_see_everything_before_them_and_are_stored_at_the_end():
    cache, layer = cache_of()
    first, second = tokens(13), tokens(10, seed=1)
    append(cache, *first)
    with forward(cache, 1, 10) as step:
        layer.begin_prefill(step)
        past, _ = layer.extend(second[0][:, :, :6], second[1][:, :, :6])
        assert torch.equal(past, first[0])
        past, past_values = layer.extend(second[0][:, :, 6:], second[1][:, :, 6:])
        assert torch.equal(past, torch.cat([first[0], second[0][:, :, :6]], dim=2))
        assert torch.equal(past_values, torch.cat([first[1], second[1][:, :, :6]], dim=2))
        assert cache.lengths == [13]
        assert layer.get_seq_length() == 23
        layer.end_prefill(step)
        layer.leave_prefill()
    assert cache.lengths == [23]
    assert layer.get_seq_length() == 23
    keys, values = torch.empty(2, 23, 3), torch.empty(2, 23, 5)
    layer.pool.gather(layer.block_ids(0), 23, keys, values)
    assert torch.equal(keys, torch.cat([first[0], second[0]], dim=2)[0])
    assert torch.equal(values, torch.cat([first[1], second[1]], dim=2)[0])


def test_a_prefill_that_fails_stores_nothing():
    cache, _ = cache_of()

    def failing_prefill():
        with rollback_on_error(cache), forward(cache, 1, 10) as step:
            layer = step.group.layers[0]
            layer.begin_prefill(step)
            layer.extend(*tokens(6))
            raise KeyError

    with pytest.raises(KeyError):
        failing_prefill()
    assert cache.get_seq_length() == 0
    assert cache.layers[0].prefill_buffer is None


def test_a_full_store_names_max_seq_len_and_what_would_fit():
    cache, _ = cache_of(capacity=20)
    append(cache, *tokens(13))
    with pytest.raises(
        CacheFullError, match=r"max_seq_len is 20 tokens, 13 are stored, and 9 more .* at least 22.* 7 "
    ):
        cache.require_room(1, 9)
    cache.require_room(1, 7)


@pytest.mark.parametrize("examples", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_the_device_window_attends_to_exactly_initial_and_local(examples):
    settings(max_examples=examples, deadline=None)(require_the_window_to_attend)()


@given(
    prompt=st.integers(1, 60),
    decoded=st.integers(0, 40),
    block=st.sampled_from([1, 4]),
    initial=st.sampled_from([0, 3, 8]),
    local=st.integers(1, 12),
    back=st.integers(0, 20),
)
def require_the_window_to_attend(prompt, decoded, block, initial, local, back):
    needs_window = retrieval_layer._needs_window
    retrieval_layer._needs_window = lambda device: True
    try:
        cache, layer = cache_of(block_size=block, sink_tokens=initial, local_len=local)
        keys, values = tokens(prompt + decoded, batch=2)
        append(cache, keys[:, :, :prompt], values[:, :, :prompt])
        for index in range(prompt, prompt + decoded):
            append(cache, keys[:, :, index : index + 1], values[:, :, index : index + 1], is_decode=True)
        length = max(1, prompt + decoded - back)
        cache.crop(length - cache.get_seq_length())
    finally:
        retrieval_layer._needs_window = needs_window
    q = torch.randn(2, 4, 1, 3, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(length)
    seen = (positions < layer.layout.sink_blocks * block) | (positions >= layer.context_end * block)
    scores = q.reshape(2, 2, 2, 3) @ keys[:, :, :length][:, :, seen].transpose(-1, -2) * 0.5
    expected = (scores.softmax(-1) @ values[:, :, :length][:, :, seen]).reshape(2, 4, 1, 5)
    out, lse = layer.window.attend(q, 0.5)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, scores.logsumexp(-1).reshape(2, 4, 1), rtol=1e-5, atol=1e-6)
