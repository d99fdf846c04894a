"""Calls that an injected model cannot serve are refused by an error that names them."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

from hetero_kv import HeteroCache, HeteroKVError, inject
from tests.calls.reference_model import OTHER, PROMPT, SAMPLED, SIZES, UNTOUCHED, Call, plain, tokens_of
from tests.support.slow_variants import with_slow
from tests.support.tiny_models import tiny_model


def saved_by_torch(thing):
    torch.save(thing, io.BytesIO())


def in_training_with_checkpointing(call):
    call.model.gradient_checkpointing_enable()
    call.model.train()
    try:
        call.model(PROMPT)
    finally:
        call.model.eval()
        call.model.gradient_checkpointing_disable()


def another_attention_implementation(call):
    before = call.model.config._attn_implementation
    walker = call.model.model.config._attn_implementation
    call.model.set_attn_implementation("eager")
    try:
        call.generate()
    finally:
        call.model.config._attn_implementation_internal = before
        call.model.model.config._attn_implementation_internal = walker


def another_depth(call):
    cache = call.model(PROMPT).past_key_values
    call.model.model.config.num_hidden_layers = 1
    try:
        call.model(OTHER, past_key_values=cache)
    finally:
        call.model.model.config.num_hidden_layers = 2


def ran(call):
    return call.model(PROMPT).past_key_values


#: A way -> what the error that it gets names.
REFUSED: dict[str, tuple[Callable[[Call], Any], str]] = {
    "output_attentions": (
        lambda call: call.generate(output_attentions=True, return_dict_in_generate=True),
        "output_attentions",
    ),
    "output_hidden_states": (
        lambda call: call.generate(output_hidden_states=True, return_dict_in_generate=True),
        "output_hidden_states",
    ),
    "use_cache=False beside a cache": (
        lambda call: call.generate(use_cache=False, past_key_values=HeteroCache(call.model)),
        "use_cache=False .* together with a HeteroCache",
    ),
    "a forward of use_cache=False beside a cache": (
        lambda call: call.model(PROMPT, use_cache=False, past_key_values=HeteroCache(call.model)),
        "use_cache=False was passed together with a HeteroCache",
    ),
    **{
        f"cache_implementation={name!r}": (
            lambda call, name=name: call.generate(cache_implementation=name),
            f"cache_implementation='{name}' selects one of transformers' own caches",
        )
        for name in ("static", "offloaded_static", "offloaded", "quantized", "paged")
    },
    "generation_config.cache_implementation": (
        lambda call: call.generate(generation_config=GenerationConfig(cache_implementation="static", max_new_tokens=3)),
        "cache_implementation='static'",
    ),
    "a DynamicCache": (
        lambda call: call.generate(past_key_values=DynamicCache(config=UNTOUCHED.config)),
        "past_key_values, a DynamicCache, but without a HeteroCache",
    ),
    "a StaticCache": (
        lambda call: call.generate(past_key_values=StaticCache(config=UNTOUCHED.config, max_cache_len=99)),
        "past_key_values, a StaticCache",
    ),
    "a forward over a filled DynamicCache": (
        lambda call: call.model(OTHER, past_key_values=UNTOUCHED(PROMPT).past_key_values),
        "a DynamicCache of 45 tokens",
    ),
    "past_key_values as tuples": (
        lambda call: call.model(PROMPT, past_key_values=((PROMPT, PROMPT),)),
        "past_key_values, a tuple",
    ),
    "generate_batch": (lambda call: call.model.generate_batch([[5, 6, 7]]), "generate_batch .continuous batching"),
    "more rows than the cache has": (
        lambda call: call.generate(past_key_values=ran(call), num_return_sequences=2, **SAMPLED),
        "the cache holds 1 sequences, but the call has 2",
    ),
    "another model's cache": (
        lambda call: call.generate(past_key_values=HeteroCache(call.assistant)),
        r"made for LlamaForCausalLM \(1 layers.*and this is LlamaForCausalLM \(2 layers",
    ),
    "an untouched model over a HeteroCache": (
        lambda call: UNTOUCHED.generate(PROMPT, past_key_values=HeteroCache(call.model), max_new_tokens=2),
        "passed to a model without its rules",
    ),
    "a cache that is pickled": (lambda call: pickle.dumps(ran(call)), r"cache\.save\(path\)"),
    "torch.save of a cache": (lambda call: saved_by_torch(ran(call)), r"cache\.save\(path\)"),
    "an output that is pickled with its cache": (lambda call: pickle.dumps(call.model(PROMPT)), r"cache\.save\(path\)"),
    "a model that is pickled": (lambda call: pickle.dumps(call.model), "cannot be pickled or copied"),
    "torch.save of a model": (lambda call: saved_by_torch(call.model), r"call hetero_kv\.eject\(model\) first"),
    "torch.save of the module behind the head": (lambda call: saved_by_torch(call.model.model), "cannot be pickled"),
    "a model that is copied": (lambda call: copy.deepcopy(call.model), "cannot be pickled or copied"),
    "training with gradient checkpointing": (in_training_with_checkpointing, "training with gradient checkpointing"),
    "set_attn_implementation after inject": (another_attention_implementation, r"'eager' after inject \(set_attn"),
    "another number of layers": (another_depth, "num_hidden_layers of LlamaModel is 1, .* passed through 2 layers"),
    "another cache beside it": (
        lambda call: call.model(PROMPT, past_key_values=DynamicCache(), cache=HeteroCache(call.model)),
        "past_key_values, a DynamicCache",
    ),
    "another cache beside it, by the newer name": (
        lambda call: call.model(PROMPT, past_key_values=HeteroCache(call.model), cache=DynamicCache()),
        "cache, a DynamicCache",
    ),
    "repeated rows": (lambda call: ran(call).batch_repeat_interleave(2), "cannot repeat its sequences"),
}  # fmt: skip


# Refused before a cache is looked at, or made by the way itself: most without one are slow tests.
@pytest.mark.parametrize(
    ("call", "name"),
    with_slow(
        list(itertools.product(["a cache", "no cache"], REFUSED)),
        slow=[("no cache", name) for name in [*REFUSED][::2] + [*REFUSED][1::4]],
    ),
    indirect=["call"],
)
@torch.no_grad()
def test_a_way_is_refused_by_name(injected, name):
    way, words = REFUSED[name]
    with pytest.raises(HeteroKVError, match=words):
        way(injected)
    # Nothing is left of it.
    assert tokens_of(injected.generate()) == tokens_of(plain().generate())


@torch.no_grad()
def test_layers_that_wait_for_each_other_have_no_early_exit(one_thread):
    model = tiny_model("llama", 1, **SIZES)
    inject(model, "infinipot", command_line={"budget": 300})
    call = Call(model, None, lambda: None)
    with pytest.raises(HeteroKVError, match=r"after 1 of 2 layers \(assistant_early_exit\), .* of kind BoundedLayer"):
        call.generate(assistant_early_exit=1)
    assert tokens_of(call.generate()) == tokens_of(plain().generate())
