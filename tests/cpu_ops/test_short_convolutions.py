"""A token's short convolution, of any number of taps, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from hetero_kv.cpu_ops.short_convolutions import activate, convolve

CHANNELS = 37


@njit
def _step(state, weight, bias, values):
    convolve(state, weight, bias, values)
    activate(values)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("taps", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_is_shifted_into_the_state_and_multiplied(dtype, taps, biased):
    random = torch.Generator().manual_seed(taps)
    state = torch.randn(CHANNELS, taps, generator=random).to(dtype)
    weight, bias = (torch.randn(CHANNELS, size, generator=random) for size in (taps, 1))
    values = torch.randn(CHANNELS, generator=random)
    shifted = torch.cat([state[:, 1:], values[:, None].to(dtype)], dim=1)
    expected = (shifted.float() * weight).sum(dim=1) + (bias[:, 0] if biased else 0)
    expected = torch.nn.functional.silu(expected)
    array = state.view(torch.uint16).numpy() if dtype == torch.bfloat16 else state.numpy()
    found = values.numpy().copy()
    _step(array, weight.numpy(), bias[:, 0].numpy() if biased else np.empty(0, np.float32), found)
    assert torch.equal(state, shifted)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)
