"""The masses of candidate blocks, from their keys or from coarse copies, equal torch's."""

import numpy as np
import pytest
import torch

from hetero_kv.cpu_ops import block_rerank
from hetero_kv.cpu_ops.parallel_region import call_region
from hetero_kv.store import storage
from tests.support.slow_variants import with_few


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("coarse", with_few([False, True], quick=[True]))
def test_candidates_have_the_mass_of_their_keys_scores(coarse, softcap):
    # Heads of 32, which groups of four bits fit.
    rng = np.random.default_rng(0)
    keys = torch.from_numpy(rng.standard_normal((5, 2, 4, 32)).astype(np.float32)) + 40
    q = rng.standard_normal((1, 2, 2, 32)).astype(np.float32)
    table, positions = np.array([[4, 1, 3]], np.int32), np.array([[[0, 2], [1, -1]]], np.int32)
    means = keys.mean(2, keepdim=True)
    stored = storage.Q4_0.encode(keys - means) if coarse else keys
    array = stored.numpy().view(storage.Q4_0.kernel_dtype) if coarse else stored.numpy()
    weights, masses = np.full((2, 1, 2, 2, 3), 7, np.float32)
    # Scores by the keys themselves do not use the means.
    shapes = array.shape, means.shape, array.dtype, means.numpy().dtype
    region = block_rerank.region_for(q.shape, *shapes, differ=coarse)
    region_keys = array.view(np.uint8) if coarse else array
    of_tokens = np.full((1, 2, 2, 8), 7, np.float32)
    arguments = q, region_keys, means.numpy(), table, positions, 0.5, softcap, weights, masses, of_tokens
    call_region("candidates", f"{region_keys.dtype},float32", region, arguments, threads=2)
    decoded = storage.Q4_0.decode(stored) + means if coarse else keys
    expected = torch.full((2, 2, 3), 7.0)
    scores = torch.einsum("hgd,bhtd->hgbt", torch.from_numpy(q[0]), decoded[table[0]]) * 0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    by_place = torch.full((2, 2, 2, 4), 7.0)
    for head, at in ((0, [0, 2]), (1, [1])):
        expected[head][:, at] = scores[head].logsumexp(-1)[:, at]
        by_place[head][:, : len(at)] = scores[head][:, at]
    np.testing.assert_allclose(masses[0], expected, rtol=1e-5)
    np.testing.assert_allclose(of_tokens[0], by_place.flatten(2), rtol=1e-5)
    np.testing.assert_array_equal(weights, 7)
