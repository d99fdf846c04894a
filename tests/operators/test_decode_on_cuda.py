"""A retrieval token on a GPU: one wait and two page-locked copies per layer."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import HeteroKVError, eject, inject
from hetero_kv.families.retrieval import layer as retrieval_layer
from hetero_kv.families.retrieval.device_window import DeviceWindow
from hetero_kv.families.retrieval.windowed_decode import WindowedDecode
from hetero_kv.families.token_retrieval.attention import TokenRetrievalAttention
from hetero_kv.gpu_ops.staging import Staging
from tests.support.devices import model_on
from tests.support.launch_counts import counts_of, stored_as_shipped
from tests.support.simulated_cuda import Launch, Wait
from tests.support.slow_variants import with_slow
from tests.support.small_recipes import RECIPES, injected, small_recipe
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.cuda

LAYERS = 2


@pytest.fixture
def llama_on_gpu(gpu):
    """A tiny Llama of two layers in bfloat16 on the simulated GPU."""
    return model_on(torch.device("cuda", 0), tiny_model("llama", num_hidden_layers=LAYERS).to(torch.bfloat16))


@torch.no_grad()
def decode(model, cache, *tokens):
    """Logits behind the last of these tokens, each decoded behind those before."""
    for token in tokens:
        logits = model(torch.tensor([[token]], device="cuda"), past_key_values=cache).logits
    return logits


@torch.no_grad()
def prompted(model, recipe, in_half=False):
    rules = small_recipe(recipe)
    cache = injected(model, stored_as_shipped(rules) if in_half else rules)
    model(torch.arange(2, 92, device="cuda")[None], past_key_values=cache)
    decode(model, cache, 5, 6)
    return cache


@pytest.fixture
def without_joint_launches(monkeypatch):
    """As where Triton is not installed, or `attention_backend` names another kernel."""
    monkeypatch.setattr(retrieval_layer, "takes_token", lambda q, k, v: False)


@pytest.mark.parametrize("recipe", with_slow(["ktransformers", "adaptive"], slow=["ktransformers"]))
def test_a_layer_waits_once_and_copies_twice(recipe):
    counts = counts_of((recipe,), as_shipped=False, tokens=8, num_hidden_layers=LAYERS)[recipe]
    # Two in the place of all that the model's own attention and cache launch.
    assert counts.launches <= 0
    assert (counts.waits, counts.pinned, counts.pageable) == (1, 2, 0)


@pytest.mark.slow
def test_a_layer_waits_and_copies_no_more_where_kernels_are_torchs(without_joint_launches):
    found = counts_of(("ktransformers", "adaptive"), as_shipped=False, tokens=8, num_hidden_layers=LAYERS)
    for counts in (found["ktransformers"], found["adaptive"]):
        assert 5 < counts.launches <= 8
        assert (counts.waits, counts.pinned, counts.pageable) == (1, 2, 0)


# tests/operators/test_grouped_prompts_on_cuda.py has their later turns.
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["self_extend", "self_extend_quest", "infllm_stream"])
def test_grouped_positions_are_turned_by_few_launches(recipe):
    counts = counts_of((recipe,), as_shipped=False, tokens=8, num_hidden_layers=LAYERS)[recipe]
    assert counts.launches <= 25
    if recipe == "infllm_stream":
        # What keys have received is added up where a block closes, by one layer's wait more in 8 tokens.
        assert (counts.waits, counts.pageable) == (1 + 1 / 8, 0)
    else:
        assert (counts.waits, counts.pinned, counts.pageable) == (1, 2, 0)


@pytest.mark.slow
def test_a_layer_with_learned_sinks_waits_once_as_well():
    whole = {"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS}
    # Of all methods DYNAMIC alone wants to know how much attention the window and the sink have.
    counts = counts_of(("ktransformers",), False, "gpt_oss", tokens=8, **whole)["ktransformers"]
    assert (counts.waits, counts.pinned, counts.pageable) == (1, 2, 0)


@torch.no_grad()
def test_sinks_count_in_what_keys_receive_as_they_do_on_a_cpu(gpu):
    tokens = torch.randint(2, 97, (1, 106), generator=torch.Generator().manual_seed(0))
    received = []
    for device in ("cpu", "cuda"):
        model = model_on(
            torch.device(device), tiny_model("gpt_oss", num_hidden_layers=2, layer_types=["full_attention"] * 2)
        )
        cache = injected(model, small_recipe("ktransformers"))
        for part in tokens.split([90, *[1] * 16], dim=1):
            model(part.to(device), past_key_values=cache)
        received.append([layer.state.accumulated.cpu() for layer in cache.layers])
    for expected, mine in zip(*received, strict=True):
        assert expected.max() > 0.1
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def pending_queries(device, *selections):
    """What DYNAMIC's layers save of queries that are not added up yet; rows are selected between."""
    tokens = torch.randint(2, 97, (2, 91), generator=torch.Generator().manual_seed(0))
    model = model_on(torch.device(device), tiny_model("llama", num_hidden_layers=LAYERS))
    cache = injected(model, small_recipe("ktransformers"))
    for part in tokens[:, :89].split([84, *[1] * 5], dim=1):
        model(part.to(device), past_key_values=cache)
    for rows in selections:
        cache.select(rows)
        tokens = tokens[rows]
    for part in tokens[:, 89:].split(1, dim=1):
        model(part.to(device), past_key_values=cache)
    saved = [layer.saved() for layer in cache.layers]
    eject(model)
    return [(part.tensors["queries"], part.tensors["lse"]) for part in saved]


# The same statistics of ShadowKV: test_shadowkv_prompts_on_cuda.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    "selections",
    with_slow({"none": (), "as many": ([1, 0],), "more": ([1, 1, 0], [2, 0, 1])}, slow=["none", "as many"]),
)
def test_deferred_statistics_of_a_gpu_equal_the_cpus(gpu, selections):
    on_cpu, on_gpu = pending_queries("cpu", *selections), pending_queries("cuda", *selections)
    assert len(on_cpu) == LAYERS
    for layer in zip(on_cpu, on_gpu, strict=True):
        # Those of the block that is open: two from before rows were selected, two from behind.
        assert layer[0][1].shape[2] == 4
        for expected, actual in zip(*layer, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_values_that_shadowkv_cannot_store_are_refused_by_name(gpu, llama_on_gpu):
    cache = prompted(llama_on_gpu, "shadowkv", in_half=True)
    before = cache.get_seq_length()
    for layer in llama_on_gpu.model.layers:
        layer.self_attn.v_proj.weight.mul_(1e6)
    with pytest.raises(
        HeteroKVError, match=r"a key or value of .* exceeds the range of value_type FP16, whose largest value is 65504"
    ):
        decode(llama_on_gpu, cache, 7)
    assert cache.get_seq_length() == before


@pytest.mark.parametrize(
    "recipe", with_slow(["ktransformers", "quest", "adaptive", "loki"], slow=["ktransformers", "quest", "loki"])
)
def test_a_token_is_two_launches_around_the_cpus_work(gpu, llama_on_gpu, recipe):
    cache = prompted(llama_on_gpu, recipe)
    # What a layer binds and captures is there by now.
    decode(llama_on_gpu, cache, 7, 8)
    gpu.record.clear()
    decode(llama_on_gpu, cache, 9)
    named = {"_take_token": "take", "_join_parts": "join"}
    order = [
        named.get(each.name) if isinstance(each, Launch) else "wait"
        for each in gpu.record.everything
        if isinstance(each, Launch | Wait)
    ]
    # The token's own id came down before.
    assert [each for each in order[order.index("take") :] if each] == ["take", "wait", "join"] * LAYERS
    assert not any("flash" in launch.name or "_merge" in launch.name for launch in gpu.record.launches)


@pytest.mark.parametrize("recipe", with_slow(["adaptive", "loki"], slow=["loki"]))
@torch.no_grad()
def test_two_launches_decode_as_torch_does(gpu, monkeypatch, recipe):
    model = model_on(torch.device("cuda", 0), tiny_model("llama", num_hidden_layers=LAYERS))
    tokens = torch.randint(2, 97, (2, 52), generator=torch.Generator().manual_seed(3)).to("cuda")
    found = []
    for joint in (True, False):
        if not joint:
            monkeypatch.setattr(retrieval_layer, "takes_token", lambda q, k, v: False)
        cache = injected(model, small_recipe(recipe))
        # At first the window has everything; the ring wraps more than once.
        parts = tokens.split([20, *[1] * 32], dim=1)
        found.append(torch.cat([model(part, past_key_values=cache).logits[:, -1:] for part in parts], dim=1).cpu())
        eject(model)
    mine, expected = found
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


def test_the_window_is_launched_before_the_cpu_begins(gpu, llama_on_gpu, without_joint_launches):
    cache = prompted(llama_on_gpu, "quest")
    gpu.record.clear()
    decode(llama_on_gpu, cache, 7)
    order = [
        "flash" if isinstance(each, Launch) else "wait"
        for each in gpu.record.everything
        if isinstance(each, Wait) or (isinstance(each, Launch) and "flash" in each.name)
    ]
    # The last wait is the test's own, for nothing; of a ring that wraps there are two slices.
    layers = [part for part in "".join(name[0] for name in order).split("w") if part]
    assert len(layers) == LAYERS
    assert set(layers) <= {"f", "ff"}


def windows_launched(gpu, recipe, monkeypatch):
    """How often a token's layers launch attention to their window before each `Staging.send`, and before `arrived`."""
    model = model_on(torch.device("cuda", 0), tiny_model("llama", num_hidden_layers=LAYERS).to(torch.bfloat16))
    cache = prompted(model, recipe)
    launched = {"send": [], "arrived": []}

    def noting(name):
        called = getattr(Staging, name)

        def noted(staging, *args):
            flash = sum("flash" in launch.name for launch in gpu.record.launches)
            launched[name].append(flash - sum(map(sum, launched.values())))
            return called(staging, *args)

        return noted

    for name in launched:
        monkeypatch.setattr(Staging, name, noting(name))
    gpu.record.clear()
    decode(model, cache, 7)
    eject(model)
    return launched["send"], launched["arrived"]


WINDOW_BESIDE_THE_CPU = (
    "dense", "infinigen", "infllm", "infllm_stream", "ktransformers", "kvretrieval", "loki", "magicpig", "quest",
    "self_extend", "self_extend_quest", "snapkv", "streaming",
)  # fmt: skip
WINDOW_BEFORE_THE_CPU = ("adaptive", "adaptive_lean", "retroinfer", "sparq")


@pytest.mark.parametrize(
    "recipe",
    with_slow(
        WINDOW_BESIDE_THE_CPU,
        slow={*WINDOW_BESIDE_THE_CPU} - {"ktransformers"},
    ),
)
def test_the_cpu_has_its_queries_before_torch_launches_the_window(gpu, recipe, monkeypatch, without_joint_launches):
    before, beside = windows_launched(gpu, recipe, monkeypatch)
    assert before == [0] * LAYERS
    assert min(beside) > 0


@pytest.mark.parametrize(
    "recipe", with_slow(list(WINDOW_BEFORE_THE_CPU), slow=["adaptive_lean", "retroinfer", "sparq"])
)
def test_where_the_window_weighs_in_the_choice_the_cpu_waits_for_it(gpu, recipe, monkeypatch, without_joint_launches):
    before, beside = windows_launched(gpu, recipe, monkeypatch)
    assert min(before) > 0
    assert beside == [0] * LAYERS


def test_every_recipe_with_a_window_on_the_gpu_is_one_or_the_other(gpu):
    retrieving, model = set(), tiny_model("llama", num_hidden_layers=LAYERS)
    for recipe in RECIPES:
        inject(model, small_recipe(recipe))
        operators = model.hetero_kv_injection.attention_operators()
        if any(isinstance(each, WindowedDecode | TokenRetrievalAttention) for each in operators):
            retrieving.add(recipe)
        eject(model)
    # Those that differ from `dense` in how they take in prompts decode as it does.
    assert retrieving - {"flexprefill", "minference"} == {*WINDOW_BESIDE_THE_CPU, *WINDOW_BEFORE_THE_CPU}


def test_a_step_leaves_as_much_memory_as_it_found(gpu, llama_on_gpu):
    cache = prompted(llama_on_gpu, "ktransformers")
    # What is captured, at the third token, is kept.
    decode(llama_on_gpu, cache, 4, 5, 6)
    live, pinned = torch.cuda.memory_allocated(), gpu.pinned.nbytes
    decode(llama_on_gpu, cache, *range(7, 15))
    assert torch.cuda.memory_allocated() == live
    assert gpu.pinned.nbytes == pinned


def test_the_bytes_of_the_window_are_the_devices(gpu, llama_on_gpu):
    cache = prompted(llama_on_gpu, "ktransformers")
    # Layers, two heads, keys and values of 16 numbers in bfloat16: the sink's block, Local and a block.
    assert cache.device_bytes == LAYERS * 2 * 2 * 16 * 2 * (8 + 16 + 8)


def test_beams_take_their_windows_with_them(gpu, llama_on_gpu, monkeypatch):
    loaded = []
    load = DeviceWindow.load
    monkeypatch.setattr(DeviceWindow, "load", lambda self, *args: loaded.append(load(self, *args)))
    cache = prompted(llama_on_gpu, "ktransformers")
    assert len(loaded) == LAYERS
    beams = torch.tensor([0, 0, 0], device="cuda")
    gpu.record.clear()
    cache.select(beams)
    cache.select([1, 0, 2])
    # The rows' numbers alone go to the host.
    assert [copy.nbytes for copy in gpu.record.copies] == [3 * 8]
    assert len(loaded) == LAYERS


def test_a_wait_that_is_left_out_is_seen(gpu, llama_on_gpu, monkeypatch):
    cache = prompted(llama_on_gpu, "ktransformers")
    monkeypatch.setattr(Staging, "arrived", lambda self: self._arrays)
    assert not decode(llama_on_gpu, cache, 7).isfinite().all()
