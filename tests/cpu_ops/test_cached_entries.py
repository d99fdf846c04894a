"""Kernels that append, gather, rank and rotate entries equal torch's functions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.cpu_ops import cached_entries, rotary
from hetero_kv.cpu_ops.cached_entries import (
    all_but_lowest,
    append_token,
    gather_entries,
    gather_numbers,
    received_attention,
)
from hetero_kv.cpu_ops.rotary import rotate_rows
from hetero_kv.gpu_ops.column_sums import column_sums
from hetero_kv.gpu_ops.rotary import RotaryLayout, rotate

ROWS, HEADS, CAPACITY, K_DIM, V_DIM = 2, 3, 20, 8, 6


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def entries(dtype=np.float32):
    keys, values = (random(ROWS, HEADS, CAPACITY, dim, seed=dim).mul(100).numpy().astype(dtype) for dim in (8, 6))
    return keys, values, np.arange(ROWS * HEADS * CAPACITY).reshape(ROWS, HEADS, CAPACITY)


@pytest.fixture(params=["one thread", "threads"])
def threads(request, monkeypatch):
    """Both ways that a kernel may go: small arrays are one thread's."""
    if request.param == "threads":
        monkeypatch.setattr(cached_entries, "_SMALL", 0)
        monkeypatch.setattr(rotary, "_SMALL", 0)


@pytest.mark.parametrize("dtype", [np.float32, np.int16])
def test_an_appended_token_is_behind_the_others_and_changes_none(dtype):
    keys, values, positions = entries(dtype)
    before = [part.copy() for part in (keys, values, positions)]
    # As a model gives them: the heads within the tokens.
    new = [random(ROWS, 1, HEADS, dim).mul(100).numpy().astype(dtype).transpose(0, 2, 1, 3) for dim in (K_DIM, V_DIM)]
    append_token(*new, keys, values, positions, 7, 1234)
    for part, old, added in zip((keys, values), before, new, strict=False):
        assert (part[:, :, 7:8] == added).all()
        assert (np.delete(part, 7, 2) == np.delete(old, 7, 2)).all()
    assert (positions[:, :, 7] == 1234).all()
    assert (np.delete(positions, 7, 2) == np.delete(before[2], 7, 2)).all()


@pytest.mark.parametrize("place", [-1, CAPACITY])
def test_a_token_that_has_no_place_is_refused(place):
    keys, values, positions = entries()
    with pytest.raises(IndexError, match="outside the capacity"):
        append_token(keys[:, :, :1], values[:, :, :1], keys, values, positions, place, 0)


@pytest.mark.parametrize("shape", [(1, 1, 5), (1, HEADS, 5), (ROWS, 1, 5), (ROWS, HEADS, 0), (ROWS, HEADS, CAPACITY)])
@pytest.mark.parametrize("dtype", [np.float32, np.int16])
def test_gathered_entries_are_those_of_the_index(threads, dtype, shape):
    sources = entries(dtype)
    index = np.sort(np.random.default_rng(0).integers(0, CAPACITY, shape), axis=2)
    targets = tuple(np.zeros((*part.shape[:2], CAPACITY + 2, *part.shape[3:]), part.dtype) for part in sources)
    gather_entries(sources, index, targets)
    wide = np.broadcast_to(index, (ROWS, HEADS, shape[2]))
    for source, target in zip(sources, targets, strict=True):
        picked = wide[..., None] if source.ndim == 4 else wide
        assert (target[:, :, : shape[2]] == np.take_along_axis(source, picked, 2)).all()
        assert not target[:, :, shape[2] :].any()
    assert (gather_numbers(sources[2], index) == np.take_along_axis(sources[2], wide, 2)).all()


@pytest.mark.parametrize("wrong", [-1, CAPACITY])
def test_an_index_outside_is_refused(threads, wrong):
    sources = entries()
    with pytest.raises(IndexError, match=f"must lie in 0..{CAPACITY - 1}"):
        gather_entries(sources, np.array([[[0, wrong]]]), tuple(part.copy() for part in sources))
    with pytest.raises(IndexError, match="do not fit into a capacity of 1"):
        gather_entries(sources, np.array([[[0, 1]]]), tuple(part[:, :, :1].copy() for part in sources))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.booleans())
def test_of_the_lowest_the_last_is_left_out(numbers, whole):
    scores = np.array([[numbers]], np.int64 if whole else np.float32)
    lowest = len(numbers) - 1 - numbers[::-1].index(min(numbers))
    assert all_but_lowest(scores)[0, 0].tolist() == [i for i in range(len(numbers)) if i != lowest]


def test_nan_ranks_lowest_and_infinity_stays():
    nan, inf = float("nan"), float("inf")
    scores = np.array([[[1, nan, -inf], [inf, 3, inf], [nan, nan, 0], [2, 2, nan]]], np.float32)
    assert all_but_lowest(scores)[0].tolist() == [[0, 2], [0, 2], [0, 2], [0, 1]]


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("count", [1, 17, 700])
def test_received_attention_is_the_column_sums_of_one_query(threads, count, softcap):
    group, scale = 2, 0.3
    q, keys = random(ROWS, HEADS * group, 1, K_DIM), random(ROWS, HEADS, count + 3, K_DIM, seed=1)
    scores = scale * q.unflatten(1, (HEADS, group))[..., 0, :] @ keys[:, :, :count].transpose(2, 3)
    lse = (softcap * torch.tanh(scores / softcap) if softcap else scores).logsumexp(-1)
    found = received_attention(
        q.view(ROWS, HEADS, group, K_DIM).numpy(), lse.numpy(), keys.numpy(), count, scale, softcap
    )
    expected = column_sums(q, lse.view(ROWS, HEADS * group, 1), keys[:, :, :count], scale, softcap)
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-7)


def test_keys_that_do_not_fit_the_query_are_refused():
    q, lse = np.ones((1, 2, 3, 4), np.float32), np.ones((1, 2, 3), np.float32)
    for keys, count in ((np.ones((1, 2, 5, 3), np.float32), 5), (np.ones((1, 2, 5, 4), np.float32), 6)):
        with pytest.raises(ValueError, match="do not fit together"):
            received_attention(q, lse, keys, count, 1.0)


@pytest.mark.parametrize("layout", [RotaryLayout(4), RotaryLayout(2, 3), RotaryLayout(3, 1, True), RotaryLayout(0)])
def test_rotated_rows_are_those_of_torch(threads, layout):
    vectors = random(ROWS, HEADS, CAPACITY, K_DIM)
    cos, sin = random(30, layout.pairs, seed=1), random(30, layout.pairs, seed=2)
    rotated = torch.zeros_like(vectors)
    channels = layout.offset, layout.interleaved
    rotate_rows(vectors.numpy(), rotated.numpy(), (5, 17), cos.numpy(), sin.numpy(), 9, channels)
    expected = rotate(vectors[:, :, 5:17], cos[9:21], sin[9:21], layout)
    torch.testing.assert_close(rotated[:, :, 5:17], expected)
    assert not rotated[:, :, :5].any()
    assert not rotated[:, :, 17:].any()


@pytest.mark.parametrize(("where", "position"), [((-1, 2), 0), ((0, 21), 0), ((0, 5), 26), ((0, 5), -1)])
def test_positions_without_angles_and_entries_that_are_not_there_are_refused(where, position):
    vectors, angles = random(ROWS, HEADS, CAPACITY, K_DIM).numpy(), random(30, 4).numpy()
    with pytest.raises(ValueError, match="are not all in vectors"):
        rotate_rows(vectors, vectors.copy(), where, angles, angles, position, (0, False))
    with pytest.raises(ValueError, match="do not fit together"):
        rotate_rows(vectors, vectors.copy(), (0, 1), angles, angles, 0, (1, False))


@pytest.mark.parametrize("dtype", [np.float32, np.int16])
def test_a_token_runs_the_precompiled_kernels(dtype):
    cached_entries.compile_for(np.dtype(dtype))
    rotary.compile_kernels()
    kernels = [append_token, cached_entries._gather(False), gather_numbers, all_but_lowest, rotary._kernel(False)]
    before = [len(kernel.signatures) for kernel in kernels]
    keys, values, positions = entries(dtype)
    append_token(keys[:, :, :1].copy(), values[:, :, :1].copy(), keys, values, positions, 7, 7)
    index = all_but_lowest(np.zeros((ROWS, HEADS, 9), np.float32))
    gather_entries((keys, values, positions), index, (keys.copy(), values.copy(), positions.copy()))
    gather_numbers(np.zeros((ROWS, HEADS, 9), np.float32), index)
    angles, vectors = random(4, 4).numpy(), random(1, 2, 3, 8).numpy()
    rotate_rows(vectors, vectors.copy(), (0, 3), angles, angles, 0, (0, False))
    assert [len(kernel.signatures) for kernel in kernels] == before
