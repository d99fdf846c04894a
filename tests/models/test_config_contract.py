"""A configuration with impossible numbers is one error, before anything is allocated."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from transformers import AutoConfig

from hetero_kv.models import ModelError, load_model, model_config
from hetero_kv.models.config_contract import MOST_BYTES, require_possible_config
from hetero_kv.models.weightless import weightless_model

IMPOSSIBLE = [
    ("num_attention_heads", 0, "is 0; it must be a whole number from 1 to 4,096"),
    ("num_attention_heads", -4, "is -4; it must be a whole number"),
    ("num_attention_heads", True, "is True; it must be a whole number"),
    ("num_attention_heads", 3, "is 3, which num_key_value_heads, 2, does not divide"),
    ("num_key_value_heads", 0, "is 0; it must be a whole number"),
    ("num_hidden_layers", -1, "is -1; it must be a whole number from 1 to 1,024"),
    ("num_hidden_layers", 100_000, "is 100000; it must be a whole number"),
    ("num_hidden_layers", "2", "is '2'; it must be a whole number"),
    ("hidden_size", 1 << 40, "is 1099511627776; it must be a whole number from 1 to 131,072"),
    ("vocab_size", -1, "is -1; it must be a whole number"),
    ("head_dim", 1 << 30, "is 1073741824; it must be a whole number"),
    ("max_position_embeddings", 0, "is 0; it must be a whole number"),
    ("max_position_embeddings", 10**30, "it must be a whole number from 1 to 134,217,728"),
    ("sliding_window", -3, "is -3; it must be a whole number"),
    ("intermediate_size", [64, -64], "is -64; it must be a whole number from 0"),
    ("rms_norm_eps", math.nan, "is nan; it must be a number between 0 and 1"),
    ("rms_norm_eps", -1.0, "is -1.0; it must be a number between 0 and 1"),
    ("rms_norm_eps", "small", "is 'small'; it must be a number between 0 and 1"),
    ("attention_dropout", math.inf, "is inf; it must be finite"),
    ("rope_parameters", [1], "is [1]; it must map names to RoPE parameters"),
    ("rope_parameters", {"rope_theta": "x"}, ".rope_theta is 'x'; it must be a number"),
    ("rope_parameters", {"rope_theta": -1.0}, ".rope_theta is -1.0; it must be a number"),
    ("rope_parameters", {"rope_theta": 10**40}, "; it must be a number between 0 and 1e+12"),
    ("rope_parameters", {"full_attention": {"rope_theta": math.nan}}, ".full_attention.rope_theta is nan"),
    ("rope_parameters", {"rope_type": 7}, ".rope_type is 7; it must be text"),
    ("rope_parameters", {"rope_type": "yarn", "factor": -4.0}, ".factor is -4.0; it must be a number"),
    ("rope_scaling", {"type": "longrope", "long_factor": [1.0, 0]}, ".long_factor is 0; it must be a number"),
    ("text_config", {"num_hidden_layers": 0}, "text_config.num_hidden_layers is 0"),
]


@pytest.fixture
def changed(tiny_directory, tmp_path):
    """The tiny model's directory, with something else in its configuration."""

    def change(without=(), **values):
        directory = shutil.copytree(tiny_directory, tmp_path / "changed")
        config = json.loads((directory / "config.json").read_text())
        kept = {name: value for name, value in config.items() if name not in without}
        (directory / "config.json").write_text(json.dumps(kept | values))
        return directory

    return change


@pytest.mark.parametrize(("key", "value", "expected"), IMPOSSIBLE)
def test_a_number_that_no_model_has_is_named(changed, key, value, expected):
    directory = changed(**{key: value})
    for read in (load_model, model_config, weightless_model, lambda path: weightless_model(path / "config.json")):
        with pytest.raises(ModelError) as raised:
            read(directory)
        text = str(raised.value)
        assert text.startswith(f"{str(directory / 'config.json')!r}: {key}")
        assert expected in text
        assert text.endswith("; give the configuration that belongs to the weights")


def test_more_parameters_than_weights_are_refused_before_they_are_allocated(changed, monkeypatch):
    directory = changed(without=("layer_types",), num_hidden_layers=700)
    monkeypatch.setattr(torch, "empty_like", None)
    with pytest.raises(
        ModelError, match=r"config\.json' describes a model with 17,4\d\d,\d\d\d parameters, and the weights"
    ):
        load_model(directory, dtype="float32", device="cpu")


def test_a_configuration_larger_than_any_is_not_read(changed):
    directory = changed()
    with open(directory / "config.json", "ab") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(ModelError, match="a configuration may have 16,777,216"):
        model_config(directory)


@pytest.mark.parametrize(
    "content", ["[]", "null", "3", "{", '{"a": ' * 5000, '{"num_hidden_layers": 1' + "0" * 5000 + "}"]
)
def test_files_that_are_no_configuration_are_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError):
        model_config(tmp_path)


KINDS = "llama qwen2 gemma2 gemma3_text gpt_oss mixtral deepseek_v3 phi3 qwen3_moe gpt2 glm4 falcon mamba2 bloom opt"


@pytest.mark.parametrize("kind", KINDS.split())
def test_real_models_configurations_are_accepted(tmp_path, kind):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    require_possible_config(tmp_path)


def test_numbers_of_published_configurations_are_taken(tmp_path):
    published = {
        "num_key_value_heads": None, "head_dim": None, "sliding_window": 0, "num_local_experts": 0, "q_lora_rank": None,
        "time_step_limit": [0.0, math.inf], "intermediate_size": [64, 0], "rms_norm_eps": 1e-8, "vocab_size": 262_208,
        "rope_scaling": {"type": "yarn", "mscale": 0, "mscale_all_dim": 0.0, "factor": 40, "beta_fast": 32},
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    require_possible_config(tmp_path)
