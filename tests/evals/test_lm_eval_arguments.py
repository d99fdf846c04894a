"""lm_eval's generation arguments and `--model_args`: each has its effect, and mistakes are refused by name."""

from __future__ import annotations

import pytest
import torch

from hetero_kv.errors import ConfigError
from hetero_kv.evals.lm_eval_adapter import HarnessModel, ModelArguments
from hetero_kv.evals.lm_eval_adapter.generation_arguments import sampling_params
from hetero_kv.evals.lm_eval_adapter.model_arguments import device_of


def test_generation_arguments_become_sampling_params(caplog):
    control = {"<|im_end|>": 7}
    params = sampling_params({"until": ["\n", "<|im_end|>"]}, 256, control)
    assert (params.stop, params.ends, params.max_new_tokens, params.temperature) == (("\n", "<|im_end|>"), (7,), 256, 0)
    params = sampling_params(
        {"max_new_tokens": 8, "do_sample": True, "top_p": 0.9, "top_k": 5, "min_p": 0.1}, 256, control
    )
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (8, 1, 0.9, 5, 0.1)
    assert sampling_params({"temperature": 0.7}, 9, {}).temperature == 0.7
    assert sampling_params({"repetition_penalty": 1.2}, 9, {}).repetition_penalty == 1.2
    assert not caplog.text
    assert sampling_params({"do_sample": False, "temperature": 0.7, "top_p": 1.0}, 9, {}).is_greedy
    assert "temperature=0.7 has no effect" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temprature": 1}, "generation has no argument 'temprature'; did you mean temperature?"),
        ({"max_length": 9}, "generation has no argument 'max_length'"),
        ({"until": [""]}, r"until is \[''\]; it must be a non-empty text"),
        ({"until": 3}, "until is 3"),
        ({"max_gen_toks": 0}, "max_gen_toks is 0"),
        ({"max_gen_toks": 5, "max_tokens": 6}, "max_gen_toks is 5 and max_tokens is 6, which mean the same"),
        ({"do_sample": True, "temperature": 0.0}, "do_sample is true and temperature is 0"),
        ({"do_sample": "yes"}, "do_sample is 'yes'"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"temperature": 1, "top_p": 2}, "top_p is 2"),
    ],
)
def test_a_mistake_in_generation_arguments_is_refused_by_name(arguments, message):
    with pytest.raises(ConfigError, match=message):
        sampling_params(arguments, 256, {})


def test_model_args_are_own_ones_and_settings_of_the_rules():
    parsed = ModelArguments.parsed(
        {"model": "m.gguf", "config": "quest", "max_seq_len": 99, "device": None}, batch_size=1
    )
    assert (parsed.pretrained, parsed.config, parsed.device, parsed.batch) == ("m.gguf", "quest", "auto", 1)
    assert parsed.settings == {"max_seq_len": 99}
    assert ModelArguments.parsed({"trust_rules": "mine"}).trust_rules == ("mine",)


@pytest.mark.parametrize(
    ("batch", "batch_size", "max_batch_size", "rows"),
    [
        (None, None, None, 8),
        (None, "4", None, 4),
        (5, 1, None, 5),
        (5, "5", None, 5),
        (None, "auto:2", 6, 6),
        (3, "auto", None, 3),
    ],
)
def test_the_rows_come_from_batch_or_from_lm_evals_flags(batch, batch_size, max_batch_size, rows):
    assert ModelArguments.parsed({"batch": batch}, batch_size, max_batch_size).batch == rows


@pytest.mark.parametrize(
    ("arguments", "flags", "message"),
    [
        ({"batch": 0}, (), "batch is 0; it must be a whole number of at least 1"),
        ({"batch": 4}, (2,), "batch is 4, and batch_size is 2, which mean the same"),
        ({}, ("many",), "batch_size is 'many'"),
        ({}, (4, 8), "max_batch_size is 8, and batch_size is 4"),
        ({"truncation": True}, (), "truncation is True; it must be 'refuse', or 'left'"),
        ({"model": "a", "pretrained": "b"}, (), "model is 'a' and pretrained is 'b', which mean the same"),
        ({"add_bos_token": "maybe"}, (), "add_bos_token is 'maybe'; it must be true or false"),
        ({"pretrained": 3}, (), "pretrained is 3; it must be a text"),
        ({"trust_rules": "not a module"}, (), "model_args: trust_rules has 'not a module'"),
    ],
)
def test_a_mistake_in_model_args_is_refused_by_name(arguments, flags, message):
    with pytest.raises(ConfigError, match=message):
        ModelArguments.parsed(arguments, *flags)


def test_a_model_arg_that_is_no_setting_is_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="max_seq_length"):
        HarnessModel.load(ModelArguments.parsed({"pretrained": "/nowhere.gguf", "max_seq_length": 9}))


def test_the_device_that_lm_eval_sets_by_itself_counts_where_there_is_a_gpu(monkeypatch, caplog):
    assert device_of(None, None) is None
    assert device_of("cpu", "cuda:0") == device_of("cpu", None) == device_of(None, "cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of(None, "cuda:0") == "cuda:0"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(None, "cuda:0") == "cpu"
    assert "there is no GPU: computing on the CPU" in caplog.text
    with pytest.raises(ConfigError, match="device is 'cpu', and --device is 'cuda:1'"):
        device_of("cpu", "cuda:1")
