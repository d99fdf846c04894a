"""One model's weights in memory, and several recipes beside each other."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType

from hetero_kv import HeteroCache, eject, inject, load_model, with_rules
from hetero_kv.contexts import tensor_digests
from hetero_kv.errors import ConfigError
from hetero_kv.models.loading import LoadedModel
from hetero_kv.rules.matching import InjectionError
from tests.support.slow_variants import with_slow
from tests.support.small_recipes import small_recipe
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = {"max_seq_len": 256, "threads_num": 1}
RECIPES = (
    "quest:top_k_blocks=1:max_dense_blocks=0:block_size=4:sink_tokens=4:local_windows_len=8",
    "dense",
    "streaming_llm:budget=24",
)
IDS = torch.randint(6, 97, (1, 90), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def quantized_file(write_tiny_gguf, tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("shared") / "tiny.gguf", kind=GGMLQuantizationType["Q8_0"])


def outputs(model):
    """The logits of a prompt and of three tokens behind it."""
    cache = HeteroCache(model, 256)
    with torch.no_grad():
        found = [model(ids, past_key_values=cache).logits for ids in IDS.split([87, 1, 1, 1], dim=1)]
    return torch.cat(found, dim=1)


def memory(*models):
    """Address -> bytes of all parameters, buffers and packed weights."""
    tensors = [each for model in models for each in (*model.parameters(), *model.buffers())]
    return {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.numel()}


def given(weights, **more):
    return {**SETTINGS, "weights": weights, **more}


@pytest.mark.parametrize("weights", with_slow(["auto", "q4_0", "bf16"], slow=["q4_0", "bf16"]))
def test_each_view_computes_as_a_model_that_is_loaded_alone_with_its_recipe(quantized_file, weights):
    first, *others = RECIPES
    loaded = load_model(quantized_file, dtype="float32", config=first, **given(weights))
    views = [loaded, *(with_rules(loaded, recipe, **given(weights)) for recipe in others)]
    alone = [load_model(quantized_file, dtype="float32", config=recipe, **given(weights)) for recipe in RECIPES]
    found = [outputs(view.model) for view in views]
    assert all(torch.equal(mine, outputs(each.model)) for mine, each in zip(found, alone, strict=True))
    assert not torch.equal(found[0], found[2])
    # Each computes after the others as before them.
    assert all(torch.equal(mine, outputs(view.model)) for mine, view in zip(found, views, strict=True))


@pytest.mark.parametrize("weights", ["auto", "q4_0", "bf16"])
def test_a_view_takes_no_memory_for_weights(quantized_file, weights):
    loaded = load_model(quantized_file, dtype="float32", config="dense", **given(weights))
    view = with_rules(loaded, "quest", **given(weights))
    alone, both = memory(loaded.model), memory(loaded.model, view.model)
    assert sum(both.values()) == sum(alone.values())
    assert memory(view.model) == alone
    assert not any(parameter.is_meta for parameter in view.model.parameters())


def test_weights_that_a_file_has_as_numbers_are_shared(write_tiny_gguf, tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", kind=GGMLQuantizationType.F32)
    loaded = load_model(path, dtype="float32", config="dense", **given("auto"))
    view = with_rules(loaded, RECIPES[0], **given("auto"))
    alone = load_model(path, dtype="float32", config=RECIPES[0], **given("auto"))
    assert torch.equal(outputs(view.model), outputs(alone.model))
    assert memory(view.model) == memory(loaded.model)


def test_a_view_has_modules_and_configs_of_its_own(quantized_file):
    loaded = load_model(quantized_file, dtype="float32", config="dense", **SETTINGS)
    view = with_rules(loaded, "quest", **SETTINGS)
    mine, theirs = ({id(module) for module in each.model.modules()} for each in (loaded, view))
    assert not mine & theirs
    assert view.model.config is not loaded.model.config
    assert view.model.model.layers[0].self_attn.config is not loaded.model.model.layers[0].self_attn.config
    assert (view.tokenizer, view.name) == (loaded.tokenizer, loaded.name)


@pytest.mark.parametrize("first", [0, 1])
def test_ejecting_one_leaves_the_other(quantized_file, first):
    loaded = load_model(quantized_file, dtype="float32", config=RECIPES[0], **SETTINGS)
    pair = [loaded.model, with_rules(loaded, RECIPES[1], **SETTINGS).model]
    other = pair[1 - first]
    expected = outputs(other)
    eject(pair[first])
    assert pair[first](IDS).logits.isfinite().all()
    assert torch.equal(outputs(other), expected)
    inject(pair[first], "dense", command_line=SETTINGS)
    assert torch.equal(outputs(other), expected)


def test_hooks_and_weights_of_one_view_do_not_reach_the_other(quantized_file):
    loaded = load_model(quantized_file, dtype="float32", config="dense", **SETTINGS)
    view = with_rules(loaded, "dense", **SETTINGS)
    states = [each.model.hetero_kv_injection.state() for each in (loaded, view)]
    expected = outputs(loaded.model)
    view.model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 2)
    norm = view.model.model.layers[0].input_layernorm
    norm.weight = torch.nn.Parameter(norm.weight * 2)
    assert torch.equal(outputs(loaded.model), expected)
    assert not torch.equal(outputs(view.model), expected)
    assert loaded.model.hetero_kv_injection.state().is_like(states[0])
    assert not view.model.hetero_kv_injection.state().is_like(states[1])


def test_contexts_of_one_view_are_those_of_a_model_that_was_loaded_alone(quantized_file, tmp_path):
    loaded = load_model(quantized_file, dtype="float32", config="dense", **SETTINGS)
    view = with_rules(loaded, "quest", **SETTINGS)
    alone = load_model(quantized_file, dtype="float32", config="quest", **SETTINGS)
    cache = HeteroCache(view.model, 256)
    with torch.no_grad():
        view.model(IDS, past_key_values=cache)
    cache.save(tmp_path / "saved", IDS)
    again = HeteroCache.load(tmp_path / "saved", alone.model, max_seq_len=256)
    with torch.no_grad():
        expected = view.model(IDS[:, :1], past_key_values=cache).logits
        assert torch.equal(alone.model(IDS[:, :1], past_key_values=again).logits, expected)


def test_shared_weights_are_hashed_once(quantized_file, monkeypatch):
    hashed = []
    monkeypatch.setattr(tensor_digests, "_hashed", lambda data: hashed.append(len(data)) or bytes(32))
    loaded = load_model(quantized_file, dtype="float32", config="dense", **SETTINGS)
    first = loaded.model.hetero_kv_injection.identity
    once = sum(hashed)
    second = with_rules(loaded, "quest", **SETTINGS).model.hetero_kv_injection.identity
    assert sum(hashed) == once > 10_000
    assert second.weights == first.weights


@pytest.mark.parametrize(
    "architecture",
    with_slow(
        ["qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_5_text", "lfm2", "jamba"],
        slow=["qwen3_moe", "gpt_oss", "deepseek_v3", "lfm2", "jamba"],
    ),
)
def test_every_kind_of_model_can_be_shared(architecture):
    def injected(name, weights):
        model = tiny_model(architecture)
        inject(model, small_recipe(name), command_line={"weights": weights})
        return LoadedModel(model, None, architecture, 512)

    for weights in ("auto", "q8_0"):
        loaded = injected("dense", weights)
        view = with_rules(loaded, small_recipe("quest"), weights=weights)
        assert sum(memory(loaded.model, view.model).values()) == sum(memory(loaded.model).values())
        assert torch.equal(outputs(view.model), outputs(injected("quest", weights).model))


def test_a_model_without_rules_can_be_shared():
    loaded = LoadedModel(tiny_model("llama"), None, "tiny", 512)
    expected = loaded.model(IDS).logits
    view = with_rules(loaded, small_recipe("dense"))
    torch.testing.assert_close(
        view.model(IDS, past_key_values=HeteroCache(view.model)).logits, expected, rtol=1e-4, atol=1e-4
    )
    assert torch.equal(loaded.model(IDS).logits, expected)
    assert not hasattr(loaded.model, "hetero_kv_injection")
    with pytest.raises(InjectionError, match="'q8_0' under these rules, and 'auto'"):
        with_rules(loaded, small_recipe("dense"), weights="q8_0")


@pytest.mark.parametrize("pair", [("auto", "q4_0"), ("q8_0", "auto"), ("bf16", "fp32")])
def test_weights_in_two_forms_are_refused(quantized_file, pair):
    mine, theirs = pair
    loaded = load_model(quantized_file, dtype="float32", config="dense", **given(mine))
    expected, before = outputs(loaded.model), memory(loaded.model)
    with pytest.raises(InjectionError, match=rf"'{theirs}' under these rules, and '{mine}' under.* give both the same"):
        with_rules(loaded, "quest", **given(theirs))
    assert memory(loaded.model) == before
    assert torch.equal(outputs(loaded.model), expected)


def test_settings_of_the_process_are_those_of_the_first(quantized_file):
    loaded = load_model(quantized_file, dtype="float32", config="dense", **SETTINGS)
    with pytest.raises(ConfigError, match="weights_device is dram under these rules, and auto under"):
        with_rules(loaded, "quest", **{**SETTINGS, "weights_device": "dram"})
    with pytest.raises(ConfigError, match="threads_num is 2 under these rules, and 1 under") as refused:
        with_rules(loaded, "quest", **{**SETTINGS, "threads_num": 2})
    assert "give both the same" in str(refused.value)


def test_a_model_with_hooks_of_others_is_refused(quantized_file):
    loaded = load_model(quantized_file, dtype="float32", config="dense", **SETTINGS)
    loaded.model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output)
    with pytest.raises(InjectionError, match=r"model\.layers\.1\.mlp has a hook or a forward of others"):
        with_rules(loaded, "quest", **SETTINGS)
