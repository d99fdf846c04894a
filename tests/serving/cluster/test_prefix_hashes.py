"""Hashes of beginnings, and sketches of them."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_kv.errors import HeteroKVError
from hetero_kv.serving.cluster.prefix_hashes import block_hashes
from hetero_kv.serving.cluster.replica_report import ReplicaReport, sketch

TOKENS = st.lists(st.integers(0, 5), max_size=40)


@given(first=TOKENS, second=TOKENS, block_size=st.integers(1, 7))
def test_two_prompts_have_as_many_hashes_in_common_as_whole_blocks(first, second, block_size):
    common = len([*takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))])
    one, other = block_hashes(first, block_size), block_hashes(second, block_size)
    assert len(one) == len(first) // block_size
    assert len(set(one) & set(other)) == common // block_size
    assert one[: common // block_size] == other[: common // block_size]


def test_a_hash_is_the_same_on_every_machine():
    assert block_hashes([1, 2, 3, 4, 5], 2, "ours") == block_hashes((1, 2, 3, 4), 2, "ours")
    assert block_hashes(list(range(64))) == [12184804589498815560]


@given(tokens=st.lists(st.integers(0, 5), min_size=4, max_size=40), salts=st.lists(st.text(), min_size=2, max_size=2))
def test_other_salts_have_no_hash_in_common(tokens, salts):
    first, second = (set(block_hashes(tokens, 2, salt)) for salt in salts)
    assert bool(first & second) == (salts[0] == salts[1])


def test_a_block_has_at_least_a_token():
    with pytest.raises(HeteroKVError, match="block_size is 0"):
        block_hashes([1], 0)


def known_sequences(lengths, common):
    """Lists of numbers instead of hashes; the first `common` of them are the same."""
    return [
        [*range(min(length, common)), *(1000 * (i + 1) + k for k in range(common, length))]
        for i, length in enumerate(lengths)
    ]


@given(lengths=st.lists(st.integers(0, 200), max_size=12), common=st.integers(0, 100), limit=st.integers(1, 64))
def test_a_sketch_is_bounded_and_finds_no_more_than_there_is(lengths, common, limit):
    sequences = known_sequences(lengths, common)
    chosen = sketch(sequences, limit)
    held = {each for hashes in sequences for each in hashes}
    assert len(chosen) <= limit
    assert set(chosen) <= held
    if len(held) <= limit:
        assert set(chosen) == held


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=8), limit=st.integers(16, 128), data=st.data())
def test_a_match_in_a_sketch_is_too_short_by_a_share_of_the_sequence(lengths, limit, data):
    sequences = known_sequences(lengths, 0)
    chosen = set(sketch(sequences, limit))
    # The number that each may give is halved until all fit, which twice as many did not.
    each_gives = max(1.0, (limit / len(lengths) - 1) / 2)
    hashes = data.draw(st.sampled_from(sequences))
    depth = data.draw(st.integers(0, len(hashes)))
    found = max((place + 1 for place, each in enumerate(hashes[:depth]) if each in chosen), default=0)
    assert depth - found < max(1, 2 * len(hashes) / each_gives)


def test_the_least_recently_used_sequences_are_left_out_first():
    assert sketch([[1], [2], [3]], limit=2) == (1, 2)


def test_a_report_survives_its_way_through_plain_types():
    report = ReplicaReport(64, (1, 2**64 - 1), (3,), rows=2, prefill_tokens_per_s=310.5, counter=7, time=12.5)
    plain = report.to_dict()
    assert {type(each) for each in plain.values()} <= {list, int, float, type(None)}
    assert ReplicaReport.from_dict(plain) == report


def test_a_report_of_another_version_is_refused_by_its_fields():
    plain = ReplicaReport(64).to_dict()
    with pytest.raises(HeteroKVError, match="'colour'"):
        ReplicaReport.from_dict({**plain, "colour": 1})
    del plain["rows"]
    with pytest.raises(HeteroKVError, match="'rows'"):
        ReplicaReport.from_dict(plain)
