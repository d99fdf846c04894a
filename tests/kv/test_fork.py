"""Forked caches: contents, sharing, room, and blocks that are given back."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.checkpoints import undo_on_error
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.retrieval.layer import CacheFullError, PagedLayer
from hetero_kv.families.retrieval.state import RetrievalState
from hetero_kv.families.window.layer import WindowLayer
from hetero_kv.store import storage

BATCH, HEADS, K_DIM, V_DIM, BLOCK, CAPACITY = 2, 2, 3, 5, 4, 40


class Maker:
    """Stands for an injection: which layers there are, and that everything fits."""

    def __init__(self, *layers):
        self.layers = layers

    def max_seq_len(self, wanted, batch, forks):
        return CAPACITY if wanted is None else wanted

    def cache_layers(self, capacity):
        shared = {}
        return [layer(capacity, shared) for layer in self.layers]


def paged(capacity, shared, keep_received=False):
    state = RetrievalState(shared)
    return PagedLayer(capacity, BLOCK, 4, 8, storage.FP32, 1, lambda layer, buffer: None, keep_received, state)


def watched(capacity, shared):
    return paged(capacity, shared, keep_received=True)


def new_cache(*layers, **settings):
    model = nn.Module()
    model.hetero_kv_injection = Maker(*layers)
    return HeteroCache(model, **settings)


def random_tokens(count, seed=0, batch=BATCH):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, HEADS, count, K_DIM, generator=generator),
        torch.randn(batch, HEADS, count, V_DIM, generator=generator),
    )


def append(cache, keys, values):
    cache.require_room(len(keys), keys.shape[2])
    for layer in cache.layers:
        (layer.update if isinstance(layer, DynamicLayer) else layer.append)(keys, values)


def contents(layer):
    if isinstance(layer, DynamicLayer):
        return layer.keys, layer.values
    keys = torch.empty(len(layer.rows), HEADS, layer.get_seq_length(), K_DIM)
    values = torch.empty(len(layer.rows), HEADS, layer.get_seq_length(), V_DIM)
    for index, row in enumerate(layer.rows):
        row.gather(keys[index], values[index])
    return keys, values


class ForkedCaches(RuleBasedStateMachine):
    """Random forks, turns, failed turns, steps back, beams, resets and drops of caches, beside plain tensors."""

    @initialize(forks=st.integers(0, 3))
    def begin(self, forks):
        self.caches = [new_cache(paged, watched, lambda capacity, shared: DynamicLayer(), forks=forks)]
        self.expected = [[*random_tokens(0), torch.empty(BATCH, HEADS, 0)]]
        self.forks, self.seed = forks, 0
        append(self.caches[0], *random_tokens(0))
        self.pools = [layer.pool for layer in self.caches[0].layers[:2]]

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
        append(cache, keys, values)
        for layer in cache.layers[:2]:
            assert all(layer.pool.lengths[row.ids].sum() == row.length for row in layer.rows)
        # As the operator does: all keys receive attention, then the blocks that entered the Context are closed.
        layer = cache.layers[1]
        open_from = max(layer.indexed_blocks, layer.initial_blocks) * BLOCK
        received = torch.rand(BATCH, HEADS, layer.get_seq_length())
        layer.add_received(received, 0)
        layer.indexed_blocks = max(layer.indexed_blocks, layer.context_end)
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
                append(cache, *self.some_tokens(count))
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
            for row, wanted in zip(cache.layers[1].rows, received, strict=True):
                blocks = cache.layers[1].pool.received[row.ids.astype(int)]
                torch.testing.assert_close(blocks.transpose(0, 1).flatten(1, 2)[:, : row.length], wanted)

    @invariant()
    def every_block_is_held_by_exactly_its_sequences(self):
        for index, pool in enumerate(self.pools):
            holders = [int(b) for cache in self.caches for row in cache.layers[index].rows for b in row.ids]
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
                held = {int(b) for row in cache.layers[index].rows for b in row.ids}
                elsewhere = {int(b) for other in others for row in other.layers[index].rows for b in row.ids}
                shared += len(held & elsewhere) * pool.bytes_per_block
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
    assert cache.layers[0].pool.free_blocks == 0


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
    taken = cache.layers[0].pool.free_blocks
    twin.cycle = twin
    del twin
    gc.collect()
    assert cache.layers[0].pool.free_blocks > taken
    assert cache.shared_bytes == 0


def test_a_reset_fork_begins_anew_with_a_store_of_its_own():
    cache = new_cache(paged)
    append(cache, *random_tokens(30))
    twin = cache.fork()
    twin.reset()
    # It is planned by the memory that is free then.
    cache._maker.max_seq_len = lambda wanted, batch, forks: CAPACITY // 2
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
    assert (len(cache.layers[0].rows), len(twin.layers[0].rows)) == (2, 1)


def test_layers_of_a_fork_share_selections_with_each_other_and_not_with_the_first_cache():
    cache = new_cache(paged, paged)
    append(cache, *random_tokens(20))
    cache.layers[0].state.shared["key"] = [1]
    twin = cache.fork()
    states = [layer.state for layer in twin.layers]
    assert states[0].shared is states[1].shared
    assert states[0].shared == {"key": [1]}
    states[0].shared.clear()
    assert cache.layers[0].state.shared == {"key": [1]}


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
    with cache.layers[0].prefill(5), pytest.raises(HeteroKVError, match="a prompt is being prefilled"):
        cache.fork()
    cache.layers[0].append(*random_tokens(5))
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
        return new_cache(*(lambda capacity, shared, layer=layer: layer for layer in layers))

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
