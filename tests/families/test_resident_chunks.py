"""Resident chunks are the last chosen ones; only others are rebuilt and fetched."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.families.shadowkv.resident_chunks import ResidentChunks

CHUNKS, SIZE = 12, 2
KEYS = torch.randn(2, 3, CHUNKS, SIZE, 4, generator=torch.Generator().manual_seed(0))
VALUES = torch.randn(2, 3, CHUNKS, SIZE, 5, generator=torch.Generator().manual_seed(1))


def of(chunks, ids):
    return chunks.gather(2, ids[..., None, None].expand(-1, -1, -1, *chunks.shape[3:]))


def rows(keys, values):
    """Per sequence and head, the set of (key, value) rows."""
    joined = torch.cat([keys, values], dim=-1)
    return [[{tuple(row) for row in head.tolist()} for head in sequence] for sequence in joined]


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=6), outliers=st.integers(0, 4), seed=st.integers(0, 999))
def test_slots_hold_the_chosen_chunks_and_hits_are_not_rebuilt(counts, outliers, seed):
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(2, 3, CHUNKS, generator=generator).argsort(dim=2)
    outlier_ids, others = order[..., :outliers], order[..., outliers:]
    residents = ResidentChunks(of(KEYS, outlier_ids), of(VALUES, outlier_ids))
    last = others[..., :0]
    for count in counts:
        picked = torch.rand(*others.shape, generator=generator).argsort(dim=2)[..., :count]
        chosen, sizes = others.gather(2, picked), []

        def rebuild(ids, sizes=sizes):
            sizes.append(ids.shape[2])
            return of(KEYS, ids)

        hits = residents.hold(chosen, rebuild, lambda ids: of(VALUES, ids), CHUNKS)
        stayed = (chosen[..., None] == last[:, :, None]).any(-1) if count == last.shape[2] else chosen < 0
        assert hits == int(stayed.sum())
        most = int((~stayed).sum(dim=2).max()) if count else 0
        assert sizes == ([most] if most else [])
        expected = torch.cat([outlier_ids, chosen], dim=2)
        assert rows(residents.keys, residents.values) == rows(
            of(KEYS, expected).flatten(2, 3), of(VALUES, expected).flatten(2, 3)
        )
        last = chosen


def test_emptied_residents_hit_nothing_and_keep_their_outliers():
    ids = torch.arange(3).expand(2, 3, 3)
    residents = ResidentChunks(of(KEYS, ids), of(VALUES, ids))
    chosen = torch.arange(4, 8).expand(2, 3, 4)
    supply = (lambda i: of(KEYS, i)), (lambda i: of(VALUES, i))
    assert residents.hold(chosen, *supply, CHUNKS) == 0
    assert residents.hold(chosen, *supply, CHUNKS) == chosen.numel()
    residents.empty()
    assert residents.hold(chosen, *supply, CHUNKS) == 0
    assert torch.equal(residents.outlier_keys, of(KEYS, ids))
