"""Block tables over a shared pool: contents, sharing, leaks."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from hetero_kv.store import storage
from hetero_kv.store.allocator import BlockAllocator
from hetero_kv.store.block_table import BlockTable
from hetero_kv.store.pool import BlockPool

KV_HEADS, BLOCK, K_DIM, V_DIM, BLOCKS = 2, 4, 3, 5, 24


def new_allocator(num_blocks=BLOCKS, kind=storage.FP32):
    """An allocator of one layer's pool."""
    allocator = BlockAllocator(BLOCK)
    allocator.provide(num_blocks)
    allocator.pools[0] = BlockPool(num_blocks, KV_HEADS, BLOCK, K_DIM, V_DIM, kind, 1)
    return allocator


def append(table, keys, values):
    start = table.length
    table.reserve(start + keys.shape[1])
    table.allocator.pools[0].write(table.ids, start, keys, values)


def random_tokens(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(KV_HEADS, count, K_DIM, generator=generator),
        torch.randn(KV_HEADS, count, V_DIM, generator=generator),
    )


def contents(table):
    keys, values = torch.empty(KV_HEADS, table.length, K_DIM), torch.empty(KV_HEADS, table.length, V_DIM)
    table.allocator.pools[0].gather(table.ids, table.length, keys, values)
    return keys, values


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.integers(1, 19), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_appended_pieces_are_read_back_whole(pieces, seed):
    table = BlockTable(new_allocator(64), 64 * BLOCK)
    keys, values = random_tokens(sum(pieces), seed)
    start = 0
    for piece in pieces:
        append(table, keys[:, start : start + piece], values[:, start : start + piece])
        start += piece
    for actual, expected in zip(contents(table), (keys, values), strict=True):
        assert torch.equal(actual, expected)
    lengths = table.allocator.lengths[table.ids]
    assert lengths.sum() == table.length
    assert (lengths[:-1] == BLOCK).all()


@given(start=st.integers(0, 30), count=st.integers(0, 30))
def test_read_returns_the_requested_positions(start, count):
    table = BlockTable(new_allocator(), BLOCKS * BLOCK)
    keys, values = random_tokens(61, seed=0)
    append(table, keys, values)
    read_keys, read_values = table.allocator.pools[0].read(table.ids, start, start + count)
    assert torch.equal(read_keys, keys[:, start : start + count])
    assert torch.equal(read_values, values[:, start : start + count])


def test_fp16_storage_rounds_to_half_precision():
    table = BlockTable(new_allocator(kind=storage.FP16), BLOCKS * BLOCK)
    keys, values = random_tokens(9, seed=0)
    append(table, keys, values)
    assert torch.equal(contents(table)[0], keys.half().float())


def test_a_full_pool_stores_nothing_of_what_does_not_fit():
    table = BlockTable(new_allocator(num_blocks=2), 100)
    append(table, *random_tokens(6, seed=0))
    before = contents(table)
    with pytest.raises(MemoryError, match="0 free blocks of 2"):
        append(table, *random_tokens(3, seed=1))
    assert table.length == 6
    assert table.allocator.free_blocks == 0
    assert torch.equal(contents(table)[0], before[0])


class ForkedSequences(RuleBasedStateMachine):
    """Random forks, appends, truncations and frees of sequences over one pool, compared with plain tensors."""

    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.allocator = new_allocator()
        self.expected = {}
        self.seed = 0

    @rule(target=sequences)
    def begin(self):
        table = BlockTable(self.allocator, BLOCKS * BLOCK)
        self.expected[table] = (torch.empty(KV_HEADS, 0, K_DIM), torch.empty(KV_HEADS, 0, V_DIM))
        return table

    @rule(table=sequences, count=st.integers(1, 11))
    def append(self, table, count):
        if table not in self.expected or self.allocator.free_blocks < count // BLOCK + 2:
            return
        self.seed += 1
        tokens = random_tokens(count, self.seed)
        append(table, *tokens)
        self.expected[table] = tuple(
            torch.cat([old, new], 1) for old, new in zip(self.expected[table], tokens, strict=True)
        )
        # What kernels go by; a shared last block may be longer until its table appends.
        assert self.allocator.lengths[table.ids].sum() == table.length

    @rule(table=sequences, share=st.floats(0, 1))
    def truncate(self, table, share):
        if table not in self.expected:
            return
        length = int(share * table.length)
        table.truncate(length)
        self.expected[table] = tuple(old[:, :length] for old in self.expected[table])

    @rule(target=sequences, table=sequences)
    def fork(self, table):
        if table not in self.expected:
            return table
        forked = table.fork()
        self.expected[forked] = self.expected[table]
        return forked

    @rule(table=sequences)
    def free(self, table):
        if table in self.expected:
            table.free()
            del self.expected[table]

    @invariant()
    def every_sequence_holds_its_tokens(self):
        for table, expected in self.expected.items():
            assert all(torch.equal(a, e) for a, e in zip(contents(table), expected, strict=True))
            assert (self.allocator.lengths[table.ids[:-1]] == BLOCK).all()
            assert self.allocator.lengths[table.ids].sum() >= table.length

    @invariant()
    def every_block_belongs_to_exactly_its_sequences(self):
        holders = [int(block) for table in self.expected for block in table.ids]
        assert all(self.allocator.references(block) == holders.count(block) for block in range(BLOCKS))
        assert self.allocator.free_blocks == BLOCKS - len(set(holders))


TestForkedSequences = ForkedSequences.TestCase
TestForkedSequences.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_both_of_two_tables_that_go_on_in_a_block_of_theirs_keep_their_own_tokens():
    table = BlockTable(new_allocator(), BLOCKS * BLOCK)
    append(table, *random_tokens(6, seed=0))
    fork = table.fork()
    ways = [random_tokens(1, seed) for seed in (1, 2)]
    for way, tokens in zip((table, fork), ways, strict=True):
        append(way, *tokens)
    for way, tokens in zip((table, fork), ways, strict=True):
        assert torch.equal(contents(way)[0][:, 6:], tokens[0])


def test_blocks_between_the_first_and_the_last_may_lie_in_any_order():
    pool, ids = new_allocator().pools[0], torch.tensor([3, 5, 4, 6], dtype=torch.int32).numpy()
    keys, values = random_tokens(4 * BLOCK, seed=0)
    pool.write(ids, 0, keys, values)
    assert torch.equal(pool.keys[5, :, :], keys[:, BLOCK : 2 * BLOCK])
    assert torch.equal(pool.values[4, :, :], values[:, 2 * BLOCK : 3 * BLOCK])


def test_a_table_that_is_collected_during_a_recount_is_counted_or_abandoned_once(monkeypatch):
    allocator = new_allocator()
    table = BlockTable(allocator, BLOCK * BLOCKS)
    append(table, *random_tokens(3 * BLOCK, 0))
    blocks, known = table.ids.tolist(), BlockTable.ids
    # Only the cycle collector drops these.
    for _ in range(8):
        fork = table.fork()
        fork.itself = fork
    del fork

    def collecting(each):
        gc.collect()
        return known.fget(each)

    monkeypatch.setattr(BlockTable, "ids", property(collecting))
    allocator.recount()
    monkeypatch.undo()
    gc.collect()
    assert [allocator.references(block) for block in blocks] == [1, 1, 1]
    assert not set(allocator.allocate(allocator.free_blocks).tolist()) & set(blocks)


@pytest.mark.parametrize("freed", [0, 5, 40])
def test_prompts_leave_blocks_to_tokens_and_all_can_be_allocated(freed):
    allocator = BlockAllocator(BLOCK)
    allocator.provide(200)
    first = allocator.allocate(60)
    assert first.tolist() == list(range(60))
    allocator.release(first[:freed])
    second = allocator.allocate(70)
    touched = allocator.touched_blocks
    # Tokens write beside what was written before, and no earlier prompt's memory is left unused for long.
    tokens = np.concatenate([allocator.allocate(1) for _ in range(16)])
    assert allocator.touched_blocks == touched <= 60 + 70 + 16
    rest = allocator.allocate(allocator.free_blocks)
    ids = np.concatenate([first[freed:], second, tokens, rest])
    assert sorted(ids.tolist()) == list(range(200))
    with pytest.raises(MemoryError, match="0 free blocks of 200"):
        allocator.allocate(1)
