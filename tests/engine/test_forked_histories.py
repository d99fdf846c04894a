"""Random histories of forked caches, compared with plain tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from transformers.cache_utils import DynamicLayer

from hetero_kv.engine.errors import CacheFullError
from hetero_kv.engine.rollback import rollback_on_error
from tests.engine.forked_layers import (
    BATCH,
    BLOCK,
    HEADS,
    allocator_of,
    contents,
    paged,
    random_tokens,
    rows_of,
    watched,
)
from tests.support.caches import CAPACITY, append, forward, new_cache


def closing(step, layer):
    """As the operator does: the blocks that enter the Context take the attention that they have received."""
    start, end = step.blocks(layer.layout).newly_finalized
    first = max(start, layer.layout.sink_blocks)
    if first < end:
        layer.take_accumulated(first, end)


def watching_append(cache, keys, values, received=None):
    """Store tokens; in the watched layer all keys, new ones included, receive attention, then blocks close."""
    with forward(cache, len(keys), keys.shape[2], is_decode=False) as step:
        for layer in step.group.layers:
            if isinstance(layer, DynamicLayer):
                layer.update(keys, values)
                continue
            layer.store(step, keys, values)
            if layer.layout.finalizes_per_sequence:
                if received is not None:
                    layer.accumulate(received, 0)
                closing(step, layer)


def accumulated(layer, row):
    """What a row's keys have received, [kv_heads, length]: in the pool of closed blocks, else in the state."""
    length, start = layer.group.length, layer.state.open_start
    found = torch.zeros(HEADS, length)
    first = layer.layout.sink_blocks * BLOCK
    if start > first:
        ids = layer.block_ids(row)[first // BLOCK : start // BLOCK].astype(int)
        found[:, first:start] = layer.pool.accumulated[ids].transpose(0, 1).flatten(1, 2)
    if layer.state.accumulated is not None:
        part = layer.state.accumulated[row]
        found[:, start : start + part.shape[1]] = part
    return found


class ForkedCaches(RuleBasedStateMachine):
    """Random forks, turns, failed turns, steps back, beams, resets and drops of caches, compared with plain tensors."""

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
            with rollback_on_error(cache):
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
            for row, expected in enumerate(received):
                torch.testing.assert_close(accumulated(cache.layers[1], row), expected)

    @invariant()
    def every_block_belongs_to_exactly_its_sequences(self):
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
                blocks = {int(b) for ids in rows_of(cache.layers[index]) for b in ids}
                elsewhere = {int(b) for other in others for ids in rows_of(other.layers[index]) for b in ids}
                shared += len(blocks & elsewhere) * sum(
                    layer_pool.bytes_per_block for layer_pool in pool.pools.values()
                )
            assert cache.shared_bytes == shared


TestForkedCaches = ForkedCaches.TestCase
TestForkedCaches.settings = settings(max_examples=14, stateful_step_count=30, deadline=None)
