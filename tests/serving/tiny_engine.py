"""Engines of tiny models, and the tokens that a request gets without one."""

from __future__ import annotations

import hashlib

import torch

from hetero_kv import Engine, HeteroCache, SamplingParams
from hetero_kv.models.loading import LoadedModel
from tests.serving.number_tokenizer import Numbers
from tests.support.ragged_rows import prompt
from tests.support.small_recipes import injected, small_recipe
from tests.support.tiny_models import tiny_model

PROMPTS = [prompt(length, seed).tolist() for seed, length in enumerate((5, 61, 130, 200, 17, 61, 90, 33))]
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


def engine_of(recipe="quest", architecture="llama", changes=None, **settings):
    model = tiny_model(architecture, **(changes or {}))
    injected(model, small_recipe(recipe, max_seq_len=400))
    # Of these rules in this model; the same model under other rules has another injection.
    model.hetero_kv_injection.made_of = recipe, architecture, repr(changes)
    loaded = LoadedModel(model, Numbers(), f"tiny {architecture}", 512)
    # Parts of prompts and guesses must not follow the machine's speed.
    usual = {"max_seq_len": 400, "starts_thread": False, "longest_gap_s": 1e6, "speculation": "off"}
    return Engine(loaded, **{**usual, **settings})


def pause_everywhere(engine):
    """Let a prompt's forward pause wherever it can, for a token of every running request."""
    engine._scheduler._pace.limit_s = lambda decode_s, others=None: 0.0


def forwards_within(engine, monkeypatch):
    """The forwards that begin while a prompt's forward pauses, from now on: "decode", "mixed" or "prefill"."""
    forward, queues, found = engine._scheduler.forward, engine._queues, []
    for name in ("decode", "mixed", "prefill"):
        original = getattr(forward, name)

        def noting(*args, name=name, original=original):
            if queues.computing is not None:
                found.append(name)
            return original(*args)

        monkeypatch.setattr(forward, name, noting)
    return found


def call_before_parts(engine, action):
    """Call `action(part)` before each part of a prompt that the engine computes from now on."""
    forward = engine._scheduler.forward
    prefill, mixed = forward.prefill, forward.mixed

    def called_prefill(cache, part):
        action(part)
        return prefill(cache, part)

    def called_mixed(caches, tokens, prompts):
        for _, part in prompts:
            action(part)
        return mixed(caches, tokens, prompts)

    forward.prefill, forward.mixed = called_prefill, called_mixed


def answered(engine, tokens):
    """A prompt and its answer."""
    return [*tokens, *engine.generate(tokens, GREEDY).result().tokens]


#: What `alone` has returned, by all that it depends on.
_answers: dict[tuple[object, ...], tuple[int, ...]] = {}


def alone(engine, tokens, count=GREEDY.max_new_tokens):
    """The same as `computed_alone`, which computes once what several tests compare with.

    For engines whose model has no hooks and no adapters.
    """
    model = engine._scheduler.forward.model
    made_of = getattr(model.hetero_kv_injection, "made_of", None)
    if made_of is None:
        return computed_alone(engine, tokens, count)
    weights = hashlib.sha256()
    for tensor in model.state_dict().values():
        weights.update(tensor.contiguous().view(torch.uint8).numpy())
    key = made_of, weights.digest(), tuple(tokens)
    if len(_answers.get(key, ())) < count:
        _answers[key] = computed_alone(engine, tokens, count)
    return _answers[key][:count]


def computed_alone(engine, tokens, count=GREEDY.max_new_tokens):
    """The likeliest tokens that follow a prompt, by transformers' generate and a cache of its own."""
    model = engine._scheduler.forward.model
    cache = HeteroCache(model, 400, tokenizer=engine.tokenizer)
    ids = torch.tensor([tokens])
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=count, do_sample=False)
    return tuple(output[0, len(tokens) :].tolist())
