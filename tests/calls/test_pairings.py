"""Caches and models in any pairing, while rules change: right, or refused without storing anything."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from hetero_kv import HeteroCache, HeteroKVError, eject, inject
from hetero_kv.rules.injecting import suspended
from tests.calls.reference_model import EVERYTHING, SIZES
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [{}, {}, {"num_hidden_layers": 1}]
MODELS = [tiny_model("llama", seed, **{**SIZES, **shape}) for seed, shape in enumerate(SHAPES)]
UNTOUCHED = [tiny_model("llama", seed, **{**SIZES, **shape}) for seed, shape in enumerate(SHAPES)]
#: All of them cover whatever comes.
RULES = [
    ("quest", EVERYTHING),
    ("quest", {**EVERYTHING, "block_size": 8}),
    ("streaming_llm", {"budget": 300, "max_seq_len": 400}),
]
WITHIN = contextlib.nullcontext, suspended

MODEL = st.integers(0, len(MODELS) - 1)
ACTION = st.one_of(
    st.tuples(st.just("inject"), MODEL, st.integers(0, len(RULES) - 1)),
    st.tuples(st.just("eject"), MODEL, st.none()),
    st.tuples(st.just("make"), MODEL, st.none()),
    st.tuples(st.just("pass"), MODEL, st.tuples(st.integers(0, 99), st.integers(1, 20), st.sampled_from(WITHIN))),
    st.tuples(st.just("fork"), st.integers(0, 99), st.none()),
)
START = [("inject", 0, 0), ("make", 0, None), ("inject", 1, 0), ("make", 1, None), ("inject", 2, 2), ("make", 2, None)]


class ResidentPrefix:
    """A cache, the model and the rules that it was made for, and the tokens that passed."""

    def __init__(self, cache, model, rules, tokens=()):
        self.cache, self.made_for, self.tokens = cache, (model, rules), list(tokens)


def is_injected(model):
    return getattr(model, "hetero_kv_injection", None) is not None


def expected_logits(index, tokens, new):
    cache = DynamicCache(config=UNTOUCHED[index].config)
    return UNTOUCHED[index](torch.tensor([tokens + new]), past_key_values=cache).logits[:, -len(new) :]


def passed(resident, index, rules, new, within):
    """Let new tokens pass through a model: right where the cache is its own, refused where it is not."""
    model = MODELS[index]
    before = resident.cache.get_seq_length()
    is_own = within is contextlib.nullcontext and resident.made_for == (index, rules)
    with within(model):
        if is_own:
            logits = model(torch.tensor([new]), past_key_values=resident.cache).logits
            torch.testing.assert_close(logits, expected_logits(index, resident.tokens, new), rtol=1e-3, atol=1e-3)
            resident.tokens += new
            return
        with pytest.raises(HeteroKVError, match=r"does not belong to this model|passed to a model without its rules"):
            model(torch.tensor([new]), past_key_values=resident.cache)
    assert resident.cache.get_seq_length() == before == len(resident.tokens)


LIVES = given(actions=st.lists(ACTION, min_size=4, max_size=14), seed=st.integers(0, 999))


@settings(max_examples=6, deadline=None)
@LIVES
def test_a_cache_is_right_with_its_own_model_and_refused_by_every_other(actions, seed):
    is_right_with_its_own_model_alone(actions, seed)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@LIVES
def test_more_caches_are_right_with_their_own_models_and_refused_by_every_other(actions, seed):
    is_right_with_its_own_model_alone(actions, seed)


@torch.no_grad()
def is_right_with_its_own_model_alone(actions, seed):
    generator = torch.Generator().manual_seed(seed)
    caches: list[ResidentPrefix] = []
    rules: list[int | None] = [None] * len(MODELS)
    try:
        for action, which, more in [*START, *actions]:
            if action == "inject" and rules[which] is None:
                name, chosen = RULES[more]
                inject(MODELS[which], name, command_line=chosen)
                rules[which] = more
            elif action == "eject" and rules[which] is not None:
                eject(MODELS[which])
                rules[which] = None
            elif action == "make" and rules[which] is not None:
                caches.append(ResidentPrefix(HeteroCache(MODELS[which]), which, rules[which]))
            elif action == "fork":
                resident = caches[which % len(caches)]
                caches.append(ResidentPrefix(resident.cache.fork(), *resident.made_for, resident.tokens))
            elif action == "pass":
                chosen, count, within = more
                new = torch.randint(6, 90, (count,), generator=generator).tolist()
                passed(caches[chosen % len(caches)], which, rules[which], new, within)
        # Those whose rules are there, or there again, go on.
        for resident in caches:
            model, made = resident.made_for
            if rules[model] == made:
                passed(resident, model, made, [7, 8, 9], contextlib.nullcontext)
    finally:
        for model in MODELS:
            if is_injected(model):
                eject(model)


def refusal(cache, model):
    with pytest.raises(HeteroKVError) as raised:
        model(torch.tensor([[5, 6, 7]]), past_key_values=cache)
    return str(raised.value)


@pytest.fixture
def llama():
    return tiny_model("llama", 1, **SIZES)


CHANGES = {
    (
        "streaming_llm",
        None,
    ): r"self_attn had RetrievalAttention when it was made, and has BoundedAttention now",
    ("quest", "block_size"): r"self_attn \(RetrievalAttention\) had block_size 16 when it was made, and has 8 now",
    ("quest", "chunk_size"): r"the engine had chunk_size 4096 when it was made, and has 8 now",
}


@pytest.mark.parametrize(("rules", "changed"), CHANGES)
def test_a_cache_of_other_rules_is_refused_with_the_difference(llama, rules, changed):
    inject(llama, "quest", command_line=EVERYTHING)
    cache = HeteroCache(llama)
    eject(llama)
    inject(llama, rules, command_line={**(EVERYTHING if rules == "quest" else {}), **({changed: 8} if changed else {})})
    found = refusal(cache, llama)
    assert re.search(CHANGES[rules, changed], found), found
    assert "make one with HeteroCache(model); cache.save(path) and HeteroCache.load(path, model)" in found


def test_a_cache_of_another_model_is_told_of_both(llama):
    other = tiny_model("llama", 1, **{**SIZES, "num_hidden_layers": 1})
    for model in (llama, other):
        inject(model, "quest", command_line=EVERYTHING)
    assert "made for LlamaForCausalLM (1 layers, hidden size 64), and this is LlamaForCausalLM (2 layers" in refusal(
        HeteroCache(other), llama
    )


@torch.no_grad()
def test_an_ejected_model_refuses_the_cache_and_takes_it_again_with_the_rules_it_had(llama):
    expected = llama(torch.tensor([[5, 6, 7, 8]])).logits[:, -1]
    inject(llama, "quest", command_line=EVERYTHING)
    cache = HeteroCache(llama)
    llama(torch.tensor([[5, 6, 7]]), past_key_values=cache)
    with suspended(llama):
        assert "those of LlamaForCausalLM (2 layers, hidden size 64), under which it was made, have been ejected" in (
            refusal(cache, llama)
        )
    torch.testing.assert_close(
        llama(torch.tensor([[8]]), past_key_values=cache).logits[:, -1], expected, rtol=1e-3, atol=1e-3
    )


def test_keys_for_a_layer_outside_of_a_forward_are_refused(llama):
    inject(llama, "quest", command_line=EVERYTHING)
    cache, keys = HeteroCache(llama), torch.zeros(1, 2, 3, 16)
    with pytest.raises(HeteroKVError, match="passed to a model without its rules"):
        cache.update(keys, keys, 0)
    with pytest.raises(HeteroKVError, match="layer 1 of a HeteroCache received keys and values outside of a forward"):
        cache.layers[1].update(keys, keys)
