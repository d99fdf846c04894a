"""Files of saved contexts: every storage type, rows of several lengths, and what is refused by name."""

from __future__ import annotations

import os
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import DynamicCache

from hetero_kv import HeteroCache, HeteroKVError, inject
from hetero_kv.contexts import identity, tensor_file
from hetero_kv.engine.errors import ContextError, DamagedContextError
from hetero_kv.families.retrieval import layer as retrieval_layer
from hetero_kv.rules.rule_file import parse_rules
from tests.contexts.conversations import goes_on, said
from tests.support.slow_variants import with_slow
from tests.support.small_families import random_tokens
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

RULES = [
    {"match": {"name": r"self_attn$"}, "replace": {"class": "RetrievalAttention"}},
    {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}},
]
SMALL = {
    "block_size": 4, "local_windows_len": 8, "sink_tokens": 4, "chunk_size": 16, "max_seq_len": 256, "kv_type": "FP32",
    "top_k_blocks": 3, "threads_num": 1, "representative_type": "MEAN",
}  # fmt: skip
ESTIMATES = {
    "representative_type": "MEANSTD",
    "representative_num": 2,
    "group_reduce": "softmax",
    "residual_attention": "estimate",
}
BLOCKS_OF_32 = {
    "block_size": 32,
    "local_windows_len": 8,
    "sink_tokens": 32,
    "chunk_size": 64,
    "top_k_blocks": 500,
}
#: In blocks of a size whose kernels other tests compile for half precision.
HALF = {"kv_type": "FP16", "block_size": 8, "sink_tokens": 8}
#: Settings that decide what is in a pool, and the dimension of heads that they need.
STORED = {
    "half precision": ({**HALF, "representative_type": "DYNAMIC"}, 16),
    "groups, values' means": ({**ESTIMATES, "group_blocks": 3, "group_factor": 1, "top_k_blocks": 4}, 16),
    "coarse copies of keys": (
        {
            **ESTIMATES,
            **BLOCKS_OF_32,
            "block_size": 16,
            "sink_tokens": 16,
            "kv_type": "FP16",
            "rerank": "all",
            "target_mass": 0.9,
            "top_k_blocks": 1,
        },
        16,
    ),
    "blocks of 16, keys in 4, values in 8 bits": (
        {**BLOCKS_OF_32, "block_size": 16, "sink_tokens": 16, "key_type": "Q4_0", "value_type": "Q8_0"},
        32,
    ),
    "keys in 8, values in 4 bits": ({**BLOCKS_OF_32, "key_type": "Q8_0", "value_type": "Q4_0"}, 32),
}


def made(seed=0, shape=None, **settings):
    model = tiny_model("llama", seed=seed, **(shape or {}))
    inject(model, parse_rules({"rules": RULES, "long_context": {**SMALL, **settings}}))
    return model


def saved(model, path, prompt=50, answer=5, batch=1):
    """A conversation's cache, saved at `path`."""
    cache = HeteroCache(model)
    tokens = said(model, cache, (random_tokens(prompt, 1, batch), random_tokens(answer, 2, batch)))
    cache.save(path, tokens)
    return cache


@pytest.mark.parametrize(
    "stored", with_slow(list(STORED), slow=("keys in 8, values in 4 bits", "blocks of 16, keys in 4, values in 8 bits"))
)
def test_everything_that_a_pool_has_comes_back(stored, tmp_path):
    given, dim = STORED[stored]
    model = made(shape={"num_hidden_layers": 2, "head_dim": dim}, **given)
    cache = saved(model, tmp_path / "c", prompt=100)
    loaded = HeteroCache.load(tmp_path / "c", model)
    assert torch.equal(goes_on(model, loaded, cache.lengths, 3), goes_on(model, cache, cache.lengths, 3))


def test_rows_of_several_lengths_come_back_as_they_were(tmp_path):
    model, ids = made(), random_tokens(30, 1, 3)
    mask = torch.ones_like(ids)
    mask[1, :7] = mask[2, :20] = 0
    cache = HeteroCache(model)
    model(ids, attention_mask=mask, past_key_values=cache)
    rows = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
    cache.save(tmp_path / "c", rows)
    loaded = HeteroCache.load(tmp_path / "c", model)
    assert loaded.lengths == [30, 23, 10]
    for token in random_tokens(12, 2, 3).split(1, dim=1):
        logits = [
            model(token, attention_mask=torch.cat([each.attention_mask, torch.ones(3, 1, dtype=torch.int64)], dim=1),
                  past_key_values=each).logits
            for each in (cache, loaded)
        ]  # fmt: skip
        assert torch.equal(*logits)


def test_a_window_where_the_model_computes_comes_back_as_it_was_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(retrieval_layer, "_needs_window", lambda device: True)
    model = made(**HALF)
    cache = saved(model, tmp_path / "c")
    loaded = HeteroCache.load(tmp_path / "c", model)
    assert torch.equal(goes_on(model, loaded, cache.lengths, 3), goes_on(model, cache, cache.lengths, 3))


def test_blocks_that_rows_share_are_written_once_and_shared_again(tmp_path):
    model = made()
    cache = saved(model, tmp_path / "one")
    cache.select([0, 0, 0])
    cache.save(tmp_path / "three")
    assert (tmp_path / "three").stat().st_size < 1.5 * (tmp_path / "one").stat().st_size
    loaded = HeteroCache.load(tmp_path / "three", model, forks=1)
    assert loaded.dram_bytes == HeteroCache.load(tmp_path / "one", model).dram_bytes
    assert torch.equal(goes_on(model, loaded, loaded.lengths, 3), goes_on(model, cache, cache.lengths, 3))


def test_settings_that_only_choose_blocks_may_differ(tmp_path):
    saved(made(), tmp_path / "c")
    assert HeteroCache.load(tmp_path / "c", made(top_k_blocks=5)).lengths == [55]


def test_a_file_is_plain_safetensors_without_old_numbers_behind_the_tokens(tmp_path):
    model = made()
    cache = HeteroCache(model)
    said(model, cache, (random_tokens(60, 1, 1), random_tokens(2, 2, 1)))
    cache.crop(-21)
    cache.save(tmp_path / "c")
    tensors = load_file(tmp_path / "c")
    keys = tensors["blocks/0/0/keys"]
    assert keys.shape == (11, 2, 4, 16)
    assert keys[:10].abs().amin(dim=(1, 3)).min() > 0
    assert keys[10, :, 0].abs().max() > 0
    assert not keys[10, :, 1:].any()
    assert not tensors["blocks/0/0/representatives"][10:].any()


def refused(path, model, *words, kind=ContextError):
    with pytest.raises(kind) as error:
        HeteroCache.load(path, model)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_another_model_is_refused_with_what_differs(tmp_path):
    saved(made(), tmp_path / "c")
    refused(tmp_path / "c", made(seed=1), "other weights", "load the file")
    refused(tmp_path / "c", made(shape={"num_hidden_layers": 2}), "3 layers of 64", "2 layers of 64")
    refused(tmp_path / "c", made(shape={"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}), "config")
    refused(tmp_path / "c", made().to(torch.bfloat16), "dtype, float32", "bfloat16")


def test_other_settings_are_refused_with_what_they_were(tmp_path):
    saved(made(), tmp_path / "c")
    refused(tmp_path / "c", made(block_size=8), "block_size 4 (here 8)", "3 layers, as in layer 0")
    refused(tmp_path / "c", made(kv_type="FP16"), "kv_type 'FP32' (here 'FP16')")
    refused(tmp_path / "c", made(top_k_blocks="all"), "is_scored True (here False)")


def test_another_format_is_refused_with_the_version_that_reads_it(tmp_path, monkeypatch):
    model = made()
    with monkeypatch.context() as patch:
        patch.setattr("hetero_kv.contexts.writing.FORMAT", identity.FORMAT + 1)
        patch.setattr("hetero_kv.contexts.writing.version", lambda: "99.1")
        saved(model, tmp_path / "c")
    refused(tmp_path / "c", model, "'99.1'", f"reads format {identity.FORMAT}")


def test_a_too_small_capacity_is_refused_with_one_that_fits(tmp_path):
    model = made()
    saved(model, tmp_path / "c")
    with pytest.raises(HeteroKVError, match="max_seq_len to at least 55"):
        HeteroCache.load(tmp_path / "c", model, max_seq_len=40)


def test_files_that_are_no_contexts_are_refused(tmp_path):
    model = made()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("no context " * 100)
    refused(tmp_path / "absent", model, "cannot be read")
    refused(tmp_path, model, "is not a regular file")
    refused(tmp_path / "pipe", model, "is not a regular file", kind=DamagedContextError)
    refused(tmp_path / "empty", model, "is not a safetensors file", kind=DamagedContextError)
    refused(tmp_path / "text", model, "is not a safetensors file", kind=DamagedContextError)


def test_a_failed_save_says_so_and_leaves_the_file(tmp_path, monkeypatch):
    model = made()
    cache = saved(model, tmp_path / "c")
    before = (tmp_path / "c").read_bytes()
    with pytest.raises(ContextError, match="no tokens"):
        HeteroCache(model).save(tmp_path / "c")
    with pytest.raises(ContextError, match=re.escape("rows of [3], and the cache has rows of [55]")):
        cache.save(tmp_path / "c", [[1, 2, 3]])
    with pytest.raises(ContextError, match="cannot be written"):
        cache.save(tmp_path / "absent" / "c")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ContextError, match="No space left"):
        cache.save(tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_a_layer_that_does_not_say_how_it_is_saved_is_named(tmp_path, monkeypatch):
    model = made()
    cache = saved(model, tmp_path / "c")
    cache.groups[0].layers[1] = DynamicCache().layer_class_to_replicate()
    monkeypatch.setattr("hetero_kv.engine.hf_cache_layers._GROWING", ())
    with pytest.raises(ContextError, match="layer 1 is transformers' own DynamicLayer, which cannot be saved"):
        cache.save(tmp_path / "c")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model, the bytes of a saved context of it, and what follows it."""
    model, path = made(), tmp_path_factory.mktemp("whole") / "c"
    cache = saved(model, path)
    return model, path, path.read_bytes(), goes_on(model, cache, cache.lengths, 3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_flipped_bit_or_a_lost_end_is_never_taken(whole, data):
    model, path, content, _ = whole
    damaged = bytearray(content)
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        at = data.draw(st.integers(0, len(content) - 1))
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(damaged)
    try:
        loaded = HeteroCache.load(path, model, repair=False)
    except DamagedContextError:
        return
    # Padding holds nothing.
    assert torch.equal(loaded_contents(loaded), loaded_contents(load_from(content, path, model)))


def load_from(content, path, model):
    path.write_bytes(content)
    return HeteroCache.load(path, model)


def loaded_contents(cache):
    """The keys and values of all layers, one behind the other."""
    parts = []
    for layer in cache.layers:
        keys = torch.empty(1, 2, cache.get_seq_length(), 16)
        values = torch.empty_like(keys)
        layer.load(keys, values)
        parts += [keys.flatten(), values.flatten()]
    return torch.cat(parts)


def with_flipped(content, path, name, row=0):
    """The file with another bit in a row of a tensor."""
    path.write_bytes(content)
    file = tensor_file.TensorFile(path)
    damaged = bytearray(content)
    damaged[file.offset(name, row) + 3] ^= 16
    file.close()
    path.write_bytes(damaged)


def test_a_damaged_block_is_named(whole):
    model, path, content, _ = whole
    with_flipped(content, path, "blocks/0/1/values", 7)
    with pytest.raises(DamagedContextError, match="block 7 of blocks/0/1/values is damaged, of tokens 28 to 31"):
        HeteroCache.load(path, model, repair=False)


DAMAGED = [("blocks/0/1/values", 7, 22), ("cohorts/0/layers/0/keys", 0, 50)]


@pytest.mark.parametrize(("name", "row", "computed"), DAMAGED)
def test_damaged_blocks_are_recomputed_from_their_tokens(tmp_path, caplog, name, row, computed):
    # A layer with a sliding window cannot return to the block.
    model = made() if row else tiny_model("gemma3_text")
    if not row:
        inject(model, parse_rules({"rules": RULES, "long_context": SMALL}))
    saved(model, tmp_path / "c", answer=0)
    whole = load_from((tmp_path / "c").read_bytes(), tmp_path / "w", model)
    with_flipped((tmp_path / "c").read_bytes(), tmp_path / "c", name, row)
    loaded = HeteroCache.load(tmp_path / "c", model)
    assert f"the {computed} tokens from there on are recomputed" in caplog.text
    assert name in caplog.text
    expected = goes_on(model, whole, whole.lengths, 3)
    torch.testing.assert_close(goes_on(model, loaded, whole.lengths, 3), expected, rtol=1e-4, atol=1e-4)


def test_without_tokens_damage_is_an_error(tmp_path):
    model = made()
    saved(model, tmp_path / "t").save(tmp_path / "c")
    with_flipped((tmp_path / "c").read_bytes(), tmp_path / "c", "blocks/0/1/values", 7)
    refused(tmp_path / "c", model, "block 7", kind=DamagedContextError)
