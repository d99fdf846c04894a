"""A saved context is copied into free blocks of a store that caches share."""

from __future__ import annotations

import random

import pytest
import torch

from hetero_kv import HeteroCache
from hetero_kv.engine.errors import CacheFullError, DamagedContextError
from tests.support.ragged_rows import prompt
from tests.support.slow_variants import with_few
from tests.support.small_recipes import injected, small_recipe
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=with_few(["adaptive", "retroinfer", "shadowkv", "dense"], 2))
def model(request):
    model = tiny_model("llama")
    injected(model, small_recipe(request.param))
    return model


def filled(model, tokens, **settings):
    cache = HeteroCache(model, **settings)
    with torch.no_grad():
        model(tokens[None], past_key_values=cache)
    return cache


def following(model, cache, tokens):
    with torch.no_grad():
        parts = tokens[None], *tokens[:9, None, None]
        return torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)


def free_blocks(store):
    return [allocator.free_blocks for allocator in store.allocators.values()]


def test_it_continues_as_the_saved_one_in_blocks_that_lie_apart(model, tmp_path):
    store = model.hetero_kv_injection.common_store(400, tokens=800)
    path = tmp_path / "saved.safetensors"
    saved = filled(model, prompt(190, 1))
    saved.save(path)
    # Of many sequences some go, so that free blocks lie between others.
    others = [filled(model, prompt(70, seed), store=store) for seed in range(9)]
    random.Random(3).shuffle(others)
    stay, others[4:] = others[:4], []
    before = [following(model, other.fork(), prompt(5, 0)) for other in stay]
    loaded = HeteroCache.load(path, model, store=store)
    path.unlink()
    assert not loaded.mapped_files
    for table in loaded.sequences[0].tables.values():
        assert (table.ids[1:] - table.ids[:-1] != 1).any()
    assert torch.equal(following(model, loaded, prompt(70, 2)), following(model, saved, prompt(70, 2)))
    for other, expected in zip(stay, before, strict=True):
        assert torch.equal(following(model, other, prompt(5, 0)), expected)


def test_without_free_blocks_it_is_refused_and_takes_none(model, tmp_path):
    store = model.hetero_kv_injection.common_store(400, tokens=400)
    path = tmp_path / "saved.safetensors"
    filled(model, prompt(190, 1)).save(path)
    other = filled(model, prompt(300, 2), store=store)
    before = free_blocks(store)
    with pytest.raises(CacheFullError, match="the store of this model's caches is full: 190 more tokens do not fit"):
        HeteroCache.load(path, model, store=store)
    assert free_blocks(store) == before
    other.reset()
    assert HeteroCache.load(path, model, store=store).get_seq_length() == 190


def test_after_damage_no_block_is_taken(model, tmp_path):
    store = model.hetero_kv_injection.common_store(400, tokens=400)
    path = tmp_path / "saved.safetensors"
    filled(model, prompt(190, 1)).save(path)
    other = filled(model, prompt(50, 2), store=store)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4096] = bytes(byte ^ 1 for byte in content[middle : middle + 4096])
    path.write_bytes(content)
    before = free_blocks(store)
    with pytest.raises(DamagedContextError):
        HeteroCache.load(path, model, store=store)
    assert free_blocks(store) == before
    assert following(model, other, prompt(5, 0)).isfinite().all()
