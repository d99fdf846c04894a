"""A prompt written from a GPU leaves the pool as a prompt on the CPU does."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from hetero_kv.engine.buffered_layer import PrefillBuffer
from hetero_kv.families.gpu_prefill import pieces, writing
from hetero_kv.families.gpu_prefill.writing import PromptWriting
from hetero_kv.families.retrieval import representatives
from hetero_kv.gpu_ops.prefetch import Prefetch
from hetero_kv.gpu_ops.write_out import WriteOut
from hetero_kv.store import storage
from hetero_kv.store.pool import BlockPool
from hetero_kv.store.pool_arrays import represent_blocks
from tests.support.devices import simulated_cuda

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)
ROWS, HEADS, SIZE, DIM, BLOCKS = 2, 2, 16, 32, 12
TABLE = np.random.default_rng(0).permutation(ROWS * BLOCKS).astype(np.int32).reshape(ROWS, BLOCKS)


@pytest.fixture
def gpu(monkeypatch):
    # Two blocks at once.
    monkeypatch.setattr(writing, "PIECE_TOKENS", 2 * SIZE)
    monkeypatch.setattr(pieces, "_TOKENS_AT_ONCE", 2 * SIZE * ROWS)
    with simulated_cuda() as simulation:
        yield simulation


def some_pool(kind="FP16", **more):
    return BlockPool(ROWS * BLOCKS, HEADS, SIZE, DIM, DIM, storage.get(kind), 1, **more)


def some_tokens(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, ROWS, HEADS, length, DIM, generator=generator).to(torch.bfloat16)
    return keys + 2, values


def mean_of(keys, received=None):
    return representatives.get("MEAN").compute(keys, 1, received)


def stored_by_the_cpu(pool, start, keys, values):
    for ids, row_keys, row_values in zip(TABLE, keys, values, strict=True):
        pool.write(ids, start, row_keys, row_values)


@pytest.mark.parametrize("chunk", [5, 16, 61])
@pytest.mark.parametrize("past", [0, 16, 21])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("FP16", {"value_means": True}),
        ("Q8_0", {"value_means": True, "key_codes": True}),
        ("Q4_0", {"offset_keys": True, "value_storage": storage.BF16}),
    ],
)
def test_the_pool_equals_the_cpus(gpu, kind, more, past, chunk):
    keys, values = some_tokens(past + 61)
    ours, theirs = some_pool(kind, **more), some_pool(kind, **more)
    for pool in (ours, theirs):
        stored_by_the_cpu(pool, 0, keys[:, :, :past], values[:, :, :past])
    stored_by_the_cpu(theirs, past, keys[:, :, past:], values[:, :, past:])
    first, end = -(-past // SIZE), (past + 61) // SIZE - 1
    for ids in torch.from_numpy(TABLE[:, first:end].astype(np.int64)):
        represent_blocks([theirs], ids, mean_of)

    new = (t[:, :, past:].to(DEVICE) for t in (keys, values))
    buffer = PrefillBuffer(*(torch.empty_like(t) for t in new), past, past, first=past)
    gpu.record.clear()
    # Representatives of blocks that are in the buffer as a whole: those before are another's.
    prompt = PromptWriting(ours, buffer, TABLE, WriteOut(DEVICE), (0, end), mean_of)
    for start in range(past, past + 61, chunk):
        part = slice(start, min(start + chunk, past + 61))
        here = slice(part.start - past, part.stop - past)
        buffer.keys[:, :, here], buffer.values[:, :, here] = (t[:, :, part].to(DEVICE) for t in (keys, values))
        buffer.length = part.stop
        gpu.record.clear()
        prompt.advance()
        assert not gpu.record.pageable
    prompt.finish()
    assert not gpu.record.pageable
    for name, array in theirs.arrays.items():
        assert torch.equal(ours.arrays[name], array), name
    largest = [float(t[:, :, past:].abs().max()) for t in (keys, values)]
    assert prompt.largest == largest


def test_received_attention_is_summed_over_all_pieces(gpu):
    keys, values = some_tokens(61)
    pool = some_pool()

    def sums_of(new, start):
        at = torch.arange(start, start + new.shape[2], device=new.device)
        by_token = new.double().sum(dim=(1, 3))
        return torch.stack([by_token.sum(dim=1), (at * by_token).sum(dim=1)])

    buffer = PrefillBuffer(keys.to(DEVICE), values.to(DEVICE), 0, 61)
    prompt = PromptWriting(pool, buffer, TABLE, WriteOut(DEVICE), sums_of=sums_of)
    gpu.record.clear()
    prompt.finish()
    assert prompt.sums is not None
    torch.testing.assert_close(prompt.sums, sums_of(keys, 0))
    assert not gpu.record.pageable


def test_representatives_that_need_received_attention_wait_for_it(gpu):
    keys, values = some_tokens(100)
    ours, theirs = some_pool(), some_pool()
    stored_by_the_cpu(theirs, 0, keys, values)
    received = torch.rand(ROWS, 5, HEADS, SIZE)

    def chosen(keys, seen):
        return representatives.get("DYNAMIC").compute(keys, 1, seen)

    for row, ids in enumerate(torch.from_numpy(TABLE[:, 1:6].astype(np.int64))):
        represent_blocks([theirs], ids, partial(chosen, seen=received[row]))
    buffer = PrefillBuffer(keys.to(DEVICE), values.to(DEVICE), 0, 100)
    gpu.record.clear()
    prompt = PromptWriting(ours, buffer, TABLE, WriteOut(DEVICE))
    prompt.finish()
    prompt.send_represented(1, 6, received, chosen)
    assert not gpu.record.pageable
    for name, array in theirs.arrays.items():
        assert torch.equal(ours.arrays[name], array), name


@pytest.mark.parametrize(("kind", "more"), [("FP16", {}), ("Q8_0", {}), ("Q4_0", {"offset_keys": True})])
@pytest.mark.parametrize(("start", "stop"), [(0, 61), (16, 64), (16, 20)])
def test_stored_tokens_come_back_in_pieces_as_they_are_read(gpu, kind, more, start, stop):
    pool = some_pool(kind, **more)
    stored_by_the_cpu(pool, 0, *some_tokens(70))
    gpu.record.clear()
    stored = list(pieces.stored_pieces(pool, [*TABLE], start, stop, torch.float32, Prefetch(DEVICE)))
    assert not gpu.record.pageable
    assert [first for first, _, _ in stored] == list(range(start, stop, 2 * SIZE))
    for number in (1, 2):
        found = torch.cat([piece[number] for piece in stored], dim=2).cpu()
        expected = torch.stack([pool.read(ids, start, stop)[number - 1].float() for ids in TABLE])
        assert torch.equal(found, expected)
