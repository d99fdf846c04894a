"""Forked caches: contents, sharing, capacity, and freed blocks."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from hetero_kv.engine.errors import CacheFullError
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.window.layer import WindowLayer
from tests.engine.forked_layers import (
    BATCH,
    allocator_of,
    contents,
    paged,
    random_tokens,
    watched,
)
from tests.support.caches import CAPACITY, append, forward, new_cache


def test_a_fork_takes_no_memory_until_it_goes_its_own_way():
    cache = new_cache(paged)
    append(cache, *random_tokens(22))
    before = cache.dram_bytes
    fork = cache.fork()
    assert fork.dram_bytes == cache.dram_bytes == fork.shared_bytes == before
    append(fork, *random_tokens(1, 1))
    # The last block was not full: one copy for each of the batch's rows.
    assert cache.dram_bytes == before + BATCH * cache.layers[0].pool.bytes_per_block


def test_planned_forks_grow_to_full_length():
    cache = new_cache(paged, watched, forks=2)
    append(cache, *random_tokens(3))
    caches = cache.fork(), cache.fork(), cache
    for index, each in enumerate(caches):
        append(each, *random_tokens(CAPACITY - 3, index))
        assert each.get_seq_length() == CAPACITY
    assert allocator_of(cache.layers[0]).free_blocks == 0


def test_a_turn_that_the_forks_have_left_no_blocks_for_is_refused_before_any_layer_takes_it():
    cache = new_cache(paged, watched)
    append(cache, *random_tokens(30))
    fork = cache.fork()
    assert cache.room < CAPACITY - 30
    room = cache.room
    with pytest.raises(CacheFullError, match=rf"shares with its forks .* room for {room}; .*forks=1"):
        append(cache, *random_tokens(room + 1, 1))
    assert {layer.get_seq_length() for layer in cache.layers} == {30}
    append(cache, *random_tokens(room, 1))
    cache.reset()
    assert fork.room == CAPACITY - 30


def test_a_dropped_fork_gives_its_blocks_back_even_in_a_reference_cycle():
    cache = new_cache(paged)
    append(cache, *random_tokens(20))
    fork = cache.fork()
    append(fork, *random_tokens(9, 1))
    taken = allocator_of(cache.layers[0]).free_blocks
    fork.cycle = fork
    del fork
    gc.collect()
    assert allocator_of(cache.layers[0]).free_blocks > taken
    assert cache.shared_bytes == 0


def test_a_reset_fork_gets_its_own_store():
    cache = new_cache(paged)
    append(cache, *random_tokens(30))
    fork = cache.fork()
    fork.reset()
    # It is planned by the memory that is free then.
    cache._maker.capacity = CAPACITY // 2
    with pytest.raises(CacheFullError, match=f"max_seq_len is {CAPACITY // 2} tokens"):
        append(fork, *random_tokens(CAPACITY, 1))
    append(fork, *random_tokens(CAPACITY // 2, 1))
    assert fork.layers[0].pool is not cache.layers[0].pool
    assert all(map(torch.equal, contents(cache.layers[0]), random_tokens(30)))


def test_a_fork_of_an_empty_cache_is_an_empty_cache():
    cache = new_cache(paged)
    fork = cache.fork()
    append(cache, *random_tokens(5))
    assert fork.get_seq_length() == 0
    append(fork, *random_tokens(7, batch=1))
    assert (len(cache.lengths), len(fork.lengths)) == (2, 1)


def test_layers_of_a_fork_share_selections_with_each_other_and_not_with_the_first_cache():
    cache = new_cache(paged, paged)
    append(cache, *random_tokens(20))
    cache.layers[0].group.shared["selections"] = {"key": [1]}
    fork = cache.fork()
    shared = [layer.group.shared for layer in fork.layers]
    assert shared[0] is shared[1]
    assert shared[0] == {"selections": {"key": [1]}}
    shared[0]["selections"].clear()
    assert cache.layers[0].group.shared == {"selections": {"key": [1]}}


def test_progress_of_a_fork_is_not_reported_to_the_first_caches_listener():
    cache = new_cache(paged, on_progress=lambda *report: None)
    assert cache.fork().on_progress is None


def test_a_deep_copy_is_a_fork():
    cache = new_cache(paged)
    append(cache, *random_tokens(20))
    fork = copy.deepcopy({"prompt": cache})["prompt"]
    assert fork.layers[0].pool is cache.layers[0].pool


def test_a_cache_is_not_forked_while_a_prompt_is_prefilled():
    cache = new_cache(paged, paged)
    append(cache, *random_tokens(20))
    with forward(cache, BATCH, 5), pytest.raises(HeteroKVError, match="a prompt is being prefilled"):
        cache.fork()
    with forward(cache, BATCH, 5) as step:
        cache.layers[0].store(step, *random_tokens(5))
        with pytest.raises(HeteroKVError, match="a prompt is being prefilled"):
            cache.fork()


@given(window=st.integers(1, 9), before=st.integers(0, 20), pieces=st.lists(st.integers(1, 12), max_size=6))
def test_forked_windows_go_their_own_ways(window, before, pieces):
    def positions_of(layer, seen, sign):
        keys, values = layer.extend(*positions(seen, 1, sign))
        assert torch.equal(values, -keys)
        return keys[0, 0, :, 0].tolist()

    def positions(start, count, sign=1):
        keys = sign * torch.arange(start, start + count, dtype=torch.float32)[None, None, :, None].expand(
            1, 1, count, 2
        )
        return keys, -keys

    layer = WindowLayer(window)
    if before:
        layer.extend(*positions(0, before))
    fork, seen = layer.fork({}), before
    for count in pieces:
        layer.extend(*positions(seen, count))
        fork.extend(*positions(seen, count, -1))
        seen += count
    past = range(max(0, seen - (window - 1)), seen)
    assert positions_of(layer, seen, 1) == [*past, seen]
    assert positions_of(fork, seen, -1) == [p if p < before else -p for p in past] + [-seen]


def test_transformers_own_layers_are_forked_whole():
    def cache_of(*layers):
        return new_cache(*(lambda layer=layer: layer for layer in layers))

    cache = cache_of(DynamicLayer(), DynamicSlidingWindowLayer(8))
    append(cache, *random_tokens(20))
    fork = cache.fork()
    append(fork, *random_tokens(3, 1))
    assert (cache.get_seq_length(), fork.get_seq_length()) == (20, 23)
    assert torch.equal(cache.layers[1].keys, random_tokens(20)[0][:, :, -7:])

    recurrent = cache_of(LinearAttentionLayer())
    recurrent.layers[0].update_recurrent_state(torch.ones(1, 2, 3))
    fork = recurrent.fork()
    fork.layers[0].update_recurrent_state(torch.zeros(1, 2, 3))
    assert recurrent.layers[0].recurrent_states[0].sum() == 6
