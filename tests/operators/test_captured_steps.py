"""Tokens that a GPU decodes by CUDA graphs are those that it decodes without, whatever is done with the cache."""

from __future__ import annotations

import gc

import pytest
import torch
from count_launches import counts_of
from devices import model_on, simulated_cuda
from simulated_cuda import Launch, SimulatedCudaError
from small_recipes import RECIPES, injected, new_cache, small_recipe
from tiny_models import tiny_model

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.adapter import captured_steps
from hetero_kv.errors import UnsupportedModelError
from hetero_kv.rules.rule_file import parse_rules

pytestmark = pytest.mark.cuda
PROMPT = 50


@pytest.fixture
def gpu():
    with simulated_cuda() as simulation:
        yield simulation
        gc.collect()


@pytest.fixture
def llama(gpu):
    return model_on(torch.device("cuda", 0), tiny_model("llama").to(torch.bfloat16))


def random_tokens(count, rows=1, seed=0):
    return torch.randint(2, 97, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def told(model, cache, tokens, prompt=0):
    """Logits behind a prompt of so many of the tokens, and behind each of the others."""
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
    "recipe", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in RECIPES if each not in QUICK)]
)
def test_logits_are_those_without_graphs(gpu, llama, recipe):
    expected, _ = conversation(llama, recipe, "off")
    actual, state = conversation(llama, recipe, "auto")
    assert torch.equal(actual, expected)
    assert state == "on" or recipe == "infinigen"


def test_a_layer_is_a_graph_and_what_its_attention_launches():
    plain, captured = (
        counts_of(("ktransformers",), as_shipped=False, cuda_graphs=graphs) for graphs in ("off", "auto")
    )
    assert captured["ktransformers"].launches + captured["untouched"].launches <= 14
    assert plain["ktransformers"].launches + plain["untouched"].launches > 50
    assert captured["ktransformers"].waits == plain["ktransformers"].waits
    assert captured["ktransformers"].pageable == 0


def test_a_token_that_was_given_is_not_written_over_by_the_next(gpu, llama):
    cache = injected(llama, small_recipe("shadowkv"))
    told(llama, cache, random_tokens(PROMPT + 4), prompt=PROMPT)
    # Other arguments than the whole model gives it: these are captured by themselves, and some tokens run before that.
    with torch.no_grad():
        given = []
        for token in range(5, 11):
            state = llama.model(torch.tensor([[token]], device="cuda"), past_key_values=cache).last_hidden_state
            given.append((state, state.cpu()))
    assert all(torch.equal(state.cpu(), kept) for state, kept in given)


def test_weights_that_lie_elsewhere_are_captured_anew(gpu, llama, monkeypatch):
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
    monkeypatch.setattr(captured_steps._CapturedToken, "is_current", True)
    model, cache = with_other_weights()
    with pytest.raises(SimulatedCudaError, match="freed since it was captured"):
        told(model, cache, random_tokens(1))
    assert actual.isfinite().all()


def asking(module, args, output):
    """What a model does that looks at a number on the way."""
    return output * (1.0 if bool((output > 1e9).any()) else 0.5)


def test_what_cannot_be_captured_runs_as_it_is_and_is_named(gpu, llama):
    llama.model.layers[2].mlp.register_forward_hook(asking)
    cache = injected(llama, small_recipe("shadowkv", cuda_graphs="off"))
    tokens = random_tokens(34)
    expected = told(llama, cache, tokens, prompt=30)
    eject(llama)
    actual = told(llama, injected(llama, small_recipe("shadowkv")), tokens, prompt=30)
    state = llama.hetero_kv_injection.captures.state
    assert torch.equal(torch.cat(actual), torch.cat(expected))
    assert state == "off: CUDA error: operation not permitted when stream is capturing (_local_scalar_dense)"


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        pytest.param("infinigen", "computes from what", marks=pytest.mark.slow),
        ("shadowkv", "not permitted when stream"),
    ],
)
def test_graphs_that_are_asked_for_and_cannot_be_are_refused(gpu, llama, recipe, message):
    llama.model.layers[2].mlp.register_forward_hook(asking)
    cache = injected(llama, small_recipe(recipe, cuda_graphs="on"))
    tokens = random_tokens(PROMPT + 3)
    told(llama, cache, tokens[:, :-1], prompt=PROMPT)
    before = cache.get_seq_length()
    with pytest.raises(UnsupportedModelError, match=f"cuda_graphs is on, and a token cannot be captured: .*{message}"):
        told(llama, cache, tokens[:, -1:])
    assert cache.get_seq_length() == before


def test_a_layer_without_an_operator_is_not_captured(gpu, llama):
    first = {"match": {"name": r"layers\.0\.self_attn$"}, "replace": {"class": "default"}}
    others = {"match": {"name": r"self_attn$"}, "replace": {"class": "ShadowKVAttention", "kwargs": {"rank": 16}}}
    chunked = {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}}
    inject(llama, parse_rules({"rules": [first, others, chunked], "long_context": {"max_seq_len": 256}}))
    told(llama, HeteroCache(llama), random_tokens(PROMPT + 4), prompt=PROMPT)
    assert llama.hetero_kv_injection.captures.state.startswith("off: 1 layers have a cache of transformers' own")


def test_a_captured_token_launches_a_graph_for_every_attention_and_one_more(gpu, llama):
    cache = injected(llama, small_recipe("quest"))
    told(llama, cache, random_tokens(PROMPT + 4), prompt=PROMPT)
    gpu.record.clear()
    told(llama, cache, random_tokens(1))
    assert [each.name for each in gpu.record.everything if isinstance(each, Launch)].count("graph") == 4
