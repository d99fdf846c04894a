"""With `attend_on: split` a GPU and the CPU attend to chosen blocks at once, as one of them does alone."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import DynamicCache

from hetero_kv import HeteroCache, HeteroKVError, eject, inject
from hetero_kv.adapter.footprint import RESIDENT
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.split_decode import SplitDecode
from hetero_kv.planning.footprint import Footprint
from tests.operators.resident_models import (
    ALL,
    LAYERS,
    bytes_on_gpu,
    injected,
    llama_on_gpu,
    random_tokens,
    rates_given,
    rules,
    told,
)
from tests.operators.test_ragged_graphs_on_cuda import Conversations
from tests.operators.test_resident_observation_on_cuda import counted
from tests.operators.test_resident_on_cuda import PACKED, WAYS, conversation
from tests.support.devices import simulated_cuda
from tests.support.slow_variants import with_slow

pytestmark = pytest.mark.cuda
pytest.importorskip("triton")

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture
def llama(gpu):
    yield llama_on_gpu()
    # Caches unlock their memory while the GPU is there.
    gc.collect()


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    give = rates_given(monkeypatch)
    give(0.5)
    return give


def split(model, **settings):
    return injected(model, "split", **settings)


@pytest.mark.parametrize("graphs", with_slow(["on", "off"], slow=["off"]))
@pytest.mark.parametrize("way", with_slow(list(WAYS), slow=["shared", "largest", "streaming", "dense", "infllm"]))
def test_a_conversation_is_that_with_the_cpu(llama, way, graphs):
    found = {}
    for attend_on in ("cpu", "split"):
        found[attend_on] = conversation(llama, injected(llama, attend_on, cuda_graphs=graphs, **WAYS[way]))
        eject(llama)
    torch.testing.assert_close(found["split"], found["cpu"], **CLOSE)


@pytest.mark.parametrize("way", with_slow(list(PACKED), slow=["q8_0", "values", "keys", "representatives"]))
def test_packed_blocks_are_attended_to_as_by_the_cpu(gpu, way):
    model, found = llama_on_gpu(head_dim=32), {}
    settings = {"block_size": 16, "dense_layer_num": 0, "top_k_blocks": 2, **PACKED[way]}
    for attend_on in ("cpu", "split"):
        cache = injected(model, attend_on, cuda_graphs="on", **settings)
        found[attend_on] = conversation(model, cache)
        planned = Footprint.of(model.hetero_kv_injection).memory(400, 1).sizes
        if attend_on == "cpu":
            eject(model)
    torch.testing.assert_close(found["split"], found["cpu"], **CLOSE)
    assert planned[RESIDENT] == sum(bytes_on_gpu(cache))
    del cache
    gc.collect()


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_share_over_the_bus_changes_who_reads_and_not_the_answer(llama, rates, share):
    tokens, read = random_tokens(96), {}
    rates(share)
    for attend_on in ("gpu", "split"):
        cache = injected(llama, attend_on, dense_layer_num=0, top_k_blocks=3)
        found = torch.cat(told(llama, cache, tokens, prompt=80))
        read[attend_on] = found, cache.statistics["dram_bytes_read"], cache.statistics["cpu_bytes_read"]
        eject(llama)
    (expected, over_bus, by_cpu), (found, also_over_bus, part) = read["gpu"], read["split"]
    torch.testing.assert_close(found, expected, **CLOSE)
    # All that was missing comes to the slots, sooner or later.
    assert also_over_bus == over_bus
    assert by_cpu == [None] * LAYERS
    for whole, own in zip(over_bus, part, strict=True):
        assert own == {0.0: whole, 1.0: 0.0}.get(share, own)
        assert 0 < own < whole or share != 0.4


def test_the_cpu_attends_to_what_is_listed(llama, monkeypatch):
    tokens = random_tokens(75)
    expected = torch.cat(told(llama, split(llama), tokens, prompt=60))
    eject(llama)
    attend = SplitDecode.attend_to_listed

    def other(self, steps, call, q, listed, out, lse):
        attend(self, steps, call, -q, listed, out, lse)

    monkeypatch.setattr(SplitDecode, "attend_to_listed", other)
    found = torch.cat(told(llama, split(llama), tokens, prompt=60))
    assert not torch.allclose(found, expected, rtol=1e-2)


@torch.no_grad()
def test_a_covering_budget_is_full_attention(llama):
    tokens = random_tokens(75)
    expected = told(llama, DynamicCache(config=llama.config), tokens, prompt=60)
    found = told(llama, split(llama, top_k_blocks=ALL, dense_layer_num=0), tokens, prompt=60)
    eject(llama)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", with_slow(["quest", "ktransformers", "shared"], slow=["ktransformers"]))
def test_rows_of_several_lengths_decode_together(llama, way):
    settings = WAYS[way]
    # The first has no Context at first, and the second one that is covered.
    talks = Conversations(llama, 12, 30, 57, 90, attend_on="split", **settings)
    talks.join(12, 30, 57)
    talks.decode(12, 30, 57, tokens=6)
    talks.join(90)
    talks.decode(90, 12, 57, tokens=10)
    talks.caches[57] = talks.caches[57].fork()
    talks.caches[90].crop(-4)
    del talks.logits[90][-4:]
    talks.decode(57, 90, 30, tokens=6)
    for length in talks.lengths:
        found = torch.stack(talks.logits[length]).cpu()
        torch.testing.assert_close(found, talks.expected(llama, length, **settings), **CLOSE)


def test_keys_receive_what_they_receive_with_the_cpu(llama):
    found = {}
    for attend_on in ("cpu", "split"):
        cache = injected(llama, attend_on, "ktransformers")
        told(llama, cache, random_tokens(103), prompt=84)
        found[attend_on] = counted(cache)
        eject(llama)
    for actual, expected in zip(found["split"], found["cpu"], strict=True):
        torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize("recipe", ["quest", "ktransformers"])
def test_a_saved_context_continues_as_if_nothing_had_happened(llama, tmp_path, recipe):
    cache, tokens = split(llama, recipe=recipe), random_tokens(90)
    told(llama, cache, tokens[:, :75], prompt=60)
    cache.save(tmp_path / "context")
    expected = torch.cat(told(llama, cache, tokens[:, 75:]))
    loaded = HeteroCache.load(tmp_path / "context", llama)
    assert torch.equal(torch.cat(told(llama, loaded, tokens[:, 75:])), expected)
    eject(llama)
    # What is stored is the same where the GPU attends to all of it.
    inject(llama, rules("gpu", recipe))
    by_gpu = HeteroCache.load(tmp_path / "context", llama)
    torch.testing.assert_close(torch.cat(told(llama, by_gpu, tokens[:, 75:])), expected, **CLOSE)


@pytest.mark.parametrize("fails_at", ["the CPU's turn", "storing"])
def test_a_token_that_fails_is_undone(llama, monkeypatch, fails_at):
    tokens = random_tokens(80)
    expected = torch.cat(told(llama, split(llama, dense_layer_num=0, top_k_blocks=2), tokens, prompt=60))
    eject(llama)
    cache, statistics = split(llama, dense_layer_num=0, top_k_blocks=2), []
    found = told(llama, cache, tokens[:, :70], prompt=60)

    def fail(*_):
        raise HeteroKVError("on purpose")

    owner, name = (SplitDecode, "attend_to_listed") if fails_at != "storing" else (RetrievalLayer, "require_storable")
    statistics.append(cache.statistics)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        # Other blocks are missing then.
        with pytest.raises(HeteroKVError, match="on purpose"):
            told(llama, cache, random_tokens(1, seed=9))
    statistics.append(cache.statistics)
    assert cache.lengths == [70]
    assert statistics[0] == statistics[1]
    found += told(llama, cache, tokens[:, 70:])
    torch.testing.assert_close(torch.cat(found), expected, **CLOSE)


@pytest.mark.slow
def test_a_models_tokens_by_the_interpreter_are_those_by_definition():
    found = {}
    for by_interpreter in (False, True):
        with simulated_cuda(interpret=by_interpreter):
            model = llama_on_gpu(head_dim=32)
            cache = split(model, max_seq_len=120, block_size=16, top_k_blocks=2)
            found[by_interpreter] = torch.cat(told(model, cache, random_tokens(113), prompt=110))
            del cache
            gc.collect()
    torch.testing.assert_close(found[True], found[False], **CLOSE)
