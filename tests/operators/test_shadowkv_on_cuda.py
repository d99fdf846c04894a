"""ShadowKV on a GPU: the host never waits, and kept, counted and attended tokens are the same as on the CPU."""

from __future__ import annotations

import gc

import pytest
import torch

from hetero_kv import HeteroKVError, eject
from hetero_kv.families.shadowkv import attention as shadowkv_attention
from hetero_kv.families.shadowkv import device_decode, resident_chunks
from hetero_kv.families.shadowkv.layer import LowRankLayer
from hetero_kv.gpu_ops import resident_slots
from tests.operators.shadowkv_models import injected, logits, random_tokens
from tests.support.devices import model_on
from tests.support.launch_counts import counts_of
from tests.support.simulated_cuda import SimulatedCudaError
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.cuda
pytest.importorskip("triton")

#: Of 25 chunks four are chosen, in addition to three outliers and the newest.
SPARSE = {"rank": 24, "sparse_budget": 16, "value_type": "FP16"}
LAYERS = 2


def llama(**shape):
    return tiny_model("llama", num_hidden_layers=LAYERS, **shape)


def answer(model, **settings):
    """Logits of two turns and a fork with fewer rows, and what the cache has counted."""
    cache = injected(model, **{**SPARSE, **settings})
    tokens = random_tokens(122, batch=2).split([100, *[1] * 6, 10, *[1] * 6], dim=1)
    first = logits(model, cache, *tokens)
    fork = cache.fork()
    fork.select([1])
    rest = logits(model, fork, *random_tokens(3, seed=5).split(1, dim=1))
    counted = cache.statistics, fork.statistics
    eject(model)
    return first, rest, counted


def test_no_layer_waits_and_nothing_is_copied():
    # Keys in their computed precision cannot overflow.
    counts = counts_of(("shadowkv",), as_shipped=False, tokens=8, num_hidden_layers=LAYERS)["shadowkv"]
    assert (counts.waits, counts.pinned, counts.pageable) == (0, 0, 0)
    assert counts.launches <= 11


# That they are projected, and where their values are, is in the next one.
@pytest.mark.slow
def test_generated_tokens_are_projected_without_a_wait_in_a_layer():
    # A chunk of every four tokens leaves Recent.
    stored = counts_of(("shadowkv_plus",), tokens=8)["shadowkv_plus"]
    assert stored.launches <= 18
    # One wait behind all three layers: for the largest values, and for a chunk's in a copy of each layer; the block
    # table, which is longer then, goes up once.
    assert (stored.waits * 3, stored.pinned * 3, stored.pageable) == pytest.approx((1, 1 + (3 + 1) / 4, 0))


# Values that leave the GPU later are waited for above as well.
@pytest.mark.slow
def test_values_of_a_chunk_that_is_projected_are_in_dram_when_a_later_token_asks_for_them(gpu):
    found = []
    for device in ("cpu", "cuda"):
        model = model_on(torch.device(device), llama())
        cache = injected(model, **{**SPARSE, "sparse_budget": 400, "value_type": "FP32"}, project_generated=True)
        parts = random_tokens(124, batch=2).split([100, *[1] * 24], dim=1)
        found.append((logits(model, cache, *parts), [layer.chunks for layer in cache.layers]))
        eject(model)
    (expected, chunks), (actual, mine) = found
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    assert mine == chunks
    assert min(chunks) > 100 // 4


# Beams on a CPU: test_shadowkv_cache.py; waits of tokens are above.
@pytest.mark.slow
def test_beams_select_their_rows_by_one_index_without_a_wait(gpu):
    model = model_on(torch.device("cuda", 0), llama())
    cache = injected(model, **SPARSE)
    logits(model, cache, *random_tokens(104, batch=2).split([100, *[1] * 4], dim=1))
    # What earlier tests have let go of unlocks its memory now, and not meanwhile.
    gc.collect()
    gpu.record.clear()
    cache.select([1, 1])
    assert [(copy.is_pinned, copy.is_blocking) for copy in gpu.record.copies] == [(True, False)] * LAYERS
    assert not gpu.record.waits
    eject(model)


@pytest.mark.slow
def test_values_are_looked_at_once_for_a_token():
    counts = counts_of(("shadowkv",), tokens=8, num_hidden_layers=LAYERS)["shadowkv"]
    assert (counts.waits * LAYERS, counts.pinned * LAYERS, counts.pageable) == pytest.approx((1, 1, 0))


@pytest.mark.parametrize("stored", ["FP16", pytest.param("Q8_0", marks=pytest.mark.slow)])
def test_it_attends_to_and_counts_what_it_does_when_the_host_chooses(gpu, monkeypatch, stored):
    # Groups of 32 need heads of 32 channels.
    model = llama(**({"head_dim": 32} if stored == "Q8_0" else {}))
    model = model_on(torch.device("cuda", 0), model)
    without_waits = answer(model, value_type=stored)
    monkeypatch.setattr(device_decode, "supports", lambda layer, keys: False)
    by_host = answer(model, value_type=stored)
    for actual, expected in zip(without_waits[:2], by_host[:2], strict=True):
        torch.testing.assert_close(actual, expected)
    assert without_waits[2] == by_host[2]
    (hit_rates,) = (each["chunk_hit_rate"] for each in without_waits[2][:1])
    assert all(0 < rate < 1 for rate in hit_rates)


@pytest.mark.slow
def test_a_step_that_fails_is_not_counted(gpu, monkeypatch):
    model = model_on(torch.device("cuda", 0), llama())
    cache = injected(model, **SPARSE)
    parts = random_tokens(106).split([100, *[1] * 6], dim=1)
    logits(model, cache, *parts[:-1])
    before = [layer.counted for layer in cache.layers]
    monkeypatch.setattr(LowRankLayer, "require_storable", lambda self, largest: fail())
    with pytest.raises(HeteroKVError, match="on purpose"):
        logits(model, cache, parts[-1])
    monkeypatch.undo()
    assert [layer.counted for layer in cache.layers] == before
    again = logits(model, cache, parts[-1])
    eject(model)
    torch.testing.assert_close(again, logits(model, injected(model, **SPARSE), *parts)[:, -1:])
    eject(model)


@pytest.mark.parametrize("by_host", with_few([False, True]))
def test_memory_in_use_is_freed_after_its_last_read(gpu, monkeypatch, by_host):
    model = model_on(torch.device("cuda", 0), llama())
    if by_host:
        monkeypatch.setattr(device_decode, "supports", lambda layer, keys: False)
    cache = injected(model, **SPARSE)
    *before, last = random_tokens(106).split([100, *[1] * 6], dim=1)
    logits(model, cache, *before)
    fork = cache.fork()
    expected = logits(model, fork, last)
    with monkeypatch.context() as patch:
        # Between queueing on the other stream and the wait for it.
        patch.setattr(resident_chunks if by_host else shadowkv_attention, *_interrupted(by_host))
        with pytest.raises(KeyboardInterrupt):
            logits(model, cache, last)
    # Before anything waits, which takes them.
    assert gpu.memory.faults == []
    torch.testing.assert_close(logits(model, cache, last), expected)
    eject(model)


def _interrupted(by_host):
    def interrupted(*args):
        raise KeyboardInterrupt

    return "_put" if by_host else "_folded_attention", interrupted


def fail():
    raise HeteroKVError("on purpose")


def seeded(model):
    """A prompt and tokens, then a wait."""
    cache = injected(model, **SPARSE)
    found = logits(model, cache, *random_tokens(80).split([72, *[1] * 8], dim=1))
    torch.cuda.synchronize()
    eject(model)
    return found


def no_wait_for_fetched(tensor):
    return tensor


def fetch_of_another_block(stored, table, misses, into, out):
    resident_slots.fetch(stored, table.roll(1, dims=1), misses, into, out)


def not_locked_to_the_end(self):
    mapped = self.group.store.mapped.get(self.layer_idx)
    return mapped is not None and mapped.reach(self.bytes_touched) and short(mapped, self.bytes_touched)


def short(mapped, size):
    """Have the page-locked memory end before what is stored does."""
    torch.cuda.cudart().cudaHostUnregister(mapped._begin)
    return torch.cuda.cudart().cudaHostRegister(mapped._begin, size // 2, 3) == 0


# Memory that is let go while the mistake is handled is complained of where nobody can be told.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("owner", "name", "mistake", "message"),
    [
        (device_decode, "joined", no_wait_for_fetched, "memory that another stream may still write"),
        (LowRankLayer, "values_are_mapped", not_locked_to_the_end, "not page-locked"),
    ],
)
def test_mistakes_are_seen(gpu, monkeypatch, owner, name, mistake, message):
    model = model_on(torch.device("cuda", 0), llama())
    assert seeded(model).isfinite().all()
    monkeypatch.setattr(owner, name, mistake)
    with pytest.raises(SimulatedCudaError, match=message):
        seeded(model)
    eject(model)
    gpu.memory.faults.clear()


@pytest.mark.slow
def test_another_table_is_seen(gpu, monkeypatch):
    model = model_on(torch.device("cuda", 0), llama())
    expected = seeded(model)
    monkeypatch.setattr(device_decode, "fetch", fetch_of_another_block)
    assert not torch.allclose(seeded(model), expected, rtol=1e-2)
