"""Representatives of blocks against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.cpu_ops.scores import block_scores
from hetero_kv.families.retrieval import representatives


def random_blocks(blocks=3, kv_heads=2, block_size=8, dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(blocks, kv_heads, block_size, dim, generator=generator)


def test_max_and_mean_are_per_channel():
    keys = random_blocks()
    assert torch.equal(representatives.get("MAX").compute(keys, 1, None)[:, :, 0], keys.max(dim=2).values)
    torch.testing.assert_close(representatives.get("MEAN").compute(keys, 1, None)[:, :, 0], keys.sum(dim=2) / 8)


def test_a_mean_comes_with_the_standard_deviation_of_the_block_itself():
    keys = random_blocks()
    vectors = representatives.get("MEANSTD").compute(keys, 2, None)
    torch.testing.assert_close(vectors[:, :, 0], keys.sum(dim=2) / 8)
    squares = (keys - vectors[:, :, :1]).pow(2).sum(dim=2) / 8
    torch.testing.assert_close(vectors[:, :, 1], squares.sqrt())


@pytest.mark.parametrize(("count", "positions"), [(1, [0]), (2, [0, 4]), (3, [0, 2, 5]), (8, list(range(8)))])
def test_fixed_takes_keys_at_equal_steps(count, positions):
    keys = random_blocks()
    assert torch.equal(representatives.get("FIXED").compute(keys, count, None), keys[:, :, positions])


def test_dynamic_takes_the_keys_that_received_most_attention():
    keys = random_blocks()
    received = torch.rand(3, 2, 8, generator=torch.Generator().manual_seed(1))
    received[0, 0] = torch.tensor([1.0, 5.0, 2.0, 5.0, 0.0, 5.0, 1.0, 1.0])
    chosen = representatives.get("DYNAMIC").compute(keys, 2, received)
    for block in range(3):
        for head in range(2):
            best = np.argsort(-received[block, head].numpy(), kind="stable")[:2]
            assert torch.equal(chosen[block, head], keys[block, head, best])
    assert torch.equal(chosen[0, 0], keys[0, 0, [1, 3]])


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.01, 30))
def test_the_quest_score_bounds_every_query_key_product_of_its_block(seed, scale):
    keys = random_blocks(seed=seed) * scale
    q = np.random.default_rng(seed).standard_normal((1, 2, 3, 16), dtype=np.float32)
    vectors = representatives.get("QUEST").compute(keys, 2, None).contiguous().numpy()
    ids, counts = np.arange(3, dtype=np.int32)[None], np.array([3], dtype=np.int32)
    scores = block_scores(q, vectors, ids, counts, "quest")
    products = np.einsum("hgd,bhtd->hgbt", q[0], keys.numpy()).max(axis=3)
    assert (scores[0] >= products - 1e-4 * scale).all()


def test_an_unknown_type_names_the_known_ones():
    with pytest.raises(ValueError, match="'MEDIAN' is not known; known: MAX, MEAN, MEANSTD, QUEST, DYNAMIC, FIXED"):
        representatives.get("MEDIAN")
