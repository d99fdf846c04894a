"""Low-rank factors are as good as those of the singular value decomposition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.families.shadowkv.low_rank_basis import (
    basis_holding,
    energy,
    energy_outside,
    gram_matrix,
    leading_basis,
    projected,
)

DECAYS = {
    "flat": lambda i: torch.ones_like(i),
    "harmonic": lambda i: 1 / (1 + i),
    "square": lambda i: 1 / (1 + i) ** 2,
    "exponential": lambda i: 0.95**i,
}


def keys_with(singular_values, tokens, seed):
    """[1, tokens, channels] float32 of these singular values."""
    generator = torch.Generator().manual_seed(seed)
    channels = len(singular_values)
    left, _ = torch.linalg.qr(torch.randn(tokens, channels, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(channels, channels, generator=generator, dtype=torch.float64))
    return ((left * singular_values) @ right.T).float()[None] * 40


@settings(max_examples=40, deadline=None)
@given(
    decay=st.sampled_from(sorted(DECAYS)),
    tokens=st.sampled_from([64, 100, 500]),
    rank=st.integers(1, 63),
    tile=st.sampled_from([7, 64, 1000]),
    seed=st.integers(0, 1000),
)
def test_the_error_of_rank_r_is_the_least_possible(decay, tokens, rank, tile, seed):
    keys = keys_with(DECAYS[decay](torch.arange(64, dtype=torch.float64)), tokens, seed)
    basis = leading_basis(gram_matrix(keys.split(tile, dim=1)), rank).float()
    error = energy_outside(keys, projected(keys, basis), basis).sqrt()
    singular_values = torch.linalg.svdvals(keys[0].double())
    least = singular_values[rank:].square().sum().sqrt()
    # Eckart-Young; below a thousandth of the norm the Gram matrix's own rounding shows (see low_rank/factors.py).
    assert float(error) == pytest.approx(float(least), rel=1e-3, abs=1e-4 * float(singular_values.norm()))


def test_full_rank_gives_every_key_back():
    keys = torch.randn(2, 50, 24, generator=torch.Generator().manual_seed(0))
    basis = leading_basis(gram_matrix([keys]), 24).float()
    torch.testing.assert_close(projected(keys, basis) @ basis, keys, rtol=1e-5, atol=1e-5)
    identity = torch.eye(24).expand(2, -1, -1)
    torch.testing.assert_close(basis @ basis.transpose(1, 2), identity, rtol=0, atol=1e-6)


def test_fewer_tokens_than_the_rank_are_reproduced_exactly():
    keys = torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(0))
    basis = leading_basis(gram_matrix([keys]), 9).float()
    assert float(energy_outside(keys, projected(keys, basis), basis) / energy(keys)) < 1e-10


def test_every_sequence_of_a_batch_has_its_own_basis():
    a, b = (torch.randn(1, 60, 16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    both = leading_basis(gram_matrix([torch.cat([a, b])]), 4)
    for row, keys in enumerate((a, b)):
        alone = leading_basis(gram_matrix([keys]), 4)[0]
        torch.testing.assert_close(both[row].T @ both[row], alone.T @ alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("decay", sorted(DECAYS))
@pytest.mark.parametrize("share", [0.5, 0.99, 1.0])
def test_the_fewest_vectors_that_hold_a_share_of_the_energy(decay, share):
    keys = keys_with(DECAYS[decay](torch.arange(64, dtype=torch.float64)), 200, 0)
    gram = gram_matrix([keys])
    rank = basis_holding(gram, share).shape[1]

    def outside(basis):
        basis = basis.float()
        return float(energy_outside(keys, projected(keys, basis), basis) / energy(keys))

    torch.testing.assert_close(basis_holding(gram, share), leading_basis(gram, rank), rtol=0, atol=0)
    assert outside(leading_basis(gram, rank)) <= 1 - share + 1e-9
    assert rank == 1 or outside(leading_basis(gram, rank - 1)) > 1 - share


def test_a_sequences_basis_does_not_depend_on_its_batch():
    a, b = torch.randn(1, 60, 16, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 60, 16)
    b[:, :, :3] = torch.randn(1, 60, 3, generator=torch.Generator().manual_seed(1))
    both = basis_holding(gram_matrix([torch.cat([a, b])]), 0.99)
    assert [basis_holding(gram_matrix([keys]), 0.99).shape[1] for keys in (a, b)] == [both.shape[1], 3]
    torch.testing.assert_close(both[1, :3], basis_holding(gram_matrix([b]), 0.99)[0], rtol=0, atol=1e-12)
    assert not both[1, 3:].any()


def test_no_tokens_have_no_gram_matrix():
    with pytest.raises(ValueError, match="no tokens"):
        gram_matrix([])
