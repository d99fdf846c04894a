"""Calls of an injected model: what they return, what they refuse by name, and what a refusal leaves."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hetero_kv import HeteroCache, HeteroKVError, inject
from hetero_kv.adapter.bridge import UnsupportedModelError
from hetero_kv.engine.errors import CacheFullError
from hetero_kv.planning.plan import OutOfMemoryError
from hetero_kv.rules.rule_file import parse_rules
from tests.support.block_rules import PROMPT, rule, rules
from tests.support.tiny_models import tiny_model


@pytest.fixture
def llama():
    return tiny_model("llama")


def test_a_cache_needs_an_injected_model(llama):
    with pytest.raises(HeteroKVError, match="LlamaForCausalLM has no rules injected"):
        HeteroCache(llama)


def test_an_injected_model_takes_no_cache_of_another_kind(llama):
    inject(llama, rules())
    with pytest.raises(HeteroKVError, match=r"without a HeteroCache: pass past_key_values=HeteroCache\(model\)"):
        llama(PROMPT, past_key_values=DynamicCache(config=llama.config))


@torch.no_grad()
def test_a_call_without_a_cache_gets_one_of_its_own(llama):
    expected = llama(PROMPT).logits
    inject(llama, rules(max_seq_len=40))
    output = llama(PROMPT)
    torch.testing.assert_close(output.logits, expected, rtol=1e-3, atol=1e-3)
    assert isinstance(output.past_key_values, HeteroCache)
    assert output.past_key_values.get_seq_length() == 40
    assert llama(PROMPT, use_cache=False).past_key_values is None
    assert len(llama(PROMPT, use_cache=False, return_dict=False)) == 1


@torch.no_grad()
def test_a_padded_batch_without_a_cache_equals_its_rows_alone(llama):
    inject(llama, rules())
    mask = torch.ones_like(PROMPT)
    mask[0, :5] = 0
    torch.testing.assert_close(llama(PROMPT, attention_mask=mask).logits[:, 5:], llama(PROMPT[:, 5:]).logits)


def test_packed_sequences_are_refused(llama):
    inject(llama, rules())
    positions = torch.cat([torch.arange(25), torch.arange(15)])[None]
    with pytest.raises(UnsupportedModelError, match="restart within a row, as in packed sequences"):
        llama(PROMPT, position_ids=positions)


@torch.no_grad()
def test_a_norm_alone_in_chunks_leaves_attention_what_it_was(llama):
    def two_turns(cache):
        return torch.cat([llama(part, past_key_values=cache).logits for part in PROMPT.split(25, dim=1)], dim=1)

    expected = two_turns(DynamicCache(config=llama.config))
    inject(llama, parse_rules({"rules": [rule(r"^model\.norm$", "ChunkedModule")]}))
    torch.testing.assert_close(two_turns(DynamicCache(config=llama.config)), expected)
    torch.testing.assert_close(two_turns(HeteroCache(llama)), expected)


def test_batches_that_are_padded_on_the_right_are_refused(llama):
    inject(llama, rules())
    mask = torch.ones_like(PROMPT)
    mask[0, -3:] = 0
    with pytest.raises(UnsupportedModelError, match=r"row 0 hides columns on the right.* padding_side=\"left\""):
        llama(PROMPT, attention_mask=mask, past_key_values=HeteroCache(llama))


def test_a_custom_mask_is_refused(llama):
    inject(llama, rules())
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    with pytest.raises(UnsupportedModelError, match=r"attention_mask, a tensor of shape \[1, 1, 40, 40\]"):
        llama(PROMPT, attention_mask=mask, past_key_values=HeteroCache(llama))


@pytest.mark.parametrize("output", ["output_hidden_states", "output_attentions"])
def test_outputs_that_chunks_would_garble_are_refused(llama, output):
    inject(llama, rules(chunk_size=8))
    with pytest.raises(UnsupportedModelError, match=output):
        llama(PROMPT, past_key_values=HeteroCache(llama), **{output: True})


def test_outputs_that_the_config_asks_for_are_refused_too(llama):
    llama.config.output_hidden_states = True
    inject(llama, rules(chunk_size=8))
    with pytest.raises(UnsupportedModelError, match="output_hidden_states would be recorded once per chunk"):
        llama(PROMPT, past_key_values=HeteroCache(llama))


def test_bidirectional_attention_is_refused(llama):
    inject(llama, rules())
    with pytest.raises(UnsupportedModelError, match="is_causal=False"):
        llama(PROMPT, past_key_values=HeteroCache(llama), is_causal=False)


def test_an_unknown_attention_argument_is_refused_by_name(llama):
    inject(llama, rules())
    with pytest.raises(UnsupportedModelError, match=r"attention argument tree_depth=3 is not known"):
        llama(PROMPT, past_key_values=HeteroCache(llama), tree_depth=3)


def test_a_full_cache_names_max_seq_len_and_keeps_what_it_has(llama):
    inject(llama, rules(max_seq_len=45))
    cache = HeteroCache(llama)
    llama(PROMPT, past_key_values=cache)
    with pytest.raises(CacheFullError, match="max_seq_len is 45 tokens, 40 are stored, and 6 more"):
        llama(PROMPT[:, :6], past_key_values=cache)
    assert {layer.get_seq_length() for layer in cache.layers} == {40}
    llama(PROMPT[:, :5], past_key_values=cache)
    with pytest.raises(CacheFullError, match="45 are stored, and 1 more"):
        llama(PROMPT[:, :1], past_key_values=cache)


def test_a_store_that_cannot_fit_is_refused_with_the_length_that_would(llama):
    inject(llama, rules())
    with pytest.raises(OutOfMemoryError, match=r"is 99000000000: .* GB are free .* max_seq_len \d+ would fit"):
        HeteroCache(llama, max_seq_len=99_000_000_000)


def test_reset_forgets_every_token(llama):
    inject(llama, rules())
    cache = HeteroCache(llama)
    first = llama(PROMPT, past_key_values=cache).logits
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(llama(PROMPT, past_key_values=cache).logits, first)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_forward_that_is_interrupted_leaves_every_layer_as_it_was(model_type):
    model, calls = tiny_model(model_type), []

    def interrupt(*report):
        calls.append(report)
        if len(calls) == 9:
            raise KeyboardInterrupt

    inject(model, rules(chunk_size=8))
    with torch.no_grad():
        expected = model(torch.cat([PROMPT[:, :10], PROMPT], dim=1), past_key_values=HeteroCache(model)).logits[:, 10:]
        cache = HeteroCache(model)
        model(PROMPT[:, :10], past_key_values=cache)
        cache.on_progress = interrupt
        with pytest.raises(KeyboardInterrupt):
            model(PROMPT, past_key_values=cache)
        assert {layer.get_seq_length() for layer in cache.layers} == {10}
        cache.on_progress = None
        torch.testing.assert_close(model(PROMPT, past_key_values=cache).logits, expected, rtol=1e-2, atol=1e-2)


def test_a_full_store_is_noticed_before_a_window_layer_takes_the_tokens():
    gemma = tiny_model("gemma3_text")
    inject(gemma, rules(max_seq_len=45))
    cache = HeteroCache(gemma)
    gemma(PROMPT, past_key_values=cache)
    with pytest.raises(CacheFullError):
        gemma(PROMPT, past_key_values=cache)
    assert {layer.get_seq_length() for layer in cache.layers} == {40}


def test_another_batch_size_needs_a_reset(llama):
    inject(llama, rules(max_seq_len=128))
    cache = HeteroCache(llama)
    llama(PROMPT, past_key_values=cache)
    with pytest.raises(HeteroKVError, match="holds 1 sequences, but the call has 2"):
        llama(PROMPT.repeat(2, 1), past_key_values=cache)
    cache.reset()
    llama(PROMPT.repeat(2, 1), past_key_values=cache)
    assert cache.get_seq_length() == 40


def test_numbers_beyond_half_precision_are_refused_not_stored_as_infinity(llama):
    llama.model.layers[1].self_attn.v_proj.weight.mul_(1e6)
    inject(llama, rules(kv_type="FP16"))
    cache = HeteroCache(llama)
    with pytest.raises(
        HeteroKVError, match=r"exceeds the range of kv_type FP16, whose largest value is 65504; set kv_type to .* FP32"
    ):
        llama(PROMPT, past_key_values=cache)
    assert {layer.get_seq_length() for layer in cache.layers} == {0}


def test_prompt_lookup_decoding_goes_back_and_gives_the_same_tokens(llama):
    prompt = PROMPT[:, :8].repeat(1, 4)
    greedy = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": False}
    expected = llama.generate(prompt, **greedy)
    inject(llama, rules(kv_type="FP32", top_k_blocks="all"))
    actual = llama.generate(prompt, past_key_values=HeteroCache(llama), prompt_lookup_num_tokens=3, **greedy)
    assert actual.tolist() == expected.tolist()


def test_sampling_with_several_returned_sequences_equals_the_untouched_models(llama):
    sampled = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 12, "do_sample": True, "top_k": 20}
    torch.manual_seed(3)
    expected = llama.generate(PROMPT, num_return_sequences=3, **sampled)
    inject(llama, rules(kv_type="FP32", top_k_blocks="all"))
    torch.manual_seed(3)
    actual = llama.generate(PROMPT, num_return_sequences=3, past_key_values=HeteroCache(llama), **sampled)
    assert actual.tolist() == expected.tolist()
    assert len({tuple(row) for row in actual.tolist()}) > 1
