"""Column sums of the attention matrix, chunk by chunk, equal those of the dense matrix."""

from __future__ import annotations

import pytest
import torch

from hetero_kv.gpu_ops import column_sums as module
from hetero_kv.gpu_ops.attention import chunk_attention
from hetero_kv.gpu_ops.column_sums import column_sums
from tests.support.devices import simulated_cuda

BATCH, KV_HEADS, GROUP, DIM, LENGTH, SCALE = 2, 2, 3, 8, 75, 0.4


def some_prompt(seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(BATCH, KV_HEADS * GROUP, LENGTH, DIM, generator=generator)
    k, v = (torch.randn(BATCH, KV_HEADS, LENGTH, DIM, generator=generator) for _ in range(2))
    return 2 * q, k, v


def dense(q, k, softcap=None):
    """The whole matrix of probabilities: [batch, kv_heads, group, queries, keys]."""
    scores = q @ k.repeat_interleave(GROUP, dim=1).transpose(-1, -2) * SCALE
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    unseen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return scores.masked_fill(unseen, float("-inf")).softmax(-1).unflatten(1, (KV_HEADS, GROUP))


@pytest.fixture(params=[(4, 8), (256, 4096)], ids=["small tiles", "one tile"])
def tiles(request, monkeypatch):
    monkeypatch.setattr(module, "_QUERIES", request.param[0])
    monkeypatch.setattr(module, "_KEYS", request.param[1])


@pytest.mark.parametrize("chunk", [1, 7, 75])
@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_sums_over_chunks_are_those_of_the_dense_matrix(tiles, chunk, squared, softcap):
    q, k, v = some_prompt()
    total = torch.zeros(BATCH, KV_HEADS, GROUP, LENGTH)
    for start in range(0, LENGTH, chunk):
        stop = min(start + chunk, LENGTH)
        new = slice(start, stop)
        _, lse = chunk_attention(
            q[:, :, new], k[:, :, :start], v[:, :, :start], k[:, :, new], v[:, :, new], SCALE, softcap
        )
        total[..., :stop] += column_sums(q[:, :, new], lse, k[:, :, :stop], SCALE, softcap, squared=squared)
    probabilities = dense(q, k, softcap)
    expected = (probabilities.square() if squared else probabilities).sum(3)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)


def test_weights_are_factors_of_the_rows(tiles):
    q, k, v = some_prompt(1)
    _, lse = chunk_attention(q, k[:, :, :0], v[:, :, :0], k, v, SCALE)
    weights = torch.linspace(0.1, 2.0, LENGTH)
    expected = (dense(q, k) * weights[:, None]).sum(3)
    torch.testing.assert_close(column_sums(q, lse, k, SCALE, weights=weights), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("squared", [False, True])
def test_the_highest_of_a_group_is_that_of_each_query(tiles, squared):
    q, k, v = some_prompt(2)
    _, lse = chunk_attention(q, k[:, :, :0], v[:, :, :0], k, v, SCALE)
    weights = torch.linspace(0.1, 2.0, LENGTH)
    rows = dense(q, k).square() if squared else dense(q, k)
    expected = (rows.amax(2, keepdim=True) * weights[:, None]).sum(3)
    actual = column_sums(q, lse, k, SCALE, weights=weights, squared=squared, group_max=True)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("has_triton", [True, False])
def test_tiles_fit_the_gpu(monkeypatch, has_triton):
    if has_triton:
        pytest.importorskip("triton")
    else:
        monkeypatch.setattr(module, "runs_triton", lambda tensor: False)
    q, k = torch.randn(1, 2, 2048, 8), torch.randn(1, 1, 4096, 8)
    lse = torch.logsumexp(q @ k.transpose(-1, -2), dim=-1)
    with simulated_cuda() as gpu:
        arguments = [part.to("cuda") for part in (q, lse, k)]
        # The first time it is tried whether Triton runs here.
        column_sums(*arguments, 1.0)
        gpu.record.clear()
        sums = column_sums(*arguments, 1.0)
        # In torch two tiles of queries, each with some eight of keys, and a few launches for each.
        assert len(gpu.record.launches) <= (1 if has_triton else 2 * 8 * 10)
        torch.testing.assert_close(sums.cpu(), column_sums(q, lse, k, 1.0), rtol=1e-4, atol=1e-5)
