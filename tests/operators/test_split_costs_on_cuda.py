"""With `attend_on: split`: waits, launches, bytes and memory, what orders them, and what is refused by name."""

from __future__ import annotations

import gc

import pytest
import torch

from hetero_kv import HeteroCache, HeteroKVError, eject, inject
from hetero_kv.errors import ConfigError
from hetero_kv.families.retrieval import device_tokens
from hetero_kv.gpu_ops import mapped_memory
from hetero_kv.planning import attention_place
from hetero_kv.planning.attention_place import divided
from hetero_kv.planning.footprint import Footprint
from hetero_kv.planning.read_rates import ReadRates
from tests.operators.resident_models import (
    BLOCK,
    CHOOSE_ON_CPU,
    injected,
    llama_on_gpu,
    random_tokens,
    rates_given,
    rules,
    told,
)
from tests.support.devices import model_on, simulated_cuda
from tests.support.launch_counts import counts_of
from tests.support.simulated_cuda import SimulatedCudaError
from tests.support.small_recipes import small_recipe
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.cuda
pytest.importorskip("triton")


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


def decision(model):
    return model.hetero_kv_injection.place.decision


def test_a_layer_that_chooses_waits_once_and_others_never():
    found = counts_of(("quest",), attend_on="split")["quest"]
    # Two of three layers choose; and once per token, for its keys and values.
    assert found.waits == pytest.approx((2 + 1) / 3)
    assert found.pageable == 0


def test_what_lies_between_is_captured_with_layers_that_need_no_cpu(gpu, llama):
    cache = injected(llama, "split", cuda_graphs="on")
    told(llama, cache, random_tokens(70), prompt=60)
    # The last of them finds the segments captured.
    for token in random_tokens(4, seed=1).to("cuda").split(1, dim=1):
        gpu.record.clear()
        with torch.no_grad():
            llama.model(token, past_key_values=cache)
    names = [each.name for each in gpu.record.launches]
    # The first layer attends within the first segment.
    assert names.count("graph") == 2
    assert names.count("_attend_resident") == 1
    assert len(gpu.record.waits) == 2


def test_blocks_that_come_late_come_behind_the_attention_on_their_own_stream(gpu, llama, monkeypatch):
    cache, tokens = injected(llama, "split", dense_layer_num=0), random_tokens(70)
    told(llama, cache, tokens[:, :64], prompt=60)
    # Without the wait at a token's end the next one would find them on their way.
    monkeypatch.setattr(device_tokens, "wait_for", lambda *_: None)
    cache = injected_anew(llama)
    with pytest.raises(SimulatedCudaError, match="another stream may still"):
        told(llama, cache, tokens, prompt=60)


def injected_anew(model):
    """A cache whose tokens have memory of their own on the GPU."""
    eject(model)
    return injected(model, "split", dense_layer_num=0)


def test_what_crosses_the_bus_and_what_the_cpu_reads_is_bounded(llama):
    cache = injected(llama, "split", top_k_blocks=2)
    told(llama, cache, random_tokens(90), prompt=80)
    of_block = 2 * BLOCK * 16 * 2 * 4
    over_bus, by_cpu = cache.statistics["dram_bytes_read"], cache.statistics["cpu_bytes_read"]
    # The first layer has all tokens.
    assert (over_bus[0], by_cpu[0]) == (0, None)
    assert 0 < by_cpu[1] < over_bus[1] <= 2 * of_block


@pytest.mark.parametrize("recipe", ["quest", "ktransformers"])
def test_no_more_lives_on_the_gpu_than_was_planned(recipe):
    tokens = 300
    with simulated_cuda() as gpu:
        model = model_on(torch.device("cuda"), tiny_model("llama").to(torch.bfloat16))
        inject(model, rules("split", recipe, max_seq_len=tokens + 8))
        cache = HeteroCache(model)
        planned = Footprint.of(model.hetero_kv_injection).memory(tokens, 1)
        before = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        told(model, cache, random_tokens(tokens + 2), prompt=tokens)
        assert gpu.memory.peak[0] - before <= planned.compute
        del cache
        gc.collect()


def test_the_rates_divide_so_that_both_take_equally_long():
    found = divided(ReadRates(75e9, 25e9))
    assert found.place == "split"
    assert found.bus_share == 0.25
    assert "the bus brings 25% at 25 GB/s" in found.reason
    assert "at 75 GB/s" in found.reason


def test_the_share_is_told_and_layers_have_it(llama, rates):
    rates(0.25)
    cache = injected(llama, "split")
    assert cache.layers[1]._choice.bus_share == 0.25
    assert str(decision(llama)).startswith("split: of the chosen blocks that the GPU lacks the bus brings 25%")
    assert llama.hetero_kv_injection.engine.attend_on == "split"


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_no_memory_to_measure_leaves_what_is_missing_to_the_cpu(llama, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(attention_place, "read_rates", fail)
    cache = injected(llama, "split", dense_layer_num=0)
    told(llama, cache, random_tokens(64), prompt=60)
    assert "the CPU attends to all that the GPU lacks" in str(decision(llama))
    assert cache.statistics["cpu_bytes_read"] == cache.statistics["dram_bytes_read"]


def test_without_blocks_to_miss_nothing_is_measured(llama, monkeypatch):
    monkeypatch.setattr(attention_place, "read_rates", None)
    told(llama, injected(llama, "split", recipe="ktransformers", top_k_blocks="all"), random_tokens(61), prompt=60)
    assert str(decision(llama)) == "split: no block is missing on a GPU"


@pytest.mark.parametrize(
    ("recipe", "kwargs", "message"),
    [("adaptive", {"block_size": 16, "kv_type": "FP16"}, "estimated attention masses"), *CHOOSE_ON_CPU],
)
def test_what_only_one_of_them_does_is_refused_by_name(recipe, kwargs, message):
    with pytest.raises(HeteroKVError, match=f"attend_on is split, but .*{message}.*; set attend_on to .*cpu"):
        inject(tiny_model("llama"), rules("split", recipe, **kwargs))


def test_rules_without_retrieval_are_refused():
    with pytest.raises(ConfigError, match=r"attend_on is split, but .* injects no RetrievalAttention"):
        inject(tiny_model("llama"), small_recipe("h2o", attend_on="split"))


def test_a_gpu_that_attends_also_chooses():
    inject(tiny_model("llama"), rules("split", engine={"index_device": "gpu"}))
    with pytest.raises(ConfigError, match="index_device is cpu, but attend_on is split"):
        inject(tiny_model("llama"), rules("split", engine={"index_device": "cpu"}))


def test_a_model_on_a_cpu_is_refused_by_name():
    model = tiny_model("llama")
    cache = injected(model, "split")
    with torch.no_grad():
        model(random_tokens(60), past_key_values=cache)
        with pytest.raises(HeteroKVError, match="attend_on is split, but the model computes on the CPU; set attend_on"):
            model(random_tokens(1), past_key_values=cache)


@pytest.mark.filterwarnings("ignore:CUDA could not page-lock:RuntimeWarning")
def test_dram_that_cannot_be_locked_is_refused_by_name(llama, monkeypatch):
    monkeypatch.setattr(mapped_memory.MappedMemory, "reach", lambda self, size: False)
    monkeypatch.setattr(attention_place, "read_rates", lambda *_: None)
    cache = injected(llama, "split")
    with pytest.raises(HeteroKVError, match="attend_on is split, but CUDA does not page-lock the DRAM of the blocks"):
        told(llama, cache, random_tokens(61), prompt=60)
