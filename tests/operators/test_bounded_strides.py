"""Prompts that pass in strides, and several methods in one model."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import eject
from hetero_kv.adapter.bridge import UnsupportedModelError
from hetero_kv.errors import HeteroKVError
from tests.operators.bounded_models import bounded, bounded_in, conversation, logits, relative_error, tokens
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize("keep", [0, 1, 20, torch.tensor([3, 40, 59]), torch.tensor([-1])])
def test_logits_to_keep_are_the_same_whether_the_prompt_is_cut_or_not(llama, keep):
    with torch.no_grad():
        expected = llama(tokens(60), logits_to_keep=keep).logits
        cache = bounded(llama, policy="streaming_llm", budget=100, stride=13)
        actual = llama(tokens(60), past_key_values=cache, logits_to_keep=keep)
    assert relative_error(actual.logits, expected) < 1e-5
    assert actual.past_key_values is cache


def test_indices_of_logits_that_do_not_rise_are_refused(llama):
    cache = bounded(llama, policy="streaming_llm", budget=100, stride=13)
    with pytest.raises(UnsupportedModelError, match=r"logits_to_keep is \[59, 3\]"), torch.no_grad():
        llama(tokens(60), past_key_values=cache, logits_to_keep=torch.tensor([59, 3]))


def test_the_decoder_without_its_head_is_cut_too(llama):
    with torch.no_grad():
        expected = llama.model(tokens(60)).last_hidden_state
        cache = bounded(llama, policy="tova", budget=100, stride=13)
        actual = llama.model(tokens(60), past_key_values=cache).last_hidden_state
    assert relative_error(actual, expected) < 1e-5


def test_embeddings_and_positions_are_cut_too(llama):
    with torch.no_grad():
        expected = llama(tokens(60)).logits
        cache = bounded(llama, policy="tova", budget=100, stride=13)
        embeddings = llama.model.embed_tokens(tokens(60))
        positions = torch.arange(60)[None]
        actual = llama(
            inputs_embeds=embeddings,
            position_ids=positions,
            attention_mask=torch.ones(1, 60, dtype=torch.long),
            past_key_values=cache,
        ).logits
    assert relative_error(actual, expected) < 1e-5


def test_labels_are_refused_where_the_prompt_is_cut(llama):
    cache = bounded(llama, policy="tova", budget=20, stride=13)
    with pytest.raises(UnsupportedModelError, match="labels"):
        llama(tokens(60), labels=tokens(60), past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_progress_is_told_in_tokens_of_the_whole_prompt(llama):
    told = []
    cache = bounded(llama, policy="tova", budget=20, stride=20)
    cache.on_progress = lambda *progress: told.append(progress)
    logits(llama, cache, tokens(50))
    done = [tokens_done for _, _, tokens_done, _ in told]
    assert done == sorted(done)
    assert {(layers, total) for _, layers, _, total in told} == {(1, 50)}
    assert told[-1] == (1, 1, 50, 50)
    assert all(layers_done == 0 for layers_done, _, tokens_done, _ in told if tokens_done < 50)


@pytest.mark.parametrize("policy", ["streaming_llm", pytest.param("snapkv", marks=pytest.mark.slow)])
def test_retrieval_in_other_layers_goes_with_both_kinds_of_policy(llama, policy):
    retrieval = {
        "match": {"name": r"layers\.[12]\.self_attn$"},
        "replace": {"class": "RetrievalAttention", "kwargs": {"top_k_blocks": "all", "kv_type": "FP32"}},
    }
    parts = conversation()
    with torch.no_grad():
        expected = llama(torch.cat(parts, dim=1)).logits
    cache = bounded(llama, retrieval, policy=policy, budget=200, max_seq_len=100)
    assert relative_error(logits(llama, cache, *parts), expected) < 1e-5
    assert cache.statistics["cached_entries"] == [95, None, None]
    assert (cache.max_seq_len, cache.room) == (100, 5)
    eject(llama)
    cache = bounded(llama, retrieval, policy=policy, budget=20, max_seq_len=100)
    logits(llama, cache, *parts)
    assert cache.statistics["cached_entries"] == [20, None, None]
    assert [layer.get_seq_length() for layer in cache.layers] == [95, 95, 95]
    with pytest.raises(HeteroKVError, match="the cache is full"):
        logits(llama, cache, tokens(6))
    assert [layer.get_seq_length() for layer in cache.layers] == [95, 95, 95]


def test_untouched_layers_go_with_strides(llama):
    parts = conversation()
    with torch.no_grad():
        expected = llama(torch.cat(parts, dim=1)).logits
    untouched = {"match": {"name": r"layers\.1\.self_attn$"}, "replace": {"class": "default"}}
    cache = bounded(llama, untouched, policy="tova", budget=200)
    assert relative_error(logits(llama, cache, *parts), expected) < 1e-5


def test_strided_policies_of_different_strides_go_together(llama):
    cache = bounded(
        llama,
        bounded_in(r"layers\.0\.self_attn$", policy="tova", budget=30, stride=7),
        policy="streaming_llm",
        budget=24,
    )
    logits(llama, cache, *conversation())
    assert cache.statistics["cached_entries"] == [30, 24, 24]


def test_whole_prompts_and_strides_in_one_model_are_refused_with_what_goes(llama):
    snapkv = bounded_in(r"layers\.0\.self_attn$", policy="snapkv", budget=30, recent_tokens=8)
    with pytest.raises(HeteroKVError, match=r"layers.0.self_attn has policy snapkv.*tova.*RetrievalAttention"):
        bounded(llama, snapkv, policy="tova", budget=24)
    assert getattr(llama, "hetero_kv_injection", None) is None
    assert type(llama.model.layers[0]).__name__ == "LlamaDecoderLayer"


def test_changing_rotations_are_refused_where_places_change_and_taken_where_not():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model("llama", rope_parameters=rope)
    with pytest.raises(UnsupportedModelError, match=r"rope_type 'dynamic'.*streaming_llm.*tova"):
        bounded(model, policy="streaming_llm", budget=20)
    bounded(model, policy="tova", budget=20)
