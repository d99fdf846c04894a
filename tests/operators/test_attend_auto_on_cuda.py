"""With `attend_on: auto` the place of attention is chosen: what is refused on a GPU, what fits, and what is faster."""

from __future__ import annotations

import gc
import re

import pytest
import torch

from hetero_kv import Engine, HeteroCache, HeteroKVError, eject, inject
from hetero_kv.adapter.footprint import TokenReads
from hetero_kv.engine.errors import ContextError
from hetero_kv.evals.config_spec import settings_in_force
from hetero_kv.families.retrieval.indexed_layer import ScoredLayer
from hetero_kv.families.retrieval.resident_layer import ResidentLayer
from hetero_kv.gpu_ops import mapped_memory
from hetero_kv.models.loading import LoadedModel
from hetero_kv.planning import attention_place, read_rates
from hetero_kv.planning.attention_place import MISSED, faster
from hetero_kv.planning.plan import RESERVE, Plan
from hetero_kv.planning.read_rates import ReadRates, measured
from tests.operators.resident_models import injected, llama_on_gpu, random_tokens, rules, told
from tests.operators.test_resident_on_cuda import conversation
from tests.serving.number_tokenizer import Numbers
from tests.serving.tiny_engine import GREEDY
from tests.support.devices import simulated_cuda
from tests.support.small_recipes import small_recipe
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.cuda
pytest.importorskip("triton")

#: Rates with which a GPU, or the CPU, reads faster, whatever is read.
FAST = {"gpu": ReadRates(1e9, 1e12), "cpu": ReadRates(1e12, 1e9)}


@pytest.fixture
def llama(gpu):
    yield llama_on_gpu()
    # Caches unlock their memory while the GPU is there.
    gc.collect()


@pytest.fixture
def rates(monkeypatch):
    """Let these be the rates that are measured; the GPU's at first."""

    def give(place):
        monkeypatch.setattr(attention_place, "read_rates", lambda *_: FAST[place])

    give("gpu")
    return give


def decision(model):
    return model.hetero_kv_injection.place.decision


@pytest.mark.parametrize(
    ("by_cpu", "chosen", "cpu", "bus", "place"),
    [
        # 10 ms on the CPU, and as long, more, or less over the bus.
        (800e6, 500e6, 80e9, MISSED * 500e6 / 10e-3, "gpu"),
        (800e6, 501e6, 80e9, MISSED * 500e6 / 10e-3, "cpu"),
        (800e6, 499e6, 80e9, MISSED * 500e6 / 10e-3, "gpu"),
        (801e6, 500e6, 80e9, MISSED * 500e6 / 10e-3, "gpu"),
        (799e6, 500e6, 80e9, MISSED * 500e6 / 10e-3, "cpu"),
        # Nothing to wait for but the host.
        (0, 0, 80e9, 1e9, "gpu"),
    ],
)
def test_the_shorter_wait_decides(by_cpu, chosen, cpu, bus, place):
    found = faster(TokenReads(by_cpu, chosen, 4096), ReadRates(cpu, bus))
    assert found.place == place
    assert f"{by_cpu / 1e6:,.1f} MB on the CPU at 80 GB/s" in found.reason
    assert f"{MISSED * chosen / 1e6:,.1f} MB over the bus at" in found.reason


@pytest.mark.parametrize("place", ["gpu", "cpu"])
@pytest.mark.parametrize(("recipe", "kwargs"), [("quest", {}), ("adaptive", {"block_size": 16, "kv_type": "FP16"})])
def test_measured_rates_choose_and_the_answer_is_that_of_the_place(llama, rates, recipe, kwargs, place):
    rates(place)
    found = {}
    for attend_on in (place, "auto"):
        cache = injected(llama, attend_on, recipe=recipe, **kwargs)
        assert isinstance(cache.layers[1], ResidentLayer) == (place == "gpu")
        found[attend_on] = conversation(llama, cache)
        injection = llama.hetero_kv_injection
        assert injection.engine.attend_on == place
        assert {each.engine.attend_on for each in injection.attention_operators()} == {place}
        told_of = injection.place.decision
        eject(llama)
    assert told_of.place == place
    assert "MB over the bus at" in told_of.reason
    torch.testing.assert_close(found["auto"], found[place], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("recipe", "kwargs", "engine", "reason"),
    [
        ("adaptive", {}, {}, r"layers\.0\.self_attn: keys in FP32 in blocks of 8 have no coarse copies"),
        ("quest", {"token_step": 2}, {}, "token_step"),
        ("quest", {}, {"measure_recall": True}, "measure_recall compares"),
        ("quest", {}, {"index_device": "cpu"}, "index_device is cpu, and a GPU that attends also chooses"),
        ("quest", {}, {"attention_backend": "torch"}, "attention_backend names others"),
        ("loki", {}, {}, "chooser loki runs on the CPU"),
        ("self_extend_quest", {}, {}, "positions are grouped"),
        ("streaming_llm", {}, {}, "the rules inject no RetrievalAttention"),
    ],
)
def test_what_a_gpu_refuses_the_cpu_does_and_the_reason_is_told(llama, rates, recipe, kwargs, engine, reason):
    found = {}
    for attend_on in ("cpu", "auto"):
        cache = injected(llama, attend_on, recipe=recipe, engine=engine, **kwargs)
        found[attend_on] = torch.cat(told(llama, cache, random_tokens(64), prompt=60))
        told_of = decision(llama)
        eject(llama)
    assert told_of.place == "cpu"
    assert re.search(reason, told_of.reason)
    torch.testing.assert_close(found["auto"], found["cpu"], rtol=0, atol=0)


@pytest.mark.parametrize("top_k_blocks", ["all", 0])
def test_where_no_block_crosses_the_bus_nothing_is_measured(llama, monkeypatch, top_k_blocks):
    monkeypatch.setattr(attention_place, "read_rates", None)
    cache = injected(llama, "auto", recipe="ktransformers", top_k_blocks=top_k_blocks)
    told(llama, cache, random_tokens(61), prompt=60)
    assert str(decision(llama)) == "gpu: it has all keys and values that a token attends to"


def test_an_engines_answers_are_those_of_the_place(llama, rates):
    answers, loaded = {}, LoadedModel(llama, Numbers(), "tiny", 512)
    for attend_on in ("gpu", "auto"):
        inject(llama, rules(attend_on))
        with Engine(loaded, max_batch=2, starts_thread=False, kept_prefixes=0, speculation="off") as engine:
            streams = [engine.generate(random_tokens(60, seed=seed)[0].tolist(), GREEDY) for seed in range(2)]
            # In this thread, to which a simulated device belongs.
            while not all(stream.is_done for stream in streams):
                engine._loop._step()
            answers[attend_on] = [stream.result().tokens for stream in streams]
        assert llama.hetero_kv_injection.engine.attend_on == "gpu"
        eject(llama)
    assert answers["auto"] == answers["gpu"]


def test_an_engine_counts_all_rows_of_its_batch(rates):
    tokens = 4096
    by_gpu, weights = needed("gpu", tokens)
    with simulated_cuda(total=weights + int(2 * by_gpu / (1 - RESERVE))):
        for rows, place in ((1, "gpu"), (8, "cpu")):
            model = llama_on_gpu()
            inject(model, rules("auto", recipe="dense", max_seq_len=tokens))
            with Engine(LoadedModel(model, Numbers(), "tiny", tokens), max_batch=rows, starts_thread=False):
                assert decision(model).place == place
            del model
            gc.collect()


def test_a_model_on_a_cpu_attends_there():
    model = tiny_model("llama")
    cache = injected(model, "auto")
    with torch.no_grad():
        model(random_tokens(60), past_key_values=cache)
        model(random_tokens(1), past_key_values=cache)
    assert str(decision(model)) == "cpu: the model computes on the CPU"
    assert model.hetero_kv_injection.engine.attend_on == "cpu"


def test_a_model_that_moves_is_decided_anew(llama, rates):
    cache = injected(llama, "auto")
    told(llama, cache, random_tokens(61), prompt=60)
    assert decision(llama).place == "gpu"
    del cache
    llama.to("cpu")
    cache = HeteroCache(llama)
    with torch.no_grad():
        llama(random_tokens(60), past_key_values=cache)
        llama(random_tokens(1), past_key_values=cache)
    assert decision(llama).place == "cpu"


def test_a_model_without_weights_is_decided_when_it_has_them(gpu, rates):
    model = tiny_model("llama").to("meta")
    inject(model, rules("auto"))
    injection = model.hetero_kv_injection
    assert [each.resident_choice for each in injection.attention_operators()] == [None] * len(injection.cache_layers())
    assert injection.place.decision is None
    assert injection.engine.attend_on == "auto"
    model.to_empty(device="cuda")
    assert all(isinstance(layer, ResidentLayer) for layer in injection.cache_layers())
    assert injection.place.decision.place == "gpu"
    gc.collect()


def needed(attend_on, tokens):
    """Bytes of the GPU that a context of `tokens` takes with `dense`, beside the weights."""
    with simulated_cuda():
        model = llama_on_gpu()
        injection = inject(model, rules(attend_on, recipe="dense", max_seq_len=tokens))
        return Plan.of(injection).gpu_needed(tokens), torch.cuda.memory_allocated()


def test_the_cpu_attends_where_a_context_does_not_fit(rates):
    tokens = 4096
    (by_cpu, _), (by_gpu, weights) = needed("cpu", tokens), needed("gpu", tokens)
    assert by_cpu < by_gpu
    for free, place in ((by_gpu * 1.01, "gpu"), (by_gpu * 0.99, "cpu")):
        with simulated_cuda(total=weights + int(free / (1 - RESERVE))):
            model = llama_on_gpu()
            injection = inject(model, rules("auto", recipe="dense", max_seq_len=tokens))
            # That the context fits is known before its layers are made.
            assert injection.max_seq_len() == tokens
            assert decision(model).place == place
            if place == "cpu":
                assert re.search(
                    rf"{tokens} tokens take .* GB of its memory, and .* GB are free", decision(model).reason
                )
            del model, injection
            gc.collect()


def test_dram_that_a_kernel_cannot_read_leaves_attention_to_the_cpu(gpu, llama, monkeypatch):
    read_rates.read_rates.cache_clear()
    monkeypatch.setattr(mapped_memory.MappedMemory, "reach", lambda self, size: False)
    monkeypatch.setattr(read_rates, "_MEMORY", 1 << 20)
    monkeypatch.setattr(read_rates, "_CALL", 1 << 16)
    cache = injected(llama, "auto")
    told(llama, cache, random_tokens(61), prompt=60)
    assert str(decision(llama)) == "cpu: CUDA does not page-lock DRAM"
    read_rates.read_rates.cache_clear()


def test_memory_at_other_addresses_leaves_attention_to_the_cpu(rates):
    with simulated_cuda(host_pointers=False):
        model = llama_on_gpu()
        injected(model, "auto")
        assert decision(model).place == "cpu"
        assert "at other addresses" in decision(model).reason


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_no_memory_to_measure_leaves_attention_to_the_cpu(llama, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(attention_place, "read_rates", fail)
    injected(llama, "auto")
    assert str(decision(llama)).startswith("cpu: there is no memory to measure read rates with")


def test_an_interrupt_decides_nothing(llama, monkeypatch, rates):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(attention_place, "read_rates", interrupt)
        inject(llama, rules("auto"))
        with pytest.raises(KeyboardInterrupt):
            HeteroCache(llama)
        assert decision(llama) is None
    assert isinstance(HeteroCache(llama).layers[1], ResidentLayer)


def test_rates_are_measured_once_of_rows_that_lie_apart(gpu, llama, monkeypatch):
    read_rates.read_rates.cache_clear()
    calls = []

    def counted(device, row, memory, call):
        calls.append((device.type, row))
        return measured(device, row, 1 << 20, 1 << 16)

    monkeypatch.setattr(read_rates, "measured", counted)
    for _ in range(2):
        cache = injected(llama, "auto")
        told(llama, cache, random_tokens(61), prompt=60)
        eject(llama)
    # A row is what a block has of the keys of a kv head.
    assert calls == [("cuda", cache.layers[1].pool.keys[0, 0].nbytes)]
    read_rates.read_rates.cache_clear()


@pytest.mark.parametrize("row", [4, 260, 4096])
def test_both_rates_are_measured_and_no_memory_stays(gpu, row):
    before = gpu.memory.live[0]
    gpu.record.everything.clear()
    found = measured(torch.device("cuda", 0), row, 1 << 20, 1 << 16)
    assert found.cpu > 0
    assert found.bus > 0
    gc.collect()
    assert gpu.memory.live[0] == before
    gathers = [each for each in gpu.record.launches if "gather" in str(each)]
    assert gathers


def test_a_saved_context_has_the_place_that_was_chosen(llama, rates, tmp_path):
    # Its first layer attends to everything, on the GPU.
    cache = injected(llama, "auto")
    told(llama, cache, random_tokens(64), prompt=60)
    cache.save(tmp_path / "context")
    expected = told(llama, cache, random_tokens(4, seed=1))
    eject(llama)
    for attend_on in ("auto", "gpu"):
        inject(llama, rules(attend_on))
        loaded = HeteroCache.load(tmp_path / "context", llama)
        torch.testing.assert_close(told(llama, loaded, random_tokens(4, seed=1)), expected, rtol=0, atol=0)
        eject(llama)
    rates("cpu")
    inject(llama, rules("auto"))
    with pytest.raises(ContextError, match="attend_on"):
        HeteroCache.load(tmp_path / "context", llama)


def test_a_cache_fits_equal_rules_with_the_same_place_alone(llama, rates):
    cache = injected(llama, "auto")
    told(llama, cache, random_tokens(61), prompt=60)
    eject(llama)
    inject(llama, rules("auto"))
    told(llama, cache, random_tokens(1))
    eject(llama)
    rates("cpu")
    inject(llama, rules("auto"))
    with pytest.raises(HeteroKVError, match="attend_on 'gpu' when it was made, and has 'cpu' now"):
        told(llama, cache, random_tokens(1))


@pytest.mark.parametrize(("place", "layer"), [("gpu", ResidentLayer), ("cpu", ScoredLayer)])
def test_the_index_is_where_it_was_set_to_be(llama, rates, place, layer):
    rates(place)
    cache = injected(llama, "auto", engine={"index_device": "gpu"})
    assert type(cache.layers[1]) is layer
    told(llama, cache, random_tokens(64), prompt=60)
    eject(llama)
    # By itself it is where attention is.
    injected(llama, "auto")
    indexed = [each.indexes_on_gpu for each in llama.hetero_kv_injection.attention_operators()]
    assert indexed == [False, place == "gpu"]


def test_runs_record_the_setting_and_not_the_machine(llama, rates):
    class Spec:
        rules = small_recipe("quest", attend_on="auto")

    injection = inject(llama, Spec.rules)
    HeteroCache(llama)
    assert injection.engine.attend_on == "gpu"
    assert settings_in_force(Spec, injection)["engine"]["attend_on"] == "auto"
