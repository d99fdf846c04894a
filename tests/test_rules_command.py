"""`hetero-kv rules` prints layer by layer what a rules file injects, without the model's weights."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from hetero_kv.cli import main
from hetero_kv.commands.layer_report import grouped
from hetero_kv.rules.injecting import inject
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def _settings_file_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERO_KV_CONFIG", str(tmp_path / "settings.yaml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The configuration of a model of twelve layers, without weights."""
    folder = tmp_path_factory.mktemp("models") / "twelve"
    shape = {"num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    AutoConfig.for_model("llama", **shape).save_pretrained(folder)
    return folder


@pytest.fixture
def layered(tmp_path):
    """Rules of three methods: dense layers, one untouched layer, and the rest."""
    path = tmp_path / "layered.yaml"
    path.write_text(
        r"""
extends: ktransformers.yaml
rules:
  - match: {name: '\.layers\.[01]\.self_attn$'}
    replace: {class: hetero_kv.operators.RetrievalAttention, kwargs: {top_k_blocks: all}}
  - match: {name: '\.layers\.5\.self_attn$'}
    replace: {class: default}
"""
    )
    return path


@pytest.fixture
def rules(folder, capsys):
    """Run the command; returns what it printed, parsed with `--json`, or its error where that is due."""

    def run(*words, status=0, model=folder):
        assert main(["rules", *map(str, words), "--model", str(model)]) == status
        captured = capsys.readouterr()
        if status:
            return captured.err
        return json.loads(captured.out) if "--json" in words else captured.out

    return run


def spans(report, module="model.layers.*.self_attn"):
    return [(row["first"], row["last"], row["operator"]) for row in report["modules"] if row["module"] == module]


def test_equal_neighbours_are_one_row(rules):
    report = rules("ktransformers", "--json")
    assert spans(report) == [(0, 11, "RetrievalAttention")]
    assert spans(report, "model.layers.*") == [(0, 11, "ChunkedDecoderLayer")]
    assert spans(report, "model.norm") == [(None, None, "ChunkedModule")]


def test_layers_with_other_settings_or_none_are_rows_of_their_own(rules, layered):
    report = rules(layered, "--json")
    assert spans(report) == [
        (0, 1, "RetrievalAttention"),
        (2, 4, "RetrievalAttention"),
        (5, 5, "not replaced"),
        (6, 11, "RetrievalAttention"),
    ]
    dense, sparse, untouched, _ = (row for row in report["modules"] if row["module"].endswith("self_attn"))
    assert dense["settings"]["top_k_blocks"] == "all"
    assert sparse["settings"]["top_k_blocks"] == 96
    assert untouched["settings"] == {}


def test_the_rule_of_every_row_is_named(rules, layered):
    shown = rules(layered).splitlines()
    assert any(line.split()[:2] == ["0-1", "RetrievalAttention"] and line.endswith("(rule 1)") for line in shown)
    assert any("2-4 " in line and "(ktransformers.yaml: rule 2)" in line for line in shown)
    assert any("not replaced" in line and "(no operator)" in line for line in shown)


def test_a_pyramid_is_shown_as_each_layer_has_it(rules):
    report = rules("ktransformers", "--top_k_blocks", "pyramid(1, 12)", "--json")
    budgets = [row["settings"]["top_k_blocks"] for row in report["modules"] if row["settings"]]
    assert budgets == list(range(12, 0, -1))


def test_only_non_default_settings_are_shown_without_all(rules):
    shown = rules("ktransformers", "--local_windows_len", 77, "--chunk_size", 55)
    assert "local_windows_len 77" in shown
    assert "engine: chunk_size 55" in shown
    assert "sink_tokens" not in shown
    assert "sink_tokens 128" in rules("ktransformers", "--all")


def test_weights_that_stay_numbers_have_no_rows(rules):
    assert "Quantized" not in rules("ktransformers")
    assert "weights q8_0" in rules("ktransformers", "--weights", "q8_0")


def test_modules_with_the_same_rows_stand_under_one_heading(rules):
    shown = rules("ktransformers", "--weights", "q8_0").splitlines()
    heading = next(place for place, line in enumerate(shown) if line.startswith("model.layers.*.self_attn.q_proj"))
    assert shown[heading].endswith("k_proj, v_proj, o_proj, model.layers.*.mlp.gate_proj, up_proj, down_proj")
    assert shown[heading + 1].split()[:2] == ["0-11", "QuantizedLinear"]
    assert sum("QuantizedLinear" in line for line in shown) == 2  # the layers', and the head
    report = rules("ktransformers", "--weights", "q8_0", "--json")
    assert spans(report, "model.layers.*.mlp.up_proj") == [(0, 11, "QuantizedLinear")]


def test_sliding_layers_show_the_operator_that_they_get():
    rows = grouped(inject(tiny_model("gemma2"), "ktransformers"))
    attention = [(row.first, row.last, row.operator) for row in rows if row.module.endswith("self_attn")]
    assert attention == [
        (0, 0, "SlidingWindowAttention"),
        (1, 1, "RetrievalAttention"),
        (2, 2, "SlidingWindowAttention"),
    ]


def test_a_rule_that_matches_nothing_is_an_error(rules, tmp_path):
    path = tmp_path / "lost.yaml"
    path.write_text(r"[{match: {name: 'no\.such$'}, replace: {class: hetero_kv.operators.RetrievalAttention}}]")
    assert "matches no module of LlamaForCausalLM" in rules(path, status=2)


def test_without_a_rules_file_the_command_says_what_it_needs(capsys):
    assert main(["rules"]) == 2
    assert "RULES" in capsys.readouterr().err


def test_the_policy_of_bounded_layers_is_shown(rules):
    assert "policy streaming_llm" in rules("streaming_llm")


@pytest.mark.parametrize(
    ("recipe", "method"),
    with_few(
        [
            ("quest", "QUEST, 2 per block, SEPARATE"),
            ("ktransformers", "DYNAMIC, 1 per block, SHARED"),
            ("shadowkv:rank=16", "rank 16"),
            ("tova", "policy tova"),
            ("dense", "DYNAMIC, 1 per block, SHARED"),
        ],
        quick=3,
    ),
)
def test_every_row_says_its_method_in_words(rules, recipe, method):
    rows = rules(recipe, "--json")["modules"]
    assert {row["method"] for row in rows if row["module"].endswith("self_attn")} == {method}
    assert method in next(line for line in rules(recipe).splitlines() if "Attention " in line)


def test_every_value_says_where_it_came_from(rules, tmp_path):
    (tmp_path / "settings.yaml").write_text("long_context: {layer_step: 2, chunk_size: 99}")
    (tmp_path / "mine.yaml").write_text(
        r"""
extends: quest.yaml
long_context: {max_seq_len: 640}
rules:
  - match: {name: '\.layers\.[4-7]\.self_attn$'}
    replace: {class: hetero_kv.operators.RetrievalAttention, kwargs: {top_k_blocks: 5}}
"""
    )
    mine = tmp_path / "mine.yaml"
    report = rules(mine, "--kv_type", "FP32", "--json")
    dense, first, own, last = (row for row in report["modules"] if row["module"].endswith("self_attn"))
    assert [(row["first"], row["last"]) for row in (dense, first, own, last)] == [(0, 1), (2, 3), (4, 7), (8, 11)]
    assert dense["sources"]["top_k_blocks"] == "overruled in this layer"
    expected = {
        "top_k_blocks": f"{mine}: rule 1",
        "representative_type": "injection_rules/quest.yaml: rule 1",
        "block_size": "injection_rules/quest.yaml: long_context",
        "kv_type": "command line",
        "layer_step": "settings file",
        "token_step": "default",
    }
    assert {name: own["sources"][name] for name in expected} == expected
    assert set(own["sources"]) == set(own["settings"])
    assert report["engine_sources"] == {
        "chunk_size": "injection_rules/ktransformers.yaml: long_context",
        "max_seq_len": f"{mine}: long_context",
        "dram_budget_gb": "default",
        "threads_num": "default",
        "attention_backend": "default",
        "cuda_graphs": "default",
        "hidden_device": "default",
        "weights_device": "default",
        "experts_device": "default",
        "attend_on": "default",
        "index_device": "default",
        "measure_recall": "default",
        "packed_cache_gb": "default",
    }
    line = next(line for line in rules(mine, "--kv_type", "FP32").splitlines() if line.startswith("  4-7 "))
    assert "top_k_blocks 5 [rule 1]" in line
    assert "representative_num 2, head_select_mode SEPARATE, dense_layer_num 2 [quest.yaml: rule 1]" in line
    assert "kv_type FP32 [command line]" in line
    assert "layer_step 2 [settings file]" in line
