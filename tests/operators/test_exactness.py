"""With a budget that covers everything an injected model computes what the untouched transformers model computes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.families.retrieval import layer as retrieval_layer
from hetero_kv.rules.rule_file import parse_rules
from tests.support.devices import model_on, on_both
from tests.support.slow_variants import with_slow
from tests.support.tiny_models import ALIKE, ARCHITECTURES, tiny_model

DECODED = 12
#: Groups and dimensions that no other architecture has, whose kernels are compiled for blocks of one size.
ALONE = ("gpt_neox", "deepseek_v3")


def rules(**long_context):
    """The packaged rules with a covering budget and these settings."""
    return parse_rules({"extends": "ktransformers.yaml", "long_context": {"top_k_blocks": "all", **long_context}})


def run(model, cache, prompt, decoded, pieces=None):
    """Logits of the prompt, of each decoded token, all in one [batch, tokens, vocab] tensor.

    pieces: tokens of the prompt that go through the model at a time; None: all.
    """
    with torch.no_grad():
        steps = [model(piece, past_key_values=cache).logits for piece in prompt.split(pieces or prompt.shape[1], dim=1)]
        steps += [model(token[:, None], past_key_values=cache).logits for token in decoded.T]
    return torch.cat(steps, dim=1)


def relative_error(actual, expected):
    return float((actual - expected).abs().max() / expected.abs().max())


def random_tokens(batch, count, seed):
    return torch.randint(2, 97, (batch, count), generator=torch.Generator().manual_seed(seed))


_models = {}


def model_of(architecture):
    if architecture not in _models:
        _models[architecture] = tiny_model(architecture)
    return _models[architecture]


any_of = given(
    chunk_size=st.sampled_from([1, 5, 16, 17, 64, 4096]),
    block_size=st.sampled_from([4, 8]),
    prompt=st.sampled_from([2, 15, 16, 17, 32, 61]),
    local=st.sampled_from([1, 8, 30]),
    initial=st.sampled_from([0, 4, 16]),
    batch=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
DISTINCT = [name for name in ARCHITECTURES if name not in ALIKE]


# GPT-NeoX has layers in parallel and a part of each head rotated, as Phi, and of its shape a kernel of its own.
@pytest.mark.parametrize("architecture", with_slow(DISTINCT, slow=["gpt_neox"]))
@settings(max_examples=1, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@any_of
def test_prefill_and_decode_equal_the_untouched_model(architecture, **drawn):
    assert_same_as_the_untouched_model(architecture, **drawn)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", DISTINCT)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@any_of
def test_prefill_and_decode_of_more_sizes_equal_the_untouched_model(architecture, **drawn):
    assert_same_as_the_untouched_model(architecture, **drawn)


# Several projections in one matrix, and layers in parallel. Those of Qwen 2 and 3 are in many tests of others.
@pytest.mark.parametrize("architecture", with_slow(ALIKE, slow={*ALIKE} - {"phi3", "cohere"}))
@settings(max_examples=1, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@any_of
def test_prefill_and_decode_of_models_like_others_equal_the_untouched_model(architecture, **drawn):
    assert_same_as_the_untouched_model(architecture, **drawn)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ALIKE)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@any_of
def test_prefill_and_decode_of_more_sizes_of_models_like_others_equal_the_untouched_model(architecture, **drawn):
    assert_same_as_the_untouched_model(architecture, **drawn)


def assert_same_as_the_untouched_model(architecture, chunk_size, block_size, prompt, local, initial, batch, seed):
    model = model_of(architecture)
    if architecture in ALONE:
        block_size = 4
    tokens, decoded = random_tokens(batch, prompt, seed), random_tokens(batch, DECODED, seed + 1)
    # In the same pieces: the untouched model alone, with a prompt at once and by tokens, differs by 2e-5 (gpt_oss).
    expected = run(model, DynamicCache(config=model.config), tokens, decoded, pieces=chunk_size)
    inject(
        model,
        rules(
            chunk_size=chunk_size,
            block_size=block_size,
            local_windows_len=local,
            sink_tokens=initial,
            kv_type="FP32",
            max_seq_len=128,
        ),
    )
    try:
        cache = HeteroCache(model)
        actual = run(model, cache, tokens, decoded)
    finally:
        eject(model)
    assert relative_error(actual, expected) < 1e-5
    assert cache.get_seq_length() == prompt + DECODED


# What others compute is compared above, and sinks on `cuda` in test_decode_on_cuda.py.
@pytest.mark.parametrize(
    ("architecture", "device"),
    on_both(ARCHITECTURES, slow={*ARCHITECTURES} - {"llama", "gemma2", "gpt_oss"}),
    indirect=["device"],
)
def test_generated_tokens_equal_the_untouched_models_and_a_second_turn_goes_on(architecture, device):
    model = model_of(architecture)
    first, second = random_tokens(1, 37, seed=5), random_tokens(1, 11, seed=6)
    greedy = {"max_new_tokens": DECODED, "do_sample": False}

    def two_turns(model, cache):
        start, turn = first.to(model.device), second.to(model.device)
        answer = model.generate(start, attention_mask=torch.ones_like(start), past_key_values=cache, **greedy)
        again = torch.cat([answer, turn], dim=1)
        return model.generate(again, attention_mask=torch.ones_like(again), past_key_values=cache, **greedy)

    expected = two_turns(model, DynamicCache(config=model.config))
    ours = model_on(device, model)
    inject(ours, rules(chunk_size=16, block_size=4, local_windows_len=16, kv_type="FP32", max_seq_len=128))
    try:
        actual = two_turns(ours, HeteroCache(ours))
    finally:
        eject(ours)
    assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_fp16_storage_is_exact_to_half_precision(architecture):
    model = model_of(architecture)
    tokens, decoded = random_tokens(1, 50, seed=1), random_tokens(1, DECODED, seed=2)
    expected = run(model, DynamicCache(config=model.config), tokens, decoded)
    inject(model, rules(chunk_size=16, block_size=16, local_windows_len=16, kv_type="FP16", max_seq_len=128))
    try:
        actual = run(model, HeteroCache(model), tokens, decoded)
    finally:
        eject(model)
    # Prefill attends to unrounded keys and values; only decoding reads the store.
    assert relative_error(actual[:, :50], expected[:, :50]) < 1e-5
    assert relative_error(actual[:, 50:], expected[:, 50:]) < 5e-3


@pytest.mark.parametrize(
    "architecture", with_slow(["llama", "gemma2", "gpt_oss", "deepseek_v3"], slow=["llama", "gemma2", "deepseek_v3"])
)
def test_a_window_on_the_compute_device_gives_the_same(architecture, monkeypatch):
    monkeypatch.setattr(retrieval_layer, "_needs_window", lambda device: True)
    model = model_of(architecture)
    tokens, decoded = random_tokens(2, 45, seed=3), random_tokens(2, 60, seed=4)
    expected = run(model, DynamicCache(config=model.config), tokens, decoded)
    inject(model, rules(chunk_size=16, block_size=4, local_windows_len=10, sink_tokens=6, kv_type="FP32"))
    try:
        cache = HeteroCache(model, max_seq_len=128)
        actual = run(model, cache, tokens, decoded)
    finally:
        eject(model)
    assert any(getattr(layer, "window", None) is not None for layer in cache.layers)
    assert relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_layers_left_as_they_are_run_in_chunks_with_their_own_cache(architecture):
    model = model_of(architecture)
    tokens, more, decoded = (random_tokens(1, count, seed=7) for count in (41, 30, DECODED))
    with torch.no_grad():
        expected = model(torch.cat([tokens, more, decoded], dim=1)).logits
    left = {"match": {"name": r"layers\.1\.self_attn$"}, "replace": {"class": "default"}}
    inject(
        model,
        parse_rules(
            {
                "extends": "ktransformers.yaml",
                "rules": [left],
                "long_context": {"chunk_size": 8, "block_size": 4, "kv_type": "FP32", "max_seq_len": 128},
            }
        ),
    )
    try:
        cache = HeteroCache(model)
        with torch.no_grad():
            first = model(tokens, past_key_values=cache).logits
        actual = torch.cat([first, run(model, cache, more, decoded)], dim=1)
    finally:
        eject(model)
    assert relative_error(actual, expected) < 1e-5


def test_a_prompt_is_stored_once_per_layer_however_many_chunks_it_has(monkeypatch):
    stored = []
    store = retrieval_layer.RetrievalLayer.store

    def counted(self, step, keys, values, buffer=None):
        stored.append(keys.shape[2])
        store(self, step, keys, values, buffer)

    monkeypatch.setattr(retrieval_layer.RetrievalLayer, "store", counted)
    model = model_of("llama")
    inject(model, rules(chunk_size=8, block_size=4, max_seq_len=128))
    try:
        with torch.no_grad():
            model(random_tokens(1, 50, seed=0), past_key_values=HeteroCache(model))
    finally:
        eject(model)
    assert stored == [50, 50, 50]


def test_the_callers_embeddings_are_not_written_to():
    model = model_of("llama")
    inject(model, rules(chunk_size=8, block_size=4, max_seq_len=128))
    try:
        embeddings = model.get_input_embeddings()(random_tokens(1, 50, seed=0))
        before = embeddings.clone()
        with torch.no_grad():
            model(inputs_embeds=embeddings, past_key_values=HeteroCache(model))
    finally:
        eject(model)
    assert torch.equal(embeddings, before)


def test_room_is_counted_by_the_embeddings_and_not_by_the_mask():
    model = model_of("llama")
    inject(model, rules(chunk_size=8, block_size=4, max_seq_len=64))
    try:
        cache = HeteroCache(model)
        embeddings = model.get_input_embeddings()(random_tokens(1, 60, seed=0))
        with torch.no_grad():
            model(inputs_embeds=embeddings[:, :50], past_key_values=cache)
            mask = torch.ones(1, 60, dtype=torch.int64)
            model(attention_mask=mask, inputs_embeds=embeddings[:, 50:], past_key_values=cache)
    finally:
        eject(model)
    assert cache.get_seq_length() == 60


# Beams take the window on `cuda` with them: test_decode_on_cuda.py.
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.slow])], indirect=True
)
def test_beam_search_shares_blocks_and_equals_the_untouched_model(device):
    model = model_on(device, model_of("llama"))
    tokens = random_tokens(1, 30, seed=9).to(device)
    beam = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    expected = model.generate(tokens, past_key_values=DynamicCache(config=model.config), **beam)
    inject(model, rules(chunk_size=16, block_size=4, local_windows_len=8, kv_type="FP32", max_seq_len=128))
    try:
        actual = model.generate(tokens, past_key_values=HeteroCache(model), **beam)
    finally:
        eject(model)
    assert actual.tolist() == expected.tolist()
