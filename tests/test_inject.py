"""Injection and ejection, and their refusals."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hetero_kv import HeteroCache, HeteroKVError, eject, inject
from hetero_kv.adapter.bridge import UnsupportedModelError
from hetero_kv.engine.errors import CacheFullError
from hetero_kv.errors import ConfigError
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.window.layer import WindowLayer
from hetero_kv.operators import RetrievalAttention, SlidingWindowAttention
from hetero_kv.planning.plan import OutOfMemoryError
from hetero_kv.rules.matching import InjectionError
from hetero_kv.rules.rule_file import parse_rules
from tests.support.tiny_models import tiny_model

PROMPT = torch.arange(2, 42)[None, :]


def rules(*own, **long_context):
    settings = {"block_size": 4, "local_windows_len": 8, "max_seq_len": 64, **long_context}
    return parse_rules({"extends": "ktransformers.yaml", "rules": list(own), "long_context": settings})


def rule(name, operator, **kwargs):
    return {"match": {"name": name}, "replace": {"class": operator, **({"kwargs": kwargs} if kwargs else {})}}


@pytest.fixture
def llama():
    return tiny_model("llama")


def snapshot(model):
    return {path: (id(module), id(getattr(module, "config", None))) for path, module in model.named_modules()}


def test_eject_restores_every_module_config_and_weight(llama):
    before, keys = snapshot(llama), list(llama.state_dict())
    config, implementation = llama.config, llama.config._attn_implementation
    inject(llama, rules())
    assert snapshot(llama) != before
    eject(llama)
    assert snapshot(llama) == before
    assert list(llama.state_dict()) == keys
    assert llama.config is config
    assert config._attn_implementation == implementation


def test_the_report_tells_operator_and_settings_of_each_module(llama):
    report = inject(llama, rules(rule(r"layers\.1\.self_attn$", "RetrievalAttention", block_size=8))).report()
    assert report["model.layers.0"][0] == "ChunkedDecoderLayer"
    assert report["model.layers.0.self_attn"][0] == "RetrievalAttention"
    assert [report[f"model.layers.{i}.self_attn"][1].block_size for i in range(3)] == [4, 8, 4]


def test_settings_come_from_the_command_line_before_the_rules_before_the_settings_file(llama):
    injection = inject(
        llama,
        rules(),
        command_line={"block_size": 2},
        settings_file={"block_size": 32, "local_windows_len": 99, "top_k_blocks": 12},
    )
    settings = injection.operators["model.layers.0.self_attn"].settings
    assert (settings.block_size, settings.local_windows_len, settings.top_k_blocks) == (2, 8, 96)


def test_a_models_own_sliding_layers_get_the_window_operator():
    gemma = tiny_model("gemma3_text")
    injection = inject(gemma, rules())
    kinds = [type(injection.operators[f"model.layers.{i}.self_attn"]) for i in range(3)]
    assert kinds == [SlidingWindowAttention, RetrievalAttention, SlidingWindowAttention]
    assert [type(layer) for layer in HeteroCache(gemma).layers] == [WindowLayer, RetrievalLayer, WindowLayer]


def test_attributes_of_a_replaced_module_are_passed_on(llama):
    head_dim = llama.model.layers[0].self_attn.head_dim
    inject(llama, rules())
    assert llama.model.layers[0].self_attn.head_dim == head_dim
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = llama.model.layers[0].self_attn.no_such_thing


def test_injecting_twice_is_an_error_and_so_is_ejecting_twice(llama):
    inject(llama, rules())
    with pytest.raises(InjectionError, match=r"injected already; call hetero_kv\.eject"):
        inject(llama, rules())
    eject(llama)
    with pytest.raises(InjectionError, match="nothing to eject"):
        eject(llama)


def test_a_rule_that_matches_nothing_names_the_nearest_module(llama):
    before = snapshot(llama)
    with pytest.raises(InjectionError, match=r"rule 1 .*self_atn.* matches no module.*model\.layers\.0\.self_attn"):
        inject(llama, rules(rule(r"layers\.\d+\.self_atn$", "RetrievalAttention")))
    assert snapshot(llama) == before


def test_a_module_that_is_no_attention_is_refused_with_the_reason(llama):
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.mlp \(LlamaMLP\) cannot be replaced: its att"):
        inject(llama, rules(rule(r"layers\.0\.mlp$", "RetrievalAttention")))


def test_a_chunked_layer_needs_one_attention(llama):
    with pytest.raises(UnsupportedModelError, match=r"model\.layers \(ModuleList\) has 3 modules with a layer_idx"):
        inject(llama, rules(rule(r"model\.layers$", "ChunkedDecoderLayer")))


def test_a_full_attention_layer_has_no_window_operator(llama):
    with pytest.raises(UnsupportedModelError, match="full attention in this model"):
        inject(llama, rules(rule(r"layers\.0\.self_attn$", "SlidingWindowAttention")))


def test_an_attention_left_alone_in_an_unchunked_layer_is_refused(llama):
    left = [rule(r"layers\.2$", "default"), rule(r"layers\.2\.self_attn$", "default")]
    with pytest.raises(InjectionError, match=r"model\.layers\.2\.self_attn .* is not replaced"):
        inject(llama, rules(*left))


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("falcon", {"num_hidden_layers": 1, "num_attention_heads": 4}),
        ("bloom", {"n_layer": 1, "n_head": 4}),
    ],
)
def test_models_without_the_attention_interface_are_refused_by_name(model_type, sizes):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, hidden_size=32, vocab_size=97, **sizes))
    only = parse_rules({"rules": [rule(r"self_attention$", "RetrievalAttention")]})
    with pytest.raises(UnsupportedModelError, match=r"Attention\) cannot be replaced: .* attention interface"):
        inject(model, only)


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


def test_an_injection_that_fails_half_way_leaves_the_model_as_it_was(llama, monkeypatch):
    before = snapshot(llama)
    with pytest.raises(HeteroKVError, match="top_k_blocks lists 2 numbers, but the model has 3 layers"):
        inject(llama, rules(top_k_blocks=[1, 2]))
    assert snapshot(llama) == before
    build, built = RetrievalAttention.__init__, []

    def failing(self, *args):
        build(self, *args)
        built.append(self)
        if len(built) == 2:
            raise MemoryError

    monkeypatch.setattr(RetrievalAttention, "__init__", failing)
    with pytest.raises(MemoryError):
        inject(llama, rules())
    assert snapshot(llama) == before


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


def test_a_setting_that_kwargs_of_an_extended_file_overrule_is_refused(tmp_path):
    model, path = tiny_model("llama"), tmp_path / "mine.yaml"
    path.write_text("extends: h2o.yaml\nlong_context:\n  budget: 40\n")
    with pytest.raises(ConfigError, match=r"mine.yaml: long_context, line 3: budget has no effect here: .*h2o.yaml: r"):
        inject(model, path)
    # A flag counts for more than both.
    inject(model, path, command_line={"budget": 60})
    eject(model)


@pytest.mark.parametrize(
    ("operator", "name", "said"),
    [
        ("ChunkedModule", "self_attn$", r"rule 1 \(ChunkedModule\): .*self_attn \(LlamaAttention\) is attention"),
        ("RetrievalAttention", "mlp$", r"rule 1 \(RetrievalAttention\): model.layers.0.mlp \(LlamaMLP\) cannot be"),
    ],
)
def test_invalid_kwargs_of_an_operator_are_refused_with_the_rule(operator, name, said):
    with pytest.raises(UnsupportedModelError, match=said):
        inject(tiny_model("llama"), parse_rules({"rules": [rule(name, operator)]}))


def test_a_list_of_another_length_is_refused_with_the_rule():
    with pytest.raises(ConfigError, match=r"rule 2 \(RetrievalAttention\): top_k_blocks lists 2 numbers, but"):
        inject(tiny_model("llama"), rules(top_k_blocks=[1, 2]))
