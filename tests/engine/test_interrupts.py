"""Ctrl-C at any moment of a forward: the conversation goes on as if nothing had been asked."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from interrupted_forwards import Moments
from small_recipes import ENGINE, injected, new_cache, small_recipe, with_settings
from tiny_models import tiny_model

from hetero_kv.families.retrieval import short_turn
from hetero_kv.rules.rule_file import parse_rules

FEW = {
    "chunk_size": 16,
    "block_size": 4,
    "initial_len": 4,
    "local_windows_len": 8,
    "second_block_count": 3,
    "preselect_block_count": 5,
    "observation_len": 12,
    "max_seq_len": 256,
}


def operator_in(pattern, name, **kwargs):
    return {"match": {"name": pattern}, "replace": {"class": name, "kwargs": kwargs}}


def mixed(*rules):
    chunked = {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}}
    return with_settings(parse_rules({"rules": [*rules, chunked]}), {**ENGINE, **FEW})


@pytest.fixture(autouse=True)
def short_turns_behind_any_past(monkeypatch):
    """Tiny models have short pasts."""
    monkeypatch.setattr(short_turn, "LEAST_PAST", 1)


SHADOWKV = {"rank": 8, "landmark_chunk_size": 4, "outlier_chunks": 3, "local_chunks": 2, "sparse_budget": 16}
#: The architecture and the rules. Blocks enter the Context and chunks the factors while answering; entries are dropped.
FAMILIES = {
    "blocks by attention": ("llama", small_recipe("ktransformers", **FEW)),
    "blocks by bounds": ("llama", small_recipe("quest", **FEW)),
    "tokens by preselection": ("llama", small_recipe("snapkv", **FEW)),
    "short turns": ("llama", small_recipe("ktransformers", **FEW | {"chunk_size": 64, "preselect_block": True})),
    "selections that are reused": (
        "llama",
        mixed(operator_in("self_attn$", "RetrievalAttention", representative_type="MEAN", layer_step=2, token_step=3)),
    ),
    "factors": ("llama", mixed(operator_in("self_attn$", "ShadowKVAttention", refactor_above=0.0, **SHADOWKV))),
    "factors of answers": (
        "llama",
        mixed(operator_in("self_attn$", "ShadowKVAttention", project_generated=True, **SHADOWKV)),
    ),
    "entries": ("llama", small_recipe("h2o", **FEW)),
    "entries that are merged": ("llama", small_recipe("d2o", **FEW)),
    "entries in strides": ("llama", small_recipe("cascade", **FEW)),
    "entropy in strides": ("llama", small_recipe("sirllm", **FEW)),
    "a catalyst": ("llama", small_recipe("infinipot", **FEW)),
    "windows": ("gemma3_text", small_recipe("ktransformers", **FEW)),
    "a layer left alone": (
        "llama",
        mixed(operator_in(r"layers\.1\.self_attn$", "default"), operator_in("self_attn$", "RetrievalAttention")),
    ),
    "all kinds at once": (
        "llama",
        mixed(
            operator_in(r"layers\.0\.self_attn$", "BoundedAttention", policy="infinipot", budget=24, catalyst="abcdef"),
            operator_in(r"layers\.1\.self_attn$", "RetrievalAttention"),
            operator_in("self_attn$", "ShadowKVAttention", **SHADOWKV),
        ),
    ),
    "whole prompts at once": (
        "gemma3_text",
        mixed(operator_in("self_attn$", "BoundedAttention", policy="snapkv", budget=24, window=8)),
    ),
}
#: ShadowKV's chunks may lie in other slots afterwards, which changes the order of sums.
REORDERED = "factors", "factors of answers", "all kinds at once"
#: Moments that are interrupted in each family: 300 in all of them.
LEAST = -(-300 // len(FAMILIES))


@pytest.fixture(autouse=True)
def one_thread_and_no_collections():
    """Threads would wait for each other longer than they work; the garbage collector comes at moments of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()
    yield
    gc.enable()
    torch.set_num_threads(threads)


def random_tokens(count, seed, batch=2):
    return torch.randint(2, 97, (batch, count), generator=torch.Generator().manual_seed(seed))


#: A prompt of several chunks, an answer longer than Local, a second turn that is chunked too, and its answer.
CONVERSATION = [
    random_tokens(45, 1),
    *random_tokens(11, 2).split(1, dim=1),
    random_tokens(21, 3),
    *random_tokens(3, 4).split(1, dim=1),
]
#: Which of its parts are prompts.
PROMPTS = 0, 12


@torch.no_grad()
def answered(model, cache, part, moments):
    """The logits of a part; its forward passes these moments."""
    return moments.run(lambda: model(part, past_key_values=cache).logits)


def whole(model, cache):
    """The logits of every part of the conversation, and how many moments its forward has."""
    counted = [Moments() for _ in CONVERSATION]
    logits = [answered(model, cache, part, moments) for part, moments in zip(CONVERSATION, counted, strict=True)]
    return [(found, moments.passed) for found, moments in zip(logits, counted, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_interrupted_conversation_goes_on_bit_for_bit(family):
    architecture, rules = FAMILIES[family]
    model = tiny_model(architecture)
    # The first conversation fills what is looked up once per process or model.
    whole(model, injected(model, rules))
    expected = whole(model, new_cache(model))
    chance = random.Random(family)
    # Half of them in the prompts, which are most of a forward's code.
    parts = [chance.choice(PROMPTS) if n % 2 else chance.randrange(len(CONVERSATION)) for n in range(2 * LEAST)]
    cache, interrupted = new_cache(model), 0
    for index, (part, (logits, passed)) in enumerate(zip(CONVERSATION, expected, strict=True)):
        length, places = cache.get_seq_length(), []
        # A later try may have fewer moments than the first, which plans the cache: a moment that never comes is none.
        while len(places) < parts.count(index):
            moments = Moments(chance.randrange(passed))
            try:
                found = answered(model, cache, part, moments)
            except KeyboardInterrupt:
                places.append(moments.where)
                assert cache.get_seq_length() == length, f"part {index}, interrupted at {places}"
            else:
                assert moments.where is None, f"part {index}: nobody heard of the interrupt at {moments.where}"
                break
        else:
            found = answered(model, cache, part, Moments())
        interrupted += len(places)
        error = float((found - logits).abs().max() / logits.abs().max())
        exact = 1e-5 if family in REORDERED else 0.0
        assert error <= exact, f"part {index}, interrupted at {places}, is off by {error:.0e}"
    assert interrupted >= LEAST


# The head of the model comes behind the layers: they have stored everything by then.
@pytest.mark.parametrize("family", FAMILIES)
def test_an_interrupt_in_the_last_moment_of_a_forward_undoes_all_of_it(family):
    architecture, rules = FAMILIES[family]
    model = tiny_model(architecture)
    whole(model, injected(model, rules))
    expected = whole(model, new_cache(model))
    cache = new_cache(model)
    for index in (0, 1):
        length, (logits, passed) = cache.get_seq_length(), expected[index]
        last = Moments(passed - 1)
        with pytest.raises(KeyboardInterrupt):
            answered(model, cache, CONVERSATION[index], last)
        assert cache.get_seq_length() == length, f"part {index}, interrupted at {last.where}"
        error = float((answered(model, cache, CONVERSATION[index], Moments()) - logits).abs().max())
        assert error <= (1e-5 if family in REORDERED else 0.0), f"part {index}, interrupted at {last.where}"
