"""What `--config` accepts: a file, settings of the engine and settings of the file's operators."""

from __future__ import annotations

import pytest

from hetero_kv.errors import ConfigError
from hetero_kv.evals import config_specs
from hetero_kv.rules.injecting import eject, inject
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("quest:top_k_blocks=3", "top_k_blocks", 3),
        ("shadowkv:rank=8:outlier_chunks=2", "rank", 8),
        ("tova:budget=30", "budget", 30),
    ],
)
def test_a_method_takes_the_settings_of_its_own_operators(word, name, value):
    (spec,) = config_specs([word])
    assert spec.name == word
    model = tiny_model("llama")
    injection = inject(model, spec.rules, command_line=spec.settings)
    assert {getattr(operator.settings, name) for operator in injection.attention_operators()} == {value}
    eject(model)


@pytest.mark.parametrize(
    ("word", "taker"),
    [
        ("quest:rank=8", "ShadowKVAttention"),
        ("tova:rank=8", "ShadowKVAttention"),
        ("shadowkv:policy=tova", "BoundedAttention"),
        ("infinipot:top_k_blocks=3", "InfLLMStreamAttention, RetrievalAttention and SelfExtendAttention"),
        ("tova:recent_tokens=3", r"BoundedAttention \(pyramidkv, roco and snapkv\)"),
    ],
)
def test_a_setting_of_another_operator_is_refused_by_name_with_what_it_is_for(word, taker):
    recipe, setting = word.split("=")[0].split(":")
    message = f"'{word}': {setting} has no effect here: it is a setting of {taker}, and injection_rules/{recipe}.yaml"
    with pytest.raises(ConfigError, match=message):
        config_specs([word])
