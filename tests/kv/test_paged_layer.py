"""The cache of a retrieval layer: its parts, its prefill, a full store, and the window on the compute device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.families.retrieval import layer as paged_layer
from hetero_kv.families.retrieval.layer import CacheFullError, PagedLayer
from hetero_kv.store import storage


def new_layer(capacity=200, block_size=4, initial_len=4, local_len=8):
    return PagedLayer(capacity, block_size, initial_len, local_len, storage.FP32, 1, lambda layer, buffer: None)


def tokens(count, seed=0, batch=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, count, 3, generator=generator), torch.randn(batch, 2, count, 5, generator=generator)


@given(length=st.integers(1, 150), block=st.integers(1, 9), initial=st.integers(0, 20), local=st.integers(1, 30))
@settings(max_examples=80, deadline=None)
def test_initial_context_and_local_partition_the_sequence(length, block, initial, local):
    layer = new_layer(block_size=block, initial_len=initial, local_len=local)
    layer.append(*tokens(length))
    blocks = layer.rows[0].num_blocks
    initial_end = min(layer.initial_blocks, blocks)
    assert initial_end <= layer.context_end <= blocks
    assert layer.context_end == initial_end + layer.context_blocks
    if layer.context_blocks:
        local_tokens = length - layer.context_end * block
        assert local <= local_tokens < local + block


def test_chunks_of_a_prefill_see_everything_before_them_and_are_stored_at_the_end():
    layer = new_layer()
    first, second = tokens(13), tokens(10, seed=1)
    layer.append(*first)
    with layer.prefill(10):
        past, _ = layer.extend(second[0][:, :, :6], second[1][:, :, :6])
        assert torch.equal(past, first[0])
        past, past_values = layer.extend(second[0][:, :, 6:], second[1][:, :, 6:])
        assert torch.equal(past, torch.cat([first[0], second[0][:, :, :6]], dim=2))
        assert torch.equal(past_values, torch.cat([first[1], second[1][:, :, :6]], dim=2))
        assert layer.rows[0].length == 13
    assert layer.rows[0].length == layer.get_seq_length() == 23


def test_a_prefill_that_fails_stores_nothing():
    layer = new_layer()

    def failing_prefill():
        with layer.prefill(10):
            layer.extend(*tokens(6))
            raise KeyError

    with pytest.raises(KeyError):
        failing_prefill()
    assert layer.get_seq_length() == 0
    assert layer.prefill_buffer is None


def test_a_full_store_names_max_seq_len_and_what_would_fit():
    layer = new_layer(capacity=20)
    layer.append(*tokens(13))
    with pytest.raises(CacheFullError, match=r"max_seq_len is 20 tokens, 13 are stored and 9 more .* at least 22.* 7 "):
        layer.require_room(9)
    layer.require_room(7)


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.integers(1, 60),
    decoded=st.integers(0, 40),
    block=st.sampled_from([1, 4]),
    initial=st.sampled_from([0, 3, 8]),
    local=st.integers(1, 12),
    back=st.integers(0, 20),
)
def test_the_device_window_attends_to_exactly_initial_and_local(prompt, decoded, block, initial, local, back):
    needs_window = paged_layer._needs_window
    paged_layer._needs_window = lambda device: True
    try:
        layer = new_layer(block_size=block, initial_len=initial, local_len=local)
        keys, values = tokens(prompt + decoded, batch=2)
        layer.append(keys[:, :, :prompt], values[:, :, :prompt])
        for index in range(prompt, prompt + decoded):
            layer.append(keys[:, :, index : index + 1], values[:, :, index : index + 1])
        length = max(1, prompt + decoded - back)
        layer.crop(length - layer.get_seq_length())
    finally:
        paged_layer._needs_window = needs_window
    q = torch.randn(2, 4, 1, 3, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(length)
    seen = (positions < layer.initial_blocks * block) | (positions >= layer.context_end * block)
    scores = q.reshape(2, 2, 2, 3) @ keys[:, :, :length][:, :, seen].transpose(-1, -2) * 0.5
    expected = (scores.softmax(-1) @ values[:, :, :length][:, :, seen]).reshape(2, 4, 1, 5)
    out, lse = layer.window.attend(q, 0.5)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, scores.logsumexp(-1).reshape(2, 4, 1), rtol=1e-5, atol=1e-6)
