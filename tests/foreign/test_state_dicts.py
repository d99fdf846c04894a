"""A model with rules is saved, loaded, copied and converted as without them, or that is refused by name."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hetero_kv import eject, inject
from hetero_kv.errors import HeteroKVError, UnsupportedModelError
from tests.foreign.llamas import EVERYTHING, computed, difference, injected, llama, untouched
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", with_few(["llama", "qwen3_moe", "gemma2"]))
def test_an_injected_model_is_saved_under_its_original_names(architecture, tied, tmp_path):
    model = tiny_model(architecture, num_hidden_layers=3, tie_word_embeddings=tied)
    expected, names = untouched(model), list(model.state_dict())
    model.save_pretrained(tmp_path / "before")
    inject(model, "quest", command_line=EVERYTHING)
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path / "injected")
    before, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "injected"))
    assert before.keys() == saved.keys()
    assert all(torch.equal(before[name], saved[name]) for name in before)
    attention = model.config._attn_implementation
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "injected", attn_implementation=attention).eval()
    assert torch.equal(untouched(loaded), expected)


def test_weights_are_loaded_into_an_injected_model_by_their_original_names():
    model, other = injected(llama()), llama(seed=1)
    before = computed(model)
    assert model.load_state_dict(other.state_dict()) == ([], [])
    assert difference(computed(model), untouched(other)) < 1e-4
    assert difference(computed(model), before) > 0.1
    missing, unexpected = model.load_state_dict({"model.layers.0.mlp.nothing": torch.zeros(1)}, strict=False)
    assert missing == list(other.state_dict())
    assert unexpected == ["model.layers.0.mlp.nothing"]
    with pytest.raises(RuntimeError, match=r'"model\.layers\.0\.self_attn\.q_proj\.weight"'):
        model.load_state_dict({})


def test_packed_weights_are_no_state_dict(tmp_path):
    model, names = injected(llama(), weights="q8_0"), llama().state_dict()
    for refused in (model.state_dict, lambda: model.save_pretrained(tmp_path), lambda: model.load_state_dict(names)):
        with pytest.raises(UnsupportedModelError, match=r"packed.*hetero_kv\.eject\(model\)"):
            refused()
    eject(model)
    assert list(model.state_dict()) == list(llama().state_dict())


def test_a_model_with_operators_in_it_is_not_copied():
    model = injected(llama())
    for refused in (copy.deepcopy, pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(HeteroKVError, match=r"pickled or copied .* call hetero_kv\.eject\(model\)"):
            refused(model)
    expected = computed(model)
    eject(model)
    clone = injected(copy.deepcopy(model))
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(computed(clone), expected)


@pytest.mark.parametrize("weights", with_few(["as_stored", "q8_0"]))
def test_a_model_is_converted_after_inject(weights):
    model = injected(llama(), weights=weights)
    computed(model)
    expected = untouched(llama().to(torch.bfloat16))
    logits = computed(model.to(torch.bfloat16))
    assert logits.dtype is torch.bfloat16
    assert difference(logits.float(), expected.float()) < 5e-2
    back = computed(model.to(torch.float32))
    assert back.dtype is torch.float32
    assert difference(back, untouched(llama().to(torch.bfloat16).to(torch.float32))) < 5e-2


def test_adapters_are_put_into_an_injected_model_and_saved(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = injected(llama())
    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(tmp_path)
    fresh = peft.PeftModel.from_pretrained(llama(), tmp_path).eval()
    expected = untouched(fresh)
    assert difference(computed(model, called=adapted), expected) < 1e-4
    assert difference(expected, untouched(llama())) > 1e-2
    again = injected(llama())
    assert difference(computed(again, called=peft.PeftModel.from_pretrained(again, tmp_path)), expected) < 1e-4
    names = [name for name in load_file(tmp_path / "adapter_model.safetensors") if "wrapped" in name]
    assert not names


def test_attributes_assigned_to_an_operator_reach_the_wrapped_module():
    model, plain = injected(llama()), llama()
    for each in (model, plain):
        each.model.layers[1].self_attn.scaling = 0.5
        each.set_submodule("model.layers.0.self_attn.v_proj", torch.nn.Linear(64, 32, bias=False))
        torch.nn.init.ones_(each.model.layers[0].self_attn.v_proj.weight)
    assert difference(computed(model), untouched(plain)) < 1e-4


def test_adapters_are_not_merged_into_packed_weights():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(llama(), config).eval()
    expected = untouched(adapted)
    model = injected(adapted.get_base_model(), weights="q8_0")
    assert difference(computed(model, called=adapted), expected) < 5e-2
    with pytest.raises(UnsupportedModelError, match="would be lost"):
        adapted.merge_adapter()


def test_a_saved_state_dict_is_one_of_the_untouched_model(tmp_path):
    model = injected(llama())
    save_file({name: numbers.contiguous() for name, numbers in model.state_dict().items()}, tmp_path / "all")
    other = llama(seed=1)
    other.load_state_dict(load_file(tmp_path / "all"))
    assert torch.equal(untouched(other), untouched(llama()))
