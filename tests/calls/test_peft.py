"""PEFT's adapters and soft prompts over an injected model: the untouched model's tokens, or a refusal by name."""

from __future__ import annotations

import pytest
import torch
from peft import (
    IA3Config,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)

from hetero_kv import HeteroCache, HeteroKVError, inject
from tests.calls.reference_model import EVERYTHING, PROMPT, SIZES, Call, tokens_of
from tests.support.slow_variants import combined
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROJECTIONS = ["q_proj", "v_proj", "up_proj", "down_proj"]
LORA = LoraConfig(r=4, lora_alpha=32, target_modules=PROJECTIONS, init_lora_weights=False, task_type="CAUSAL_LM")
CONFIGS = {
    "LoRA": LORA,
    "IA3": IA3Config(
        target_modules=PROJECTIONS, feedforward_modules=["down_proj"], init_ia3_weights=False, task_type="CAUSAL_LM"
    ),
    "prompt tuning": PromptTuningConfig(num_virtual_tokens=6, task_type="CAUSAL_LM"),
    "p-tuning": PromptEncoderConfig(num_virtual_tokens=5, encoder_hidden_size=32, task_type="CAUSAL_LM"),
}


def adapted(config, order="before"):
    """A model with an adapter, injected before PEFT wraps it, behind, or not at all; and the model within."""
    model = tiny_model("llama", 1, **SIZES)
    if order == "before":
        inject(model, "quest", command_line=EVERYTHING)
    torch.manual_seed(11)
    wrapped = get_peft_model(model, config).eval()
    if order == "behind":
        inject(model, "quest", command_line=EVERYTHING)
    return wrapped, model


def answer(wrapped, cache=None, **settings):
    return tokens_of(Call(wrapped, None, lambda: cache).generate(None, input_ids=PROMPT, **settings))


@pytest.mark.parametrize(("name", "order", "with_cache"), combined(list(CONFIGS), ["before", "behind"], [True, False]))
@torch.no_grad()
def test_an_adapted_model_gives_the_tokens_that_it_gives_without_rules(name, order, with_cache):
    untouched, _ = adapted(CONFIGS[name], "never")
    wrapped, model = adapted(CONFIGS[name], order)
    expected = answer(untouched)
    assert answer(wrapped, HeteroCache(model) if with_cache else None) == expected
    assert answer(wrapped, HeteroCache(wrapped) if with_cache else None, num_beams=2) == answer(untouched, num_beams=2)


@torch.no_grad()
def test_an_adapter_that_is_off_or_merged_is_so_under_rules():
    untouched, _ = adapted(LORA, "never")
    wrapped, _ = adapted(LORA)
    adapted_answer = answer(untouched)
    with untouched.disable_adapter(), wrapped.disable_adapter():
        assert answer(wrapped) == answer(untouched) != adapted_answer
    wrapped.merge_adapter()
    assert answer(wrapped) == adapted_answer


@pytest.mark.parametrize("with_cache", [True, False], ids=["a cache", "no cache"])
@torch.no_grad()
def test_prefix_tuning_is_refused_by_name(with_cache):
    wrapped, model = adapted(PrefixTuningConfig(num_virtual_tokens=6, task_type="CAUSAL_LM"))
    with pytest.raises(HeteroKVError, match=r"a DynamicCache of 6 tokens, .* \(PEFT's prefix tuning\)"):
        answer(wrapped, HeteroCache(model) if with_cache else None)
    with pytest.raises(HeteroKVError, match=r"\(PEFT's prefix tuning\)"):
        wrapped(input_ids=PROMPT)
