"""Forked caches: contents, sharing, room, and blocks that are given back."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from caches import CAPACITY, append, forward, new_cache
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from hetero_kv.engine.errors import CacheFullError
from hetero_kv.engine.undo import undo_on_error
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.layout import RetrievalLayout
from hetero_kv.families.retrieval.settings import RetrievalSettings
from hetero_kv.families.window.layer import WindowLayer

BATCH, HEADS, K_DIM, V_DIM, BLOCK = 2, 2, 3, 5, 4


def paged(accumulates=False):
    return RetrievalLayer(RetrievalLayout.of(BLOCK, 4, 8, accumulates), RetrievalSettings(kv_type="FP32"))


def watched():
    return paged(accumulates=True)


def random_tokens(count, seed=0, batch=BATCH):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, HEADS, count, K_DIM, generator=generator),
        torch.randn(batch, HEADS, count, V_DIM, generator=generator),
    )


def rows_of(layer):
    """Per row of the cache, the ids of its blocks in this layer."""
    return [layer.block_ids(row) for row in range(len(layer.cohort.sequences))]


def allocator_of(layer):
    return layer.cohort.store.allocators[layer.layout]


def closing(step, layer):
    """As the operator does: the blocks that enter the Context take the attention that they have received."""
    start, end = step.blocks(layer.layout).newly_closed
    first = max(start, layer.layout.sink_blocks)
    if first < end:
        layer.take_accumulated(first, end)


def watching_append(cache, keys, values, received=None):
    """Store tokens; in the watched layer all keys, new ones included, receive attention, then blocks close."""
    with forward(cache, len(keys), keys.shape[2], is_decode=False) as step:
        for layer in step.cohort.layers:
            if isinstance(layer, DynamicLayer):
                layer.update(keys, values)
                continue
            layer.store(step, keys, values)
            if layer.layout.closes_alone:
                if received is not None:
                    layer.accumulate(received, 0)
                closing(step, layer)


def accumulated(layer, row):
    """What a row's keys have received, [kv_heads, length]: in the pool of closed blocks, else in the state."""
    length, start = layer.cohort.length, layer.state.open_start
    found = torch.zeros(HEADS, length)
    first = layer.layout.sink_blocks * BLOCK
    if start > first:
        ids = layer.block_ids(row)[first // BLOCK : start // BLOCK].astype(int)
        found[:, first:start] = layer.pool.accumulated[ids].transpose(0, 1).flatten(1, 2)
    if layer.state.accumulated is not None:
        part = layer.state.accumulated[row]
        found[:, start : start + part.shape[1]] = part
    return found


def contents(layer):
    if isinstance(layer, DynamicLayer):
        return layer.keys, layer.values
    rows = rows_of(layer)
    keys = torch.empty(len(rows), HEADS, layer.get_seq_length(), K_DIM)
    values = torch.empty(len(rows), HEADS, layer.get_seq_length(), V_DIM)
    for index, ids in enumerate(rows):
        if len(ids):
            layer.pool.gather(ids, layer.get_seq_length(), keys[index], values[index])
    return keys, values


class ForkedCaches(RuleBasedStateMachine):
    """Random forks, turns, failed turns, steps back, beams, resets and drops of caches, beside plain tensors."""

    @initialize(forks=st.integers(0, 3))
    def begin(self, forks):
        self.caches = [new_cache(paged, watched, DynamicLayer, forks=forks)]
        self.expected = [[*random_tokens(0), torch.empty(BATCH, HEADS, 0)]]
        self.forks, self.seed = forks, 0
        self.caches[0].require_room(BATCH, 1)
        self.pools = [allocator_of(layer) for layer in self.caches[0].layers[:2]]

    def present(self, index):
        """One of the caches that still share the first one's pools, and what it should hold."""
        index %= len(self.caches)
        return self.caches[index], self.expected[index]

    def some_tokens(self, count):
        self.seed += 1
        return random_tokens(count, self.seed)

    @rule(index=st.integers(0, 9))
    def fork(self, index):
        if len(self.caches) in range(1, 6):
            cache, expected = self.present(index)
            self.caches.append(cache.fork())
            self.expected.append([part.clone() for part in expected])

    @rule(index=st.integers(0, 9), count=st.integers(1, 18))
    def append(self, index, count):
        if not self.caches:
            return
        cache, expected = self.present(index)
        keys, values = self.some_tokens(count)
        if count > cache.room:
            with pytest.raises(CacheFullError):
                append(cache, keys, values)
            return
        layer = cache.layers[1]
        open_from = layer.state.open_start
        received = torch.rand(BATCH, HEADS, layer.get_seq_length() + count)
        watching_append(cache, keys, values, received)
        for stored in cache.layers[:2]:
            assert all(allocator_of(stored).lengths[ids].sum() == cache.get_seq_length() for ids in rows_of(stored))
        expected[:2] = (torch.cat(pair, dim=2) for pair in zip(expected[:2], (keys, values), strict=True))
        expected[2] = torch.cat([expected[2], torch.zeros(BATCH, HEADS, count)], dim=2)
        expected[2][:, :, open_from:] += received[:, :, open_from:]

    @rule(index=st.integers(0, 9), count=st.integers(1, 18))
    def fail(self, index, count):
        if not self.caches:
            return
        cache, _ = self.present(index)

        def failing_turn():
            with undo_on_error(cache):
                watching_append(
                    cache, *self.some_tokens(count), torch.rand(BATCH, HEADS, cache.get_seq_length() + count)
                )
                raise KeyError

        with pytest.raises((KeyError, CacheFullError)):
            failing_turn()

    @rule(index=st.integers(0, 9), share=st.floats(0, 1))
    def crop(self, index, share):
        if self.caches:
            cache, expected = self.present(index)
            length = int(share * cache.get_seq_length())
            cache.crop(length - cache.get_seq_length())
            expected[:] = (part[:, :, :length] for part in expected)

    @rule(index=st.integers(0, 9), beams=st.lists(st.integers(0, BATCH - 1), min_size=BATCH, max_size=BATCH))
    def reorder(self, index, beams):
        if self.caches:
            cache, expected = self.present(index)
            cache.reorder_cache(torch.tensor(beams))
            expected[:] = (part[beams] for part in expected)

    @rule(index=st.integers(0, 9), forget=st.sampled_from(["reset", "drop"]))
    def leave(self, index, forget):
        if self.caches:
            index %= len(self.caches)
            cache = self.caches.pop(index)
            del self.expected[index]
            if forget == "reset":
                cache.reset()
                assert cache.get_seq_length() == cache.dram_bytes == 0

    @invariant()
    def every_cache_holds_its_tokens(self):
        for cache, (keys, values, received) in zip(self.caches, self.expected, strict=True):
            for layer in cache.layers:
                if keys.shape[2] or not isinstance(layer, DynamicLayer):
                    assert all(map(torch.equal, contents(layer), (keys, values)))
            for row, wanted in enumerate(received):
                torch.testing.assert_close(accumulated(cache.layers[1], row), wanted)

    @invariant()
    def every_block_is_held_by_exactly_its_sequences(self):
        for index, pool in enumerate(self.pools):
            holders = [int(b) for cache in self.caches for ids in rows_of(cache.layers[index]) for b in ids]
            assert all(pool.references(block) == holders.count(block) for block in range(pool.num_blocks))
            assert pool.free_blocks == pool.num_blocks - len(set(holders))

    @invariant()
    def planned_forks_have_the_room_that_was_planned(self):
        if len(self.caches) <= 1 + self.forks:
            assert all(cache.room == CAPACITY - cache.get_seq_length() for cache in self.caches)

    @invariant()
    def shared_bytes_are_those_of_blocks_with_another_holder(self):
        for cache in self.caches:
            others = [other for other in self.caches if other is not cache]
            shared = 0
            for index, pool in enumerate(self.pools):
                held = {int(b) for ids in rows_of(cache.layers[index]) for b in ids}
                elsewhere = {int(b) for other in others for ids in rows_of(other.layers[index]) for b in ids}
                shared += len(held & elsewhere) * sum(layer_pool.bytes_per_block for layer_pool in pool.pools.values())
            assert cache.shared_bytes == shared


TestForkedCaches = ForkedCaches.TestCase
TestForkedCaches.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_fork_takes_no_memory_until_it_goes_its_own_way():
    cache = new_cache(paged)
    append(cache, *random_tokens(22))
    before = cache.dram_bytes
    twin = cache.fork()
    assert twin.dram_bytes == cache.dram_bytes == twin.shared_bytes == before
    append(twin, *random_tokens(1, 1))
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
    twin = cache.fork()
    assert cache.room < CAPACITY - 30
    room = cache.room
    with pytest.raises(CacheFullError, match=rf"shares with its forks .* room for {room}; .*forks=1"):
        append(cache, *random_tokens(room + 1, 1))
    assert {layer.get_seq_length() for layer in cache.layers} == {30}
    append(cache, *random_tokens(room, 1))
    cache.reset()
    assert twin.room == CAPACITY - 30


def test_a_dropped_fork_gives_its_blocks_back_even_in_a_reference_cycle():
    cache = new_cache(paged)
    append(cache, *random_tokens(20))
    twin = cache.fork()
    append(twin, *random_tokens(9, 1))
    taken = allocator_of(cache.layers[0]).free_blocks
    twin.cycle = twin
    del twin
    gc.collect()
    assert allocator_of(cache.layers[0]).free_blocks > taken
    assert cache.shared_bytes == 0


def test_a_reset_fork_begins_anew_with_a_store_of_its_own():
    cache = new_cache(paged)
    append(cache, *random_tokens(30))
    twin = cache.fork()
    twin.reset()
    # It is planned by the memory that is free then.
    cache._maker.capacity = CAPACITY // 2
    with pytest.raises(CacheFullError, match=f"max_seq_len is {CAPACITY // 2} tokens"):
        append(twin, *random_tokens(CAPACITY, 1))
    append(twin, *random_tokens(CAPACITY // 2, 1))
    assert twin.layers[0].pool is not cache.layers[0].pool
    assert all(map(torch.equal, contents(cache.layers[0]), random_tokens(30)))


def test_a_fork_of_an_empty_cache_is_an_empty_cache():
    cache = new_cache(paged)
    twin = cache.fork()
    append(cache, *random_tokens(5))
    assert twin.get_seq_length() == 0
    append(twin, *random_tokens(7, batch=1))
    assert (len(cache.lengths), len(twin.lengths)) == (2, 1)


def test_layers_of_a_fork_share_selections_with_each_other_and_not_with_the_first_cache():
    cache = new_cache(paged, paged)
    append(cache, *random_tokens(20))
    cache.layers[0].cohort.shared["selections"] = {"key": [1]}
    twin = cache.fork()
    shared = [layer.cohort.shared for layer in twin.layers]
    assert shared[0] is shared[1]
    assert shared[0] == {"selections": {"key": [1]}}
    shared[0]["selections"].clear()
    assert cache.layers[0].cohort.shared == {"selections": {"key": [1]}}


def test_progress_of_a_fork_is_not_reported_to_the_first_caches_listener():
    cache = new_cache(paged, on_progress=lambda *report: None)
    assert cache.fork().on_progress is None


def test_a_deep_copy_is_a_fork():
    cache = new_cache(paged)
    append(cache, *random_tokens(20))
    twin = copy.deepcopy({"prompt": cache})["prompt"]
    assert twin.layers[0].pool is cache.layers[0].pool


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
    def held(layer, seen, sign):
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
    twin, seen = layer.fork({}), before
    for count in pieces:
        layer.extend(*positions(seen, count))
        twin.extend(*positions(seen, count, -1))
        seen += count
    past = range(max(0, seen - (window - 1)), seen)
    assert held(layer, seen, 1) == [*past, seen]
    assert held(twin, seen, -1) == [p if p < before else -p for p in past] + [-seen]


def test_transformers_own_layers_are_forked_whole():
    def cache_of(*layers):
        return new_cache(*(lambda layer=layer: layer for layer in layers))

    cache = cache_of(DynamicLayer(), DynamicSlidingWindowLayer(8))
    append(cache, *random_tokens(20))
    twin = cache.fork()
    append(twin, *random_tokens(3, 1))
    assert (cache.get_seq_length(), twin.get_seq_length()) == (20, 23)
    assert torch.equal(cache.layers[1].keys, random_tokens(20)[0][:, :, -7:])

    recurrent = cache_of(LinearAttentionLayer())
    recurrent.layers[0].update_recurrent_state(torch.ones(1, 2, 3))
    twin = recurrent.fork()
    twin.layers[0].update_recurrent_state(torch.zeros(1, 2, 3))
    assert recurrent.layers[0].recurrent_states[0].sum() == 6
