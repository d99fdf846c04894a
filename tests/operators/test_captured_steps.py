"""Tokens decoded by CUDA graphs equal those without, after every operation on the cache."""

from __future__ import annotations

import gc
import re
from types import SimpleNamespace

import pytest
import torch

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.adapter import capture_state, foreign
from hetero_kv.adapter.captured_token import CapturedToken
from hetero_kv.errors import UnsupportedModelError
from hetero_kv.rules.rule_file import parse_rules
from tests.support.devices import model_on, simulated_cuda
from tests.support.launch_counts import counts_of
from tests.support.simulated_cuda import Launch, SimulatedCudaError
from tests.support.simulated_cuda.graphs import CUDAGraph
from tests.support.slow_variants import with_slow
from tests.support.small_recipes import RECIPES, injected, new_cache, small_recipe
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.cuda
PROMPT = 50


@pytest.fixture
def gpu():
    with simulated_cuda() as simulation:
        yield simulation
        gc.collect()


#: InfiniGen chooses for a layer from the input of the one before, from the third layer on.
LAYERS, LAYERS_OF_INFINIGEN = 2, 3


@pytest.fixture
def llama(gpu, request):
    layers = getattr(request, "param", LAYERS)
    return model_on(torch.device("cuda", 0), tiny_model("llama", num_hidden_layers=layers).to(torch.bfloat16))


def random_tokens(count, rows=1, seed=0):
    return torch.randint(2, 97, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def told(model, cache, tokens, prompt=0):
    """Logits after a prompt of the first `prompt` tokens, and after each of the others."""
    parts = tokens.to("cuda").split([*[prompt] * (prompt > 0), *[1] * (tokens.shape[1] - prompt)], dim=1)
    return [model(part, past_key_values=cache).logits[:, -1] for part in parts]


def conversation(model, recipe, graphs):
    """Logits of two turns, a fork, two rows, one of them, another cache and a crop; and what came of capturing."""
    cache = injected(model, small_recipe(recipe, cuda_graphs=graphs))
    found = told(model, cache, random_tokens(54), prompt=50)
    found += told(model, cache, random_tokens(13, seed=1), prompt=10)
    fork = cache.fork()
    found += told(model, fork, random_tokens(1, seed=2)) + told(model, cache, random_tokens(1, seed=3))
    fork.select([0, 0])
    found += told(model, fork, random_tokens(4, rows=2, seed=4))
    fork.select([1])
    found += told(model, fork, random_tokens(1, seed=5))
    other = new_cache(model)
    found += told(model, other, random_tokens(33, seed=6), prompt=30)
    if all(getattr(layer, "can_crop", True) for layer in other.layers):
        other.crop(-2)
        found += told(model, other, random_tokens(1, seed=7))
    state = model.hetero_kv_injection.captures.state
    eject(model)
    return torch.cat([each.cpu() for each in found]), state


#: What waits for nothing, and a policy that rotates keys itself.
QUICK = ("shadowkv",)


@pytest.mark.parametrize(
    ("llama", "recipe"),
    [
        *((LAYERS, each) for each in QUICK),
        *(pytest.param(LAYERS, each, marks=pytest.mark.slow) for each in RECIPES if each not in (*QUICK, "infinigen")),
        pytest.param(LAYERS_OF_INFINIGEN, "infinigen", marks=pytest.mark.slow),
    ],
    indirect=["llama"],
)
def test_logits_are_those_without_graphs(gpu, llama, recipe):
    expected, _ = conversation(llama, recipe, "off")
    actual, state = conversation(llama, recipe, "auto")
    assert torch.equal(actual, expected)
    assert (state == "on") == (recipe != "infinigen")


@pytest.mark.slow
def test_a_layer_is_a_graph_and_what_its_attention_launches():
    plain, captured = (
        counts_of(("ktransformers",), as_shipped=False, cuda_graphs=graphs, tokens=8, num_hidden_layers=2)
        for graphs in ("off", "auto")
    )
    assert captured["ktransformers"].launches + captured["untouched"].launches <= 14
    assert plain["ktransformers"].launches + plain["untouched"].launches > 40
    assert captured["ktransformers"].waits == plain["ktransformers"].waits
    assert captured["ktransformers"].pageable == 0


def test_a_returned_token_is_not_overwritten_by_the_next(gpu, llama):
    cache = injected(llama, small_recipe("shadowkv"))
    told(llama, cache, random_tokens(PROMPT + 4), prompt=PROMPT)
    # Other arguments than the whole model gives it: these are captured by themselves, and some tokens run before that.
    with torch.no_grad():
        states = []
        for token in range(5, 11):
            state = llama.model(torch.tensor([[token]], device="cuda"), past_key_values=cache).last_hidden_state
            states.append((state, state.cpu()))
    assert all(torch.equal(state.cpu(), kept) for state, kept in states)


def test_moved_weights_are_captured_again(gpu, llama, monkeypatch):
    def with_other_weights():
        model = model_on(torch.device("cuda", 0), llama)
        cache = injected(model, small_recipe("shadowkv"))
        told(model, cache, random_tokens(PROMPT + 4), prompt=PROMPT)
        projection = model.model.layers[1].mlp.up_proj
        projection.weight = torch.nn.Parameter(projection.weight * -3, requires_grad=False)
        return model, cache

    model, cache = with_other_weights()
    (actual,) = told(model, cache, random_tokens(1))
    eject(model)
    cache = injected(model, small_recipe("shadowkv", cuda_graphs="off"))
    told(model, cache, random_tokens(1))
    monkeypatch.setattr(CapturedToken, "is_current", True)
    model, cache = with_other_weights()
    with pytest.raises(SimulatedCudaError, match="freed since it was captured"):
        told(model, cache, random_tokens(1))
    assert actual.isfinite().all()


def asking(module, args, output):
    """What a model does that looks at a number on the way."""
    return output * (1.0 if bool((output > 1e9).any()) else 0.5)


WAITS = rf"the forward waits for the device \(test_captured_steps.py:{asking.__code__.co_firstlineno + 2}\)"


@pytest.fixture
def failed(monkeypatch):
    """The captures that have failed."""
    graphs, fail = [], CUDAGraph.fail
    monkeypatch.setattr(CUDAGraph, "fail", lambda graph: (graphs.append(graph), fail(graph)))
    return graphs


def test_uncapturable_layers_run_uncaptured_and_are_named(gpu, llama, failed, behind_mlp):
    behind_mlp(asking)
    cache = injected(llama, small_recipe("shadowkv", cuda_graphs="off"))
    tokens = random_tokens(34)
    expected = told(llama, cache, tokens, prompt=30)
    eject(llama)
    actual = told(llama, injected(llama, small_recipe("shadowkv")), tokens, prompt=30)
    state = llama.hetero_kv_injection.captures.state
    assert torch.equal(torch.cat(actual), torch.cat(expected))
    assert re.fullmatch(f"off: {WAITS}", state)
    assert not failed


# A layer that cannot be captured is named above as well.
@pytest.mark.slow
def test_rotations_that_change_with_the_length_are_not_captured(gpu, failed):
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = model_on(
        torch.device("cuda", 0), tiny_model("llama", num_hidden_layers=2, rope_parameters=scaled).to(torch.bfloat16)
    )
    told(model, injected(model, small_recipe("shadowkv")), random_tokens(PROMPT + 3), prompt=PROMPT)
    state = model.hetero_kv_injection.captures.state
    assert state.startswith("off: the forward waits for the device (modeling_rope_utils.py:")
    assert not failed


def waiting(module, args, output):
    """What a model does that nobody tells of before it is captured."""
    torch.cuda.synchronize()
    return output


def test_a_capture_that_fails_leaves_torch_as_it_was(gpu, llama, failed, behind_mlp):
    behind_mlp(waiting)
    told(llama, injected(llama, small_recipe("shadowkv")), random_tokens(PROMPT + 3), prompt=PROMPT)
    state = llama.hetero_kv_injection.captures.state
    assert state == "off: CUDA error: operation not permitted when stream is capturing (synchronize)"
    assert len(failed) == 1
    # Random numbers are drawn, and memory of two streams is freed.
    assert 0 <= torch.rand(1, device="cuda").item() < 1
    live, ours = torch.cuda.memory_allocated(), torch.ones(1000, device="cuda")
    ours.record_stream(torch.cuda.Stream())
    del ours
    assert torch.cuda.memory_allocated() == live


@pytest.mark.parametrize(
    ("llama", "recipe", "hook", "message"),
    [
        pytest.param(LAYERS_OF_INFINIGEN, "infinigen", None, "computes from the arguments", marks=pytest.mark.slow),
        (LAYERS, "shadowkv", asking, WAITS),
        pytest.param(LAYERS, "shadowkv", waiting, "not permitted when stream", marks=pytest.mark.slow),
    ],
    indirect=["llama"],
)
def test_impossible_graphs_are_refused_where_they_are_required(gpu, llama, recipe, hook, message, behind_mlp):
    if hook is not None:
        behind_mlp(hook)
    cache = injected(llama, small_recipe(recipe, cuda_graphs="on"))
    tokens = random_tokens(PROMPT + 3)
    told(llama, cache, tokens[:, :-1], prompt=PROMPT)
    before = cache.get_seq_length()
    with pytest.raises(UnsupportedModelError, match=f"cuda_graphs is on, but a token cannot be captured: .*{message}"):
        told(llama, cache, tokens[:, -1:])
    assert cache.get_seq_length() == before


def test_torchs_cached_memory_is_freed_before_a_capture():
    with simulated_cuda(total=8 << 20) as gpu:
        model = model_on(torch.device("cuda", 0), tiny_model("llama", num_hidden_layers=2).to(torch.bfloat16))
        cache = injected(model, small_recipe("shadowkv", cuda_graphs="on"))
        told(model, cache, random_tokens(PROMPT + 2), prompt=PROMPT)
        torch.empty(gpu.total - torch.cuda.memory_allocated(), dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == gpu.total
        told(model, cache, random_tokens(2))
        assert model.hetero_kv_injection.captures.state == "on"
        eject(model)
        del cache
        gc.collect()


@pytest.fixture
def behind_mlp(llama, monkeypatch):
    """Lets the code of a layer's MLP do something behind its computation: code of the model's, and no hook."""
    mlp = llama.model.layers[1].mlp
    forward = type(mlp).forward

    def put(act):
        def with_act(self, *args):
            output = forward(self, *args)
            changed = act(self, args, output) if self is mlp else None
            return output if changed is None else changed

        monkeypatch.setattr(type(mlp), "forward", with_act)
        monkeypatch.setitem(foreign._known_classes, (type(mlp), with_act), True)

    return put


@pytest.fixture
def crowded(gpu, llama, monkeypatch, behind_mlp):
    """Lets memory run out in captures for as long as it `holds` it, and counts the `tries`."""
    monkeypatch.setattr(capture_state, "_RESTING", 2)
    monkeypatch.setattr(capture_state, "_LONGER", 1)
    found = SimpleNamespace(holds=True, tries=0)

    def greedy(module, args, output):
        if found.holds and torch.cuda.is_current_stream_capturing():
            found.tries += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return output

    behind_mlp(greedy)
    return found


@pytest.mark.parametrize("graphs", with_slow(["auto", "on"], slow=["on"]))
def test_where_memory_runs_out_tokens_run_as_they_are_and_are_captured_later(gpu, llama, crowded, failed, graphs):
    tokens = random_tokens(PROMPT + 8)
    expected = told(llama, injected(llama, small_recipe("shadowkv", cuda_graphs="off")), tokens, prompt=PROMPT)
    eject(llama)
    cache = injected(llama, small_recipe("shadowkv", cuda_graphs=graphs))
    actual = told(llama, cache, tokens[:, : PROMPT + 3], prompt=PROMPT)
    report = llama.hetero_kv_injection.captures
    assert report.state == "not yet: the GPU has too little free memory for graphs, tried 1 of 4 times"
    crowded.holds = False
    actual += told(llama, cache, tokens[:, PROMPT + 3 : PROMPT + 5])
    assert report.state.startswith("not yet")
    actual += told(llama, cache, tokens[:, PROMPT + 5 :])
    assert report.state == "on"
    assert torch.equal(torch.cat(actual), torch.cat(expected))
    assert crowded.tries == 1
    assert not failed


# As often as where graphs are required, which the next test has.
@pytest.mark.slow
def test_it_is_tried_a_few_times_to_find_memory(gpu, llama, crowded):
    told(llama, injected(llama, small_recipe("shadowkv")), random_tokens(PROMPT + 20), prompt=PROMPT)
    state = llama.hetero_kv_injection.captures.state
    assert state == "off: the GPU has too little free memory for graphs, tried 4 times"
    assert crowded.tries == 4


# Where graphs are not required, above, memory runs out in the same way.
@pytest.mark.slow
def test_required_graphs_are_refused_where_no_memory_can_be_freed(gpu, llama, crowded):
    cache = injected(llama, small_recipe("shadowkv", cuda_graphs="on"))
    told(llama, cache, random_tokens(PROMPT + 11), prompt=PROMPT)
    with pytest.raises(UnsupportedModelError, match="too little free memory for graphs, tried 4 times"):
        told(llama, cache, random_tokens(1))


def test_memory_is_looked_for_less_and_less_often():
    report = capture_state.CaptureState()
    behind = []
    for _ in range(3):
        report.run_out()
        behind.append(sum(iter(report.backs_off, False)))
    assert behind == [16, 64, 256]


def test_a_layer_without_an_operator_is_not_captured(gpu, llama):
    first = {"match": {"name": r"layers\.0\.self_attn$"}, "replace": {"class": "default"}}
    others = {"match": {"name": r"self_attn$"}, "replace": {"class": "ShadowKVAttention", "kwargs": {"rank": 16}}}
    chunked = {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}}
    inject(llama, parse_rules({"rules": [first, others, chunked], "long_context": {"max_seq_len": 256}}))
    told(llama, HeteroCache(llama), random_tokens(PROMPT + 4), prompt=PROMPT)
    assert llama.hetero_kv_injection.captures.state.startswith("off: 1 layers use a cache of transformers' own")


def test_a_captured_token_launches_a_graph_for_every_attention_and_one_more(gpu, llama):
    cache = injected(llama, small_recipe("quest"))
    told(llama, cache, random_tokens(PROMPT + 4), prompt=PROMPT)
    gpu.record.clear()
    told(llama, cache, random_tokens(1))
    assert [each.name for each in gpu.record.everything if isinstance(each, Launch)].count("graph") == 3
