"""Random histories of sequences: caches grow, go back, fork, lose and gain rows, and leak no block."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetero_kv import HeteroCache, inject
from hetero_kv.engine.errors import CacheFullError
from hetero_kv.errors import HeteroKVError
from hetero_kv.rules.rule_file import parse_rules
from tests.support.ragged_rows import padded, together
from tests.support.tiny_models import tiny_model

BLOCK, CAPACITY, MOST_CACHES, MOST_ROWS = 4, 48, 5, 6
_SHAPE = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16, "head_dim": 16}
_RULES = {
    "rules": [
        {
            "match": {"name": r"layers\.0\.self_attn$"},
            "replace": {"class": "RetrievalAttention", "kwargs": {"representative_type": "DYNAMIC"}},
        },
        {
            "match": {"name": r"layers\.1\.self_attn$"},
            "replace": {
                "class": "RetrievalAttention",
                "kwargs": {"representative_type": "QUEST", "representative_num": 2},
            },
        },
        {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}},
    ],
    "long_context": {
        "block_size": BLOCK,
        "sink_tokens": 4,
        "local_windows_len": 6,
        # Blocks are chosen, and there are no more than that.
        "top_k_blocks": CAPACITY,
        "observation_len": 4,
        "kv_type": "FP32",
        "chunk_size": 5,
        "max_seq_len": CAPACITY,
        "threads_num": 1,
    },
}
UNTOUCHED = tiny_model("llama", **_SHAPE)
INJECTED = tiny_model("llama", **_SHAPE)
inject(INJECTED, parse_rules(_RULES))


@dataclass(eq=False)
class ResidentPrefix:
    """A cache and what it should hold: of every row the token of each column, None where it is padded."""

    cache: HeteroCache
    rows: list[list[int | None]] = field(default_factory=list)

    def tokens(self, row):
        return [token for token in self.rows[row] if token is not None]

    def pad(self, columns):
        self.rows = [[*[None] * (columns - len(row)), *row] for row in self.rows]


class LivesOfSequences(RuleBasedStateMachine):
    """Several caches of one model, and the lists of tokens that they should hold."""

    caches = st.integers(0, MOST_CACHES - 1)

    @initialize()
    def begin(self):
        torch.set_num_threads(1)
        # What is there already stays there: looking for garbage need not look at it.
        gc.freeze()
        self.residents: list[ResidentPrefix] = []
        self.chance = torch.Generator().manual_seed(0)
        self.prompt([3, 10])

    def present(self, index):
        return self.residents[index % len(self.residents)]

    def some_tokens(self, count):
        return torch.randint(2, 97, (count,), generator=self.chance)

    def say(self, resident, parts, with_mask=True):
        """A part more for each row: its logits are the untouched model's, or it does not fit and nothing changes."""
        cache, most = resident.cache, max(map(len, parts))
        if most > cache.room:
            try:
                found = together(INJECTED, cache, parts, with_mask)
            except CacheFullError:
                return
        else:
            found = together(INJECTED, cache, parts, with_mask)
        token_ids, mask = padded(parts)
        new = [
            [int(token) if here else None for token, here in zip(*row, strict=True)]
            for row in zip(token_ids, mask, strict=True)
        ]
        resident.rows = [old + more for old, more in zip(resident.rows or [[]] * len(parts), new, strict=True)]
        for row, logits in enumerate(found):
            with torch.no_grad():
                expected = UNTOUCHED(torch.tensor([resident.tokens(row)])).logits[0]
            torch.testing.assert_close(logits, expected[-len(logits) :], rtol=1e-4, atol=1e-4)

    @precondition(lambda self: len(self.residents) < MOST_CACHES)
    @rule(counts=st.lists(st.integers(1, 20), min_size=1, max_size=3))
    def prompt(self, counts):
        self.residents.append(ResidentPrefix(HeteroCache(INJECTED)))
        self.say(self.residents[-1], [self.some_tokens(count) for count in counts])

    @rule(
        index=caches, counts=st.lists(st.integers(1, 9), min_size=MOST_ROWS, max_size=MOST_ROWS), rows=st.integers(1, 3)
    )
    def append(self, index, counts, rows):
        resident = self.present(index)
        self.say(resident, [self.some_tokens(count) for count in counts[: len(resident.rows) or rows]])

    @rule(index=caches, with_mask=st.booleans())
    def decode(self, index, with_mask):
        resident = self.present(index)
        if resident.rows:
            self.say(resident, [self.some_tokens(1) for _ in resident.rows], with_mask)

    @rule(index=caches, columns=st.integers(1, 12))
    def crop(self, index, columns):
        resident = self.present(index)
        # What is left of a row may be nothing but padding; what is left of all of them is a token.
        kept = [row[:-columns] for row in resident.rows]
        if any(token is not None for row in kept for token in row):
            resident.cache.crop(-columns)
            resident.rows = kept

    @precondition(lambda self: len(self.residents) < MOST_CACHES)
    @rule(index=caches)
    def fork(self, index):
        resident = self.present(index)
        self.residents.append(ResidentPrefix(resident.cache.fork(), [list(row) for row in resident.rows]))

    @precondition(lambda self: len(self.residents) > 1)
    @rule(index=caches, forget=st.sampled_from(["reset", "drop"]))
    def leave(self, index, forget):
        resident = self.present(index)
        if forget == "reset":
            resident.cache.reset()
            resident.rows = []
        else:
            self.residents.remove(resident)
            del resident
            gc.collect()

    @rule(index=caches, rows=st.lists(st.integers(0, MOST_ROWS - 1), min_size=1, max_size=MOST_ROWS))
    def select(self, index, rows):
        resident = self.present(index)
        if resident.rows:
            rows = [row % len(resident.rows) for row in rows]
            resident.cache.select(rows)
            resident.rows = [list(resident.rows[row]) for row in rows]

    @rule(index=caches, beams=st.lists(st.integers(0, MOST_ROWS - 1), min_size=MOST_ROWS, max_size=MOST_ROWS))
    def reorder(self, index, beams):
        resident = self.present(index)
        if resident.rows:
            beams = [beam % len(resident.rows) for beam in beams[: len(resident.rows)]]
            resident.cache.reorder_cache(torch.tensor(beams))
            resident.rows = [list(resident.rows[beam]) for beam in beams]

    @rule(index=caches, other=caches)
    def extend(self, index, other):
        resident, joining = self.present(index), self.present(other)
        if resident is joining or not joining.rows or len(resident.rows) + len(joining.rows) > MOST_ROWS:
            return
        try:
            resident.cache.extend(joining.cache)
        except CacheFullError:
            return
        columns = max(len(resident.rows[0]) if resident.rows else 0, len(joining.rows[0]))
        resident.pad(columns)
        joining.pad(columns)
        resident.rows += joining.rows
        joining.rows = []

    @invariant()
    def every_cache_tells_what_it_holds(self):
        for resident in self.residents:
            lengths = [len(resident.tokens(row)) for row in range(len(resident.rows))]
            assert resident.cache.lengths == lengths
            assert [sequence.length for sequence in resident.cache.sequences] == lengths
            assert resident.cache.get_seq_length() == (len(resident.rows[0]) if resident.rows else 0)
            if resident.rows:
                mask = [[int(token is not None) for token in row] for row in resident.rows]
                assert resident.cache.attention_mask.tolist() == mask

    def tables(self):
        """(layout, tokens, table) of every sequence of every cache."""
        for resident in self.residents:
            for row, sequence in enumerate(resident.cache.sequences):
                for layout, table in sequence.tables.items():
                    yield layout, resident.tokens(row), table

    @invariant()
    def every_block_belongs_to_exactly_its_sequences(self):
        allocators, holders = {}, {}
        for _, tokens, table in self.tables():
            blocks = table.ids.tolist()
            assert len(blocks) == len(set(blocks)) == -(-len(tokens) // BLOCK)
            allocators[id(table.allocator)] = table.allocator
            holders.setdefault(id(table.allocator), Counter()).update(blocks)
        for key, allocator in allocators.items():
            found = {block: allocator.references(block) for block in range(allocator.num_blocks)}
            assert found == {block: holders[key][block] for block in found}
            assert allocator.free_blocks == allocator.num_blocks - len(holders[key])

    @invariant()
    def sequences_that_share_a_block_have_the_same_tokens_up_to_its_end(self):
        first_holder = {}
        for layout, tokens, table in self.tables():
            for place, block in enumerate(table.ids.tolist()):
                there, others = first_holder.setdefault((layout, id(table.allocator), block), (place, tokens))
                shared = min((place + 1) * BLOCK, len(tokens), len(others))
                assert place == there
                assert tokens[:shared] == others[:shared]


TestLivesOfSequences = LivesOfSequences.TestCase
TestLivesOfSequences.settings = settings(max_examples=4, stateful_step_count=30, deadline=None, derandomize=True)


@pytest.mark.slow
class TestMoreLivesOfSequences(TestLivesOfSequences):
    """Six times as many."""

    settings = settings(max_examples=25, stateful_step_count=30, deadline=None, derandomize=True)


def prompted(*counts):
    """A cache with a row of each length."""
    generator = torch.Generator().manual_seed(1)
    cache = HeteroCache(INJECTED)
    together(INJECTED, cache, [torch.randint(2, 97, (count,), generator=generator) for count in counts])
    return cache


def blocks(cache):
    """The blocks that each row holds, in each layout."""
    return [[table.ids.tolist() for table in sequence.tables.values()] for sequence in cache.sequences]


def allocators(cache):
    return {id(table.allocator): table.allocator for row in cache.sequences for table in row.tables.values()}.values()


def test_a_row_takes_the_blocks_of_its_tokens_and_none_for_padding():
    assert [[len(ids) for ids in row] for row in blocks(prompted(3, 21))] == [
        [-(-count // BLOCK)] * len(blocks(prompted(3, 21))[0]) for count in (3, 21)
    ]


def test_repeated_rows_share_all_their_blocks_until_they_grow():
    cache = prompted(3, 21)
    free = [allocator.free_blocks for allocator in allocators(cache)]
    cache.select([1, 1, 0])
    assert blocks(cache)[0] == blocks(cache)[1]
    assert [allocator.free_blocks for allocator in allocators(cache)] == free
    together(INJECTED, cache, [torch.tensor([7])] * 3)
    # The last block of 21 tokens was shared and not full: one of the rows writes to a copy.
    assert all(first[-1] != second[-1] for first, second in zip(*blocks(cache)[:2], strict=True))
    assert all(first[0] == second[0] for first, second in zip(*blocks(cache)[:2], strict=True))


def test_rows_that_leave_give_their_blocks_back():
    cache = prompted(3, 21)
    free = [allocator.free_blocks for allocator in allocators(cache)]
    cache.select([0])
    assert [allocator.free_blocks for allocator in allocators(cache)] == [before + 6 for before in free]


def test_rows_that_join_from_a_fork_are_shared_and_those_of_another_store_are_not():
    cache = prompted(9, 5)
    fork = cache.fork()
    cache.extend(fork)
    assert cache.lengths == [9, 5, 9, 5]
    assert blocks(cache)[:2] == blocks(cache)[2:]
    cache.extend(prompted(9, 5))
    assert cache.lengths == [9, 5] * 3
    own, others = ([table.allocator for table in cache.sequences[row].tables.values()] for row in (0, 4))
    assert not any(mine is theirs for mine in own for theirs in others)


@pytest.mark.parametrize("wrong", [[2], [0, 5]])
def test_rows_that_are_not_there_cannot_be_selected(wrong):
    cache = prompted(3, 21)
    with pytest.raises((IndexError, HeteroKVError), match=r"row"):
        cache.select(wrong)
    assert cache.lengths == [3, 21]


def test_of_a_cache_without_rows_a_crop_forgets_nothing():
    fresh, emptied, joined = (HeteroCache(INJECTED) for _ in range(3))
    with torch.no_grad():
        for cache in (emptied, joined):
            INJECTED(torch.full((2, 7), 3), past_key_values=cache)
    emptied.reset()
    HeteroCache(INJECTED).extend(joined)
    for cache in (fresh, emptied, joined):
        cache.crop(-3)
        assert (cache.lengths, cache.get_seq_length()) == ([], 0)
        with torch.no_grad():
            INJECTED(torch.full((1, 5), 3), past_key_values=cache)
        cache.crop(-2)
        assert cache.lengths == [3]
