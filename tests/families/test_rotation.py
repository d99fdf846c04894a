"""A probe finds out how a model rotates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.adapter.rotation import Rotation, found_rotation
from hetero_kv.gpu_ops.rotary import RotaryLayout, rotate, unrotate

DIM = 16
PLAIN = torch.randn(1, 2, 1, DIM, generator=torch.Generator().manual_seed(3))


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.integers(0, 8),
    offset=st.integers(0, 8),
    interleaved=st.booleans(),
    scaling=st.sampled_from([1.0, 1.3466]),
    seed=st.integers(0, 99),
)
def test_rotating_there_and_back_changes_nothing(pairs, offset, interleaved, scaling, seed):
    layout = RotaryLayout(pairs, min(offset, DIM - 2 * pairs), interleaved)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 5, DIM, generator=generator)
    angles = torch.rand(5, pairs, generator=generator) * 6
    # As a model of 16 bits has them.
    cos, sin = ((scaling * part).bfloat16() for part in (angles.cos(), angles.sin()))
    there = rotate(x, cos, sin, layout)
    torch.testing.assert_close(unrotate(there, cos, sin, layout), x, rtol=1e-5, atol=1e-5)
    if scaling == 1.0 and pairs:
        norms = torch.linalg.vector_norm(there, dim=-1), torch.linalg.vector_norm(x, dim=-1)
        torch.testing.assert_close(*norms, rtol=1e-2, atol=0)


@pytest.mark.parametrize("doubled", ["once", "halves", "neighbours"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("pairs", "offset"), [(8, 0), (4, 0), (4, 8), (2, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_known_way_to_rotate_is_recognised(doubled, interleaved, pairs, offset, dtype):
    rotation = Rotation(RotaryLayout(pairs, offset, interleaved), doubled)

    def keys_under(cos, sin):
        angles = (rotation.angles(part)[:, None] for part in (cos, sin))
        return rotate(PLAIN.to(dtype), *angles, rotation.layout).to(dtype)

    width = pairs if doubled == "once" else 2 * pairs
    assert found_rotation(keys_under, torch.ones(1, 1, width, dtype=dtype)) == rotation


def test_a_module_that_does_not_rotate_is_recognised():
    found = found_rotation(lambda cos, sin: PLAIN, torch.ones(1, 1, DIM))
    assert found is not None
    assert found.layout.pairs == 0


def test_other_functions_are_not_mistaken_for_rotations():
    def normed_after(cos, sin):
        keys = rotate(PLAIN, cos[:, None, :, :8], sin[:, None, :, :8], RotaryLayout(8))
        return torch.nn.functional.layer_norm(keys, [DIM])

    def reflected(cos, sin):
        return rotate(PLAIN, cos[:, None, :, :8], -sin[:, None, :, :8], RotaryLayout(8))

    assert found_rotation(normed_after, torch.ones(1, 1, DIM)) is None
    assert found_rotation(reflected, torch.ones(1, 1, DIM)) is None
