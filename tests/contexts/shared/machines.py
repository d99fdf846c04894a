"""Contexts that machines store at one address, and what they find there."""

from __future__ import annotations

import functools
import time

from tests.contexts.conversations import said
from tests.support.faulty_files import FaultyFiles
from tests.support.small_families import FAMILIES, random_tokens
from tests.support.small_recipes import injected, new_cache
from tests.support.tiny_models import tiny_model

TOKENS = 200


@functools.cache
def model_of(family):
    architecture, rules = FAMILIES[family]
    model = tiny_model(architecture)
    injected(model, rules)
    return model


def identity_of(model):
    return model.hetero_kv_injection.identity


def document(model, seed=1, tokens=TOKENS):
    """A fork of a cache with a document, and its tokens."""
    computed, ids = computed_document(model, seed, tokens)
    return computed.fork(), list(ids)


@functools.cache
def computed_document(model, seed, tokens):
    computed, ids = new_cache(model), random_tokens(tokens, seed, 1)
    said(model, computed, (ids, ids[:, :0]))
    return computed, ids[0].tolist()


def upload(store, *saved, **named):
    stored = store.save(*saved, **named)
    wait_until(lambda: not store._uploads.pending())
    return stored


def wait_until(is_true):
    began = time.monotonic()
    while not is_true():
        assert time.monotonic() - began < 20
        time.sleep(0.002)


def fetched(store, model, tokens, **named):
    """What is fetched and found of a prompt."""
    store.fetch(identity_of(model), tokens, **named)
    return store.longest(identity_of(model), tokens, **named)


def objects(folder=""):
    return sorted(path for path in FaultyFiles.store if path.startswith(f"/contexts/{folder}"))


def flip(path, place):
    content = bytearray(FaultyFiles.store[path].getvalue())
    content[place] ^= 1
    FaultyFiles().pipe_file(path, bytes(content))
