"""`hetero_kv.load_model` with rules equals the chat: packed weights, compiled kernels, threads."""

from __future__ import annotations

import logging

import pytest
import torch
from gguf import GGMLQuantizationType

from hetero_kv import Conversation, HeteroCache, HeteroKVError, eject, inject, load_model, load_rules, open_model
from hetero_kv.adapter.quantized_module import QuantizedModule
from hetero_kv.errors import ConfigError
from hetero_kv.evals import ConfiguredModel, config_specs, load_packed
from hetero_kv.evals.prompt import Prompt
from hetero_kv.families.retrieval.attention import RetrievalAttention
from hetero_kv.rules.preparing import Preparation
from hetero_kv.rules.rule_file import parse_rules

SMALL = {"block_size": 4, "sink_tokens": 4, "local_windows_len": 4, "max_seq_len": 256, "kv_type": "FP32"}
IDS = torch.tensor([[5, 9, 77, 31, 200, 8] * 5])


@pytest.fixture(scope="module")
def q8_0_file(write_tiny_gguf, tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("one_call") / "q8_0.gguf", kind=GGMLQuantizationType.Q8_0)


def packed(model):
    return [path for path, module in model.named_modules() if isinstance(module, QuantizedModule)]


def answers(model):
    """Logits of a prompt and of three tokens behind it."""
    cache = HeteroCache(model, 64)
    with torch.no_grad():
        found = [model(IDS, past_key_values=cache).logits]
        found += [model(torch.tensor([[token]]), past_key_values=cache).logits for token in (7, 40, 3)]
    return torch.cat(found, dim=1)


def unpacked_warnings(caplog):
    return [each.getMessage() for each in caplog.records if each.name == "hetero_kv.rules.unpacked"]


def test_one_call_equals_opening_injecting_and_loading(q8_0_file, caplog):
    loaded = load_model(q8_0_file, config="quest", dtype="float32", top_k_blocks=2, **SMALL)
    opened = open_model(q8_0_file, dtype="float32")
    inject(opened.model, "quest", command_line={"top_k_blocks": 2, **SMALL})
    by_hand = opened.load().model
    assert len(packed(loaded.model)) == 2 * 7 + 2
    assert packed(loaded.model) == packed(by_hand)
    assert torch.equal(answers(loaded.model), answers(by_hand))
    assert unpacked_warnings(caplog) == []


def test_weights_load_while_kernels_compile_and_all_are_there_at_the_end(q8_0_file, monkeypatch):
    loaded = load_model(q8_0_file, config="quest", dtype="float32", **SMALL)
    steps = []
    monkeypatch.setattr(RetrievalAttention, "compile_kernels", lambda *args: steps.append(args))
    loaded.model.hetero_kv_injection.compile_kernels()
    HeteroCache(loaded.model, 64)
    assert steps == []


def test_kernels_are_reported_behind_the_weights(q8_0_file):
    said = []
    load_model(q8_0_file, config="quest", dtype="float32", progress=lambda *each: said.append(each), **SMALL)
    weights = [each for each in said if each[0] == "reading weights"]
    kernels = [each for each in said if each[0] == "preparing kernels"]
    assert said == weights + kernels
    assert [done for _, done, _ in kernels] == [*range(1, kernels[-1][2] + 1)]


def test_a_config_may_be_a_recipe_with_settings_a_path_or_rules_that_were_read(q8_0_file, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("extends: quest.yaml\nlong_context: {top_k_blocks: 3}\n")
    for config, blocks in (
        ("quest:top_k_blocks=2", 2),
        (str(path), 3),
        (path, 3),
        (f"{path}:top_k_blocks=5", 5),
        (load_rules(path), 3),
    ):
        opened = open_model(q8_0_file, config=config, dtype="float32", **SMALL)
        operators = opened.model.hetero_kv_injection.attention_operators()
        assert {operator.settings.top_k_blocks for operator in operators} == {blocks}


def test_inject_takes_settings_with_a_recipes_name_and_they_win(q8_0_file):
    model = open_model(q8_0_file, dtype="float32").model
    injection = inject(model, "quest:top_k_blocks=2", command_line={"top_k_blocks": 7, **SMALL})
    assert {operator.settings.top_k_blocks for operator in injection.attention_operators()} == {2}


def test_threads_are_set_as_the_chat_sets_them(q8_0_file, monkeypatch):
    threads = []
    monkeypatch.setattr("hetero_kv.loading.set_threads", threads.append)
    open_model(q8_0_file, config="dense", threads_num=1, dtype="float32")
    assert threads == [1]


@pytest.mark.parametrize("call", [load_model, open_model])
def test_settings_without_rules_are_refused_by_name(call):
    with pytest.raises(ConfigError, match=r"kv_type, max_seq_len: settings of rules, and config is missing.*config="):
        call("nowhere.gguf", max_seq_len=64, kv_type="FP32")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"config": "quest", "top_k_bloks": 3}, "top_k_blocks"),
        ({"config": "qest"}, "quest"),
        ({"config": "quest", "budget": 3}, "budget"),
    ],
)
def test_a_mistake_in_rules_or_settings_is_named_before_the_model_is_looked_for(args, named):
    with pytest.raises(ConfigError, match=named):
        load_model("nowhere.gguf", **args)


def test_a_conversation_accepts_the_result_of_load_model(q8_0_file):
    loaded = load_model(q8_0_file, config="dense", dtype="float32", max_seq_len=256, kv_type="FP32")
    answer = Conversation(loaded).ask("hello", max_new_tokens=3)
    assert answer.text == Conversation(loaded.model, loaded.tokenizer).ask("hello", max_new_tokens=3).text
    with pytest.raises(HeteroKVError, match=r"tokenizer is missing.*load_model"):
        Conversation(loaded.model)


def test_inject_on_unpacked_weights_says_once_what_they_cost_and_what_keeps_them_packed(q8_0_file, caplog):
    model = load_model(q8_0_file, dtype="float32").model
    for _ in range(2):
        inject(model, "quest", command_line=SMALL)
        eject(model)
    (message,) = unpacked_warnings(caplog)
    assert "q8_0.gguf" in message
    assert "GB instead of about" in message
    assert f"load_model('{q8_0_file}', config=...)" in message


@pytest.mark.parametrize("how", ["numbers are required", "rules come first", "packed beneath", "no rules for weights"])
def test_no_warning_about_weights_of_the_requested_type(q8_0_file, caplog, how):
    if how == "numbers are required":
        model = load_model(q8_0_file, dtype="float32").model
        inject(model, "quest", command_line={**SMALL, "weights": "bf16"})
    elif how == "rules come first":
        opened = open_model(q8_0_file, dtype="float32")
        inject(opened.model, "quest", command_line=SMALL)
        opened.load()
    elif how == "packed beneath":
        inject(load_packed(q8_0_file, dtype="float32").model, "quest", command_line=SMALL)
    else:
        rule = {"match": {"name": r"self_attn$"}, "replace": {"class": "RetrievalAttention"}}
        inject(load_model(q8_0_file, dtype="float32").model, parse_rules({"rules": [rule], "long_context": SMALL}))
    assert unpacked_warnings(caplog) == []


def test_a_model_that_nobody_prepared_is_prepared_by_its_first_cache(q8_0_file, caplog, monkeypatch, prepares):
    monkeypatch.setattr("hetero_kv.rules.preparing._LONG", -1.0)
    opened = open_model(q8_0_file, dtype="float32")
    injection = inject(opened.model, "quest", command_line=SMALL)
    HeteroCache(opened.model, 64)
    assert not injection.preparation.is_done, "weights are not there yet"
    opened.load()
    caplog.set_level(logging.WARNING)
    HeteroCache(opened.model, 64)
    assert injection.preparation.is_done
    (said,) = [each.getMessage() for each in caplog.records if each.name == "hetero_kv.rules.preparing"]
    assert "kernels" in said
    assert "load_model(name, config=...)" in said


def test_an_evaluation_prepares_a_method_once_and_not_for_every_prompt(q8_0_file, monkeypatch, prepares):
    prepared, compile_all = [], Preparation._compile
    monkeypatch.setattr(
        Preparation, "_compile", lambda self, *args: (prepared.append(self.is_done), compile_all(self, *args))
    )
    model = ConfiguredModel(load_packed(q8_0_file, dtype="float32"), config_specs(["quest"]), settings=SMALL)
    assert prepared == [False, False], "the weights' own kernels, and the method's"
    for _ in range(2):
        with model.prefilled("quest", Prompt(IDS[0].tolist(), 64)) as ready:
            assert ready.logits.isfinite().all()
    assert prepared == [False, False]


def test_uncompilable_operators_are_skipped_and_named(q8_0_file, caplog, monkeypatch, prepares):
    loaded = load_model(q8_0_file, config="quest", dtype="float32", **SMALL)
    preparation = Preparation(loaded.model, loaded.model.hetero_kv_injection.operators)

    def fails(*_):
        raise ValueError("no such kernel")

    monkeypatch.setattr(RetrievalAttention, "compile_kernels", fails)
    preparation.compile_for_first_cache()
    assert "kernels are compiled on first use, not before the first answer: no such kernel" in caplog.text
    with pytest.raises(ValueError, match="no such kernel"):
        Preparation(loaded.model, loaded.model.hetero_kv_injection.operators).compile()


def test_an_error_of_a_kernel_reaches_the_caller_though_another_thread_met_it_first(q8_0_file, monkeypatch):
    def fails(*_):
        raise ValueError("no such kernel")

    monkeypatch.setattr(RetrievalAttention, "compile_kernels", fails)
    with pytest.raises(ValueError, match="no such kernel"):
        load_model(q8_0_file, config="quest", dtype="float32", **SMALL)
