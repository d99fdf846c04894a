"""What defines the scores by which a GPU chooses blocks, against the CPU's kernel."""

import numpy as np
import torch

from hetero_kv.cpu_ops.scores import block_scores
from hetero_kv.gpu_ops.block_choice import block_scores_in_torch
from hetero_kv.store import storage


def test_packed_bounds_that_are_rounded_apart_count_as_on_the_cpu():
    generator, kind = torch.Generator().manual_seed(0), storage.Q8_0
    vectors = torch.randn(20, 2, 2, 32, generator=generator)
    # Equal numbers but one, by which the scales of the two vectors differ.
    vectors[:, :, 1] = vectors[:, :, 0]
    vectors[:, :, 0, 3] = 9.0
    stored, q = kind.encode(vectors), torch.randn(1, 6, 1, 32, generator=generator)
    most, least = kind.decode(stored).unbind(dim=2)
    assert (most < least).any()
    pool, ids = stored.numpy().view(kind.kernel_dtype), np.arange(20, dtype=np.int32)[None]
    expected = block_scores(q.view(1, 2, 3, 32).numpy(), pool, ids, np.array([20], np.int32), "quest")
    found = block_scores_in_torch(q, stored[None].movedim(1, 2), 20, True, 1.0)
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-5, atol=1e-5)
