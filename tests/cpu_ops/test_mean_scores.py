"""Scores by stored means and deviations."""

import numpy as np
import pytest
import torch

from hetero_kv.cpu_ops import mean_scores
from hetero_kv.cpu_ops.parallel_region import call_region
from hetero_kv.cpu_ops.storage import Q8_0, storage_of
from tests.support.storage_formats import decoded, encoded


# Groups of eight bits have 32 numbers; heads of 16 are those of the tiny models.
@pytest.mark.parametrize(("dtype", "dim"), [(np.float32, 16), (Q8_0, 32)])
def test_scores_are_those_of_the_decoded_representatives(dtype, dim):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 2, 2, dim)).astype(np.float32)
    stored = encoded(np.abs(rng.standard_normal((5, 2, 2, dim))).astype(np.float32), np.dtype(dtype))
    table, kernel_dtype = np.array([[4, 1, 3]], np.int32), storage_of(stored.dtype).kernel_dtype
    likely, weights, masses = np.empty((3, 1, 2, 2, 3), np.float32)
    region = mean_scores.region_for(q.shape, stored.shape, stored.dtype)
    arguments = q, stored.view(kernel_dtype), table, 32, 0.2, 0.0, likely, weights, masses
    call_region("mean scores", kernel_dtype.name, region, arguments, threads=2)
    vectors, queries = torch.from_numpy(decoded(stored)[table[0]]), torch.from_numpy(q[0]).double()
    mean = torch.einsum("hgd,bhd->hgb", queries, vectors[:, :, 0]) * 0.2
    deviation = torch.einsum("hgd,bhd->hgb", queries**2, vectors[:, :, 1] ** 2).sqrt() * 0.2
    np.testing.assert_allclose(likely[0], mean + deviation, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(weights[0], mean + np.log(32), rtol=1e-5, atol=1e-5)
    assert (deviation**2 < 2 * np.log(32)).all()
    np.testing.assert_allclose(masses[0], mean + np.log(32) + deviation**2 / 2, rtol=1e-5, atol=1e-5)
