"""What a token attended to: the masses of the forward that chose it, layer by layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hetero_kv import Engine
from hetero_kv.models.loading import LoadedModel
from hetero_kv.operators import BoundedAttention, RetrievalAttention, ShadowKVAttention, TokenRetrievalAttention
from hetero_kv.rules.injecting import inject
from tests.operators.resident_models import rates_given
from tests.serving.number_tokenizer import Numbers
from tests.serving.tiny_engine import PROMPTS, answered, engine_of
from tests.support.devices import device_called
from tests.support.ragged_rows import prompt
from tests.support.slow_variants import combined, with_few, with_slow
from tests.support.small_recipes import RECIPES, small_recipe
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = PROMPTS[3]
#: Of recipes that keep all tokens in blocks, and choose from the query alone.
PAGED = ["quest", "adaptive", "adaptive_lean", "ktransformers", "kvretrieval", "infllm", "streaming"]
#: Of recipes that attend to every token.
FULL = ["dense", "minference", "flexprefill", "self_extend"]
OF_TOKENS = ["retroinfer", "magicpig", "sparq", "loki"]


def shares(attended):
    """The sum of all shares, per layer."""
    return attended.masses.sum(axis=1) + attended.estimated + attended.sinks


def own_masses(tokens, architecture):
    """The mass of every token in the model's own attention layers, behind these tokens: [layers, tokens]."""
    model = tiny_model(architecture, attn_implementation="eager")
    weights = model(torch.tensor([tokens]), output_attentions=True).attentions
    return torch.stack([each[0, :, -1].mean(dim=0) for each in weights if each is not None]).numpy()


@pytest.mark.parametrize(
    "architecture", with_slow(["llama", "gemma2", "gpt_oss", "bamba", "deepseek_v3"], ["deepseek_v3"])
)
@pytest.mark.parametrize("place", with_few([5, 0]))
def test_under_full_attention_the_masses_are_the_models_own(architecture, place):
    with engine_of("dense", architecture) as engine:
        tokens, position = answered(engine, PROMPT), len(PROMPT) + place
        attended = engine.attended(tokens, position, prompt_tokens=len(PROMPT), bins=position).result()
    expected = own_masses(tokens[:position], architecture)
    np.testing.assert_allclose(attended.masses, expected, atol=2e-6)
    np.testing.assert_allclose(attended.sinks, 1 - expected.sum(axis=1), atol=2e-6)
    assert not attended.estimated.any()
    assert attended.chosen.max(axis=0).min() == 1
    np.testing.assert_array_equal(attended.total, attended.masses.mean(axis=0))


@pytest.mark.parametrize("bins", with_few([7, [0, 3, 150], 500, 1, [0]], 3))
def test_a_bin_has_the_masses_of_its_tokens(bins):
    with engine_of("quest") as engine:
        tokens, position = answered(engine, PROMPT), len(PROMPT) + 4
        each = engine.attended(tokens, position, bins=position).result()
        binned = engine.attended(tokens, position, bins=bins).result()
    assert (binned.edges[0], binned.edges[-1]) == (0, position)
    assert len(binned.edges) - 1 == (min(bins, position) if isinstance(bins, int) else len(bins))
    sizes = np.diff(binned.edges)
    assert sizes.max() - sizes.min() <= 1 or not isinstance(bins, int)
    for name, divisor in (("masses", 1), ("chosen", sizes)):
        expected = np.add.reduceat(getattr(each, name), binned.edges[:-1], axis=1) / divisor
        np.testing.assert_allclose(getattr(binned, name), expected, atol=1e-6)


def attended_by_values(monkeypatch, operator):
    """Layer -> what attention returns for values that are 1 in one bin and 0 elsewhere, whenever it is recorded.

    The layers' values are those for one more call with the same query, in which every estimate has the value 0.
    """
    found, original = {}, operator.decode_step

    def probed(self, layer, step, call):
        out, record = original(self, layer, step, call), layer.record
        if record is None:
            return out
        layer.record, pool, size = None, layer.pool, layer.layout.block_size
        kept = {name: array.clone() for name, array in pool.arrays.items() if "value" in name}
        for name in kept:
            pool.arrays[name].zero_()
        bins = np.searchsorted(record._edges.numpy(), np.arange(step.length), side="right") - 1
        for position, number in enumerate(bins):
            pool.values[int(step.blocks(layer.layout).table[0, position // size]), :, position % size, number] = 1
        values = torch.zeros_like(call.v)
        values[..., bins[-1]] = 1
        found[self.layer_idx] = original(self, layer, step, replace(call, v=values))[0, :, 0].mean(dim=0).numpy()
        for name, array in kept.items():
            pool.arrays[name].copy_(array)
        layer.record = record
        return out

    monkeypatch.setattr(operator, "decode_step", probed)
    return found


@pytest.mark.parametrize("recipe", with_few([*PAGED, *OF_TOKENS], ("adaptive", "retroinfer", "magicpig")))
def test_masses_are_what_attention_returns_for_values_of_one_bin(recipe, monkeypatch):
    found = attended_by_values(monkeypatch, RetrievalAttention if recipe in PAGED else TokenRetrievalAttention)
    with engine_of(recipe) as engine:
        tokens = answered(engine, PROMPT)
        # No block is finalized here, so that none gets a mean of the values of one bin.
        position = len(PROMPT) + 7
        attended = engine.attended(tokens, position, prompt_tokens=len(PROMPT), bins=16).result()
    assert list(found) == list(attended.layers)
    np.testing.assert_allclose(attended.masses, np.stack(list(found.values())), atol=2e-6)
    np.testing.assert_allclose(shares(attended), 1, atol=2e-6)
    assert (attended.estimated > 1e-3).any() == (recipe in ("adaptive", "adaptive_lean", "retroinfer", "sparq"))


@pytest.mark.parametrize("recipe", with_few(RECIPES, ("shadowkv", "infinigen", "d2o")))
def test_all_shares_of_a_layer_are_one_and_all_but_few_tokens_are_left_out(recipe):
    with engine_of(recipe) as engine:
        tokens, position = answered(engine, PROMPT), len(PROMPT) + 7
        attended = engine.attended(tokens, position, prompt_tokens=len(PROMPT)).result()
    np.testing.assert_allclose(shares(attended), 1, atol=2e-6)
    assert attended.chosen.max() == 1
    assert (attended.masses.min() > 0) == (recipe in FULL)
    assert (attended.masses[attended.chosen == 0] == 0).all()


@pytest.mark.parametrize(
    ("recipe", "operator", "covering"),
    [
        ("streaming_llm", BoundedAttention, {"budget": 400, "stride": 400}),
        ("h2o", BoundedAttention, {"budget": 400}),
        ("shadowkv", ShadowKVAttention, {"rank": 32, "sparse_budget": "all"}),
    ],
)
def test_a_budget_that_covers_the_sequence_gives_the_models_own_masses(recipe, operator, covering):
    rules = small_recipe(recipe, max_seq_len=400)
    changed = (
        replace(rule, kwargs={**rule.kwargs, **covering}) if rule.operator is operator else rule for rule in rules.rules
    )
    model = tiny_model("llama")
    inject(model, replace(rules, rules=tuple(changed)))
    with Engine(LoadedModel(model, Numbers(), "tiny", 512), max_seq_len=400, starts_thread=False) as engine:
        tokens, position = answered(engine, PROMPT), len(PROMPT) + 7
        attended = engine.attended(tokens, position, prompt_tokens=len(PROMPT), bins=position).result()
    np.testing.assert_allclose(attended.masses, own_masses(tokens[:position], "llama"), atol=2e-5)


def computed(engine, monkeypatch):
    """The logits of all forwards of one row from now on, by the tokens before them."""
    forward, found = engine._scheduler.forward, {}
    original = forward._logits

    def noting(cache, token_ids):
        logits = original(cache, token_ids)
        found.setdefault(cache.get_seq_length(), []).append(logits[-1])
        return logits

    monkeypatch.setattr(forward, "_logits", noting)
    return found


@pytest.mark.parametrize(("recipe", "weights"), combined(["dense", "adaptive"], ["auto", "q8_0"]))
def test_the_forward_is_that_of_the_answer_bit_for_bit(recipe, weights, monkeypatch):
    model = tiny_model("qwen3")
    inject(model, small_recipe(recipe, max_seq_len=400, weights=weights))
    with Engine(LoadedModel(model, Numbers(), "tiny", 512), max_seq_len=400, starts_thread=False) as engine:
        found = computed(engine, monkeypatch)
        tokens, position = answered(engine, PROMPT), len(PROMPT) + 7
        attended = engine.attended(tokens, position).result()
        assert attended.cached_tokens == position - 1
        first, again = found[position]
        assert torch.equal(first, again)
        assert int(again.argmax()) == tokens[position]


@pytest.mark.slow
@pytest.mark.parametrize("kv_type", ["FP16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("recipe", ["dense", "adaptive", "retroinfer", "shadowkv"])
def test_keys_are_read_as_they_are_stored(recipe, kv_type):
    model = tiny_model("qwen3", head_dim=32).to(torch.bfloat16)
    own = {
        "adaptive": {"block_size": 16, "min_blocks": 2, "max_dense_blocks": 0, "top_k_blocks": 3},
        "retroinfer": {"block_size": 16, "cluster_tokens": 4, "segment_tokens": 64},
        "shadowkv": {"rank": 16, "outlier_chunks": 2},
    }
    shared = {} if recipe == "shadowkv" else {"sink_tokens": 16, "local_windows_len": 32}
    settings = {"max_seq_len": 400, "weights": "q8_0", "kv_type": kv_type, **shared, **own.get(recipe, {})}
    inject(model, recipe, command_line=settings)
    with Engine(LoadedModel(model, Numbers(), "tiny", 512), max_seq_len=400, starts_thread=False) as engine:
        tokens = answered(engine, PROMPT)
        for place, most in ((0, 1), (7, 1 if recipe == "dense" else 0.6)):
            attended = engine.attended(tokens, len(PROMPT) + place, prompt_tokens=len(PROMPT)).result()
            np.testing.assert_allclose(shares(attended), 1, atol=3e-5)
            assert attended.chosen.mean() <= most


@pytest.mark.parametrize("recipe", with_few(["adaptive", "streaming_llm", "retroinfer"], 2))
def test_what_has_left_memory_passes_again_as_it_did(recipe, monkeypatch):
    with engine_of(recipe, kept_prefixes=0, part=40) as engine:
        found = computed(engine, monkeypatch)
        tokens, position = answered(engine, PROMPT), len(PROMPT) + 7
        attended = engine.attended(tokens, position, prompt_tokens=len(PROMPT)).result()
        assert attended.cached_tokens == 0
        assert all(int(each.argmax()) == tokens[position] for each in found[position])
        torch.testing.assert_close(*found[position], rtol=1e-4, atol=1e-4)


def test_the_first_token_of_all_attends_to_the_one_before():
    with engine_of("quest") as engine:
        attended = engine.attended([5, 6], 1).result()
        assert attended.masses.shape == (3, 1)
        np.testing.assert_allclose(attended.masses, 1, atol=1e-6)


def attended_on(place, recipe, **settings):
    """What tokens behind a prompt attend to, of a model on a device."""
    model = tiny_model("llama").to(place)
    inject(model, small_recipe(recipe, max_seq_len=400, **settings))
    with Engine(LoadedModel(model, Numbers(), "tiny", 512), max_seq_len=400, starts_thread=False) as engine:
        tokens = [*PROMPTS[2], *prompt(20, 5).tolist()]
        places = (len(PROMPTS[2]), len(PROMPTS[2]) + 9) if recipe != "self_extend" else (len(PROMPTS[2]) + 9,)
        streams = [engine.attended(tokens, position, prompt_tokens=len(PROMPTS[2])) for position in places]
        # In this thread, to which a simulated device belongs.
        while not all(stream.is_done for stream in streams):
            engine._loop._step()
        return [stream.result() for stream in streams]


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", with_few(["adaptive", "retroinfer", "dense", "quest", "shadowkv", "self_extend"]))
def test_a_device_gives_the_masses_of_the_cpu(recipe, device):
    for ours, theirs in zip(attended_on("cpu", recipe), attended_on(device, recipe), strict=True):
        np.testing.assert_allclose(ours.masses, theirs.masses, atol=1e-4)
        np.testing.assert_allclose(shares(theirs), 1, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "attend_on"), [("quest", "gpu"), ("dense", "gpu"), ("quest", "split")])
def test_a_gpu_that_attends_to_blocks_itself_gives_the_masses_of_the_cpu(recipe, attend_on, monkeypatch):
    rates_given(monkeypatch)(0.5)
    with device_called("cuda"):
        on_gpu = attended_on("cuda", recipe, attend_on=attend_on)
    for ours, theirs in zip(attended_on("cpu", recipe), on_gpu, strict=True):
        np.testing.assert_allclose(ours.masses, theirs.masses, atol=1e-4)
        np.testing.assert_allclose(shares(theirs), 1, atol=1e-4)
