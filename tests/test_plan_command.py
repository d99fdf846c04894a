"""`hetero-kv plan`: figures from the configuration alone, and the exit status if a plan does not fit."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from hetero_kv.cli import main

K = 1024


@pytest.fixture(autouse=True)
def _settings_file_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERO_KV_CONFIG", str(tmp_path / "settings.yaml"))
    monkeypatch.setenv("COLUMNS", "100")


def saved_config(folder, layers):
    """A folder with the configuration of InternLM2.5-7B's shape, of so many layers, without weights or tokenizer."""
    heads = {"num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 92544, "max_position_embeddings": 256 * K}
    AutoConfig.for_model("llama", **heads, **sizes).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All of its 32 layers."""
    return saved_config(tmp_path_factory.mktemp("seven billion"), layers=32)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    """Four layers, which are built in less time."""
    return saved_config(tmp_path_factory.mktemp("shallow"), layers=4)


@pytest.fixture
def plan(shallow, capsys):
    """Run the command on `shallow`; returns what it printed, parsed with `--json`, or its error where that is due."""

    def run(*words, status=0, model=shallow):
        assert main(["plan", "--model", str(model), *map(str, words)]) == status
        captured = capsys.readouterr()
        if status:
            return captured.err
        return json.loads(captured.out) if "--json" in words else captured.out

    return run


def test_the_articles_figures_stand_in_the_table(plan, folder):
    shown = plan("--dram", 200, model=folder)
    for tokens, gigabytes in (("4K", "0.54"), ("32K", "4.29"), ("128K", "17.18"), ("512K", "68.72"), ("1M", "137.44")):
        row = next(line for line in shown.splitlines() if f" {tokens} " in line)
        assert row.split("│")[2].strip() == gigabytes


def test_a_max_seq_len_beyond_the_models_context_is_reported(plan):
    warning = "max_seq_len: 300,000 tokens exceed the 262,144 that the model was trained for"
    assert warning in plan("--dram", 200, "--max_seq_len", 300_000)
    assert "was trained for; beyond" not in plan("--dram", 200, "--max_seq_len", 200_000)


def test_lengths_that_do_not_fit_are_marked(plan, folder):
    # On a CPU without bfloat16 weights would be unpacked to float32, and these not fit.
    rows = plan("--dram", 40, "--gpu_memory", 18, "--dtype", "bfloat16", model=folder).splitlines()
    cells = {row.split("│")[1].strip(): row.split("│")[4:7] for row in rows if row.startswith("│ ") and "K" in row[:9]}
    assert [cell[-2:].strip() for cell in (c.strip() for c in cells["64K"])] == ["✓", "✓", "✓"]
    assert [c.strip()[-1] for c in cells["512K"]] == ["✗", "✗", "✗"]


def test_without_a_gpu_its_memory_is_shown_and_left_open(plan, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    row = next(line for line in plan("--dram", 200).splitlines() if " 64K " in line)
    assert row.split("│")[6].strip().endswith("?")


def test_the_object_adds_up(plan, folder):
    mean = ("--config", "ktransformers", "--representative_type", "MEAN")
    report = plan("--json", "--dram", 64, "--dtype", "bfloat16", "--device", "cpu", *mean, model=folder)
    assert report["bytes_per_token"] == {"keys": 65536, "values": 65536, "representatives": 512, "total": 131584}
    assert report["free_dram"] == 64 * 10**9
    assert report["computes_on"] == "cpu"
    at_64k = report["lengths"][str(64 * K)]
    assert at_64k["cpu"]["keys_values"] == 64 * K * 131072
    terms = ("keys_values", "representatives", "weights", "windows", "sliding", "untouched")
    prefill = ("layer_kv", "hidden", "activations")
    assert at_64k["cpu"]["dram"] == sum(at_64k["cpu"][term] for term in terms + prefill)
    assert at_64k["cpu"]["gpu"] == 0
    in_dram = ("keys_values", "representatives", "hidden_in_dram")
    assert at_64k["gpu"]["dram"] == sum(at_64k["gpu"][term] for term in in_dram)
    assert at_64k["gpu"]["weights"] == pytest.approx(7.74e9 * 2, rel=0.01)


def test_the_largest_length_is_accepted_and_the_next_refused(plan):
    machine = ("--dram", 6, "--dtype", "bfloat16", "--device", "cpu")
    largest = plan("--json", *machine)["largest_max_seq_len"]
    assert largest > 10_000
    plan("--max_seq_len", largest, *machine)
    plan("--max-seq-len", largest + 1, *machine, status=2)


def test_a_length_that_cannot_fit_is_an_error_with_the_number_that_would(capsys, shallow):
    words = ["plan", "--model", str(shallow), "--dram", "8", "--max_seq_len", "9000000", "--json", "--device", "cpu"]
    assert main(words) == 2
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert "error: max_seq_len is 9000000: 9000000 tokens take" in captured.err
    assert f"max_seq_len {report['largest_max_seq_len']} would fit" in captured.err


def test_a_length_from_the_rules_file_is_checked_alike(plan, tmp_path):
    rules = tmp_path / "long.yaml"
    rules.write_text("extends: ktransformers.yaml\nlong_context: {max_seq_len: 8000000}\n")
    plan("--config", rules, "--dram", 16, "--device", "cpu", status=2)
    plan("--config", rules, "--dram", 16, "--device", "cpu", "--max_seq_len", 1000)


def test_auto_ends_at_the_models_context(plan):
    report = plan("--json", "--dram", 900, "--device", "cpu")
    assert report["auto_max_seq_len"] == 256 * K < report["largest_max_seq_len"]


def test_settings_change_the_plan(plan):
    mean = ("--config", "ktransformers", "--json", "--dram", 200, "--representative_type", "MEAN")
    half = plan(*mean)["bytes_per_token"]
    full = plan(*mean, "--kv_type", "FP32")["bytes_per_token"]
    assert full["total"] == 2 * half["total"]
    smaller_blocks = plan(*mean, "--block_size", 64)["bytes_per_token"]
    assert smaller_blocks["representatives"] == 2 * half["representatives"]


def test_a_gpus_size_bounds_the_length(plan):
    small, large = (plan("--json", "--dram", 900, "--gpu_memory", size)["largest_max_seq_len"] for size in (6, 20))
    assert small < large
    assert "the GPU's memory" in plan("--dram", 900, "--gpu_memory", 6, "--max_seq_len", large, status=2)


def test_a_config_file_is_a_model_too(plan, shallow):
    assert plan("--json", "--dram", 200, model=shallow / "config.json")["bytes_per_token"]["keys"] == 8192
    assert "there is no configuration" in plan(model=shallow / "other.json", status=2)


@pytest.mark.parametrize("words", [("--dram", "much"), ("--gpu_memory", "-1"), ("--dram", "nan")])
def test_a_size_that_is_no_size_is_refused_by_name(plan, words):
    assert f"{words[0][2:]} is '{words[1]}'; it must be a number of GB above 0" in plan(*words, status=2)


def test_a_model_that_is_no_language_model_is_refused(plan, tmp_path):
    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    assert "cannot be built from its ViTConfig" in plan(model=tmp_path, status=2)


def test_a_bounded_cache_has_room_for_any_length(plan):
    assert "in reserve: any; the model was trained for" in plan("--config", "tova", "--dram", 200)


def test_sparse_speculation_adds_mean_keys_and_where_it_is_off_nothing(plan, caplog):
    machine = ("--json", "--dram", 60, "--device", "cpu", "--config", "dense")
    without, drafting = plan(*machine), plan(*machine, "--speculation", "sparse")
    at_64k = drafting["lengths"][str(64 * K)]
    # Four layers of 8 heads with 128 numbers, of every 32 tokens; the newest 512 have none.
    assert at_64k["cpu"]["mean_keys"] == 4 * 8 * 128 * 4 * (64 * K - 512) // 32
    assert at_64k["cpu"]["dram"] - without["lengths"][str(64 * K)]["cpu"]["dram"] == at_64k["cpu"]["mean_keys"]
    assert at_64k["gpu"]["mean_keys"] == 0
    assert drafting["largest_max_seq_len"] < without["largest_max_seq_len"]
    assert caplog.messages == []
    bounded = plan(*machine[:-1], "h2o", "--speculation", "sparse")
    assert bounded["lengths"][str(64 * K)]["cpu"]["mean_keys"] == 0
    assert ["BoundedAttention" in line for line in caplog.messages] == [True]
    assert "speculation is 'draft.gguf'; plan takes" in plan(*machine, "--speculation", "draft.gguf", status=2)


@pytest.mark.parametrize(
    ("recipe", "memory", "place"),
    [
        ("quest", 64, "gpu or cpu: read rates that the first context measures decide; planned as if the GPU attended"),
        ("retroinfer", 64, "gpu or cpu: read rates that the first context measures decide"),
        ("sparq", 64, "chooser sparq runs on the CPU"),
        # What is chosen by fits beside the weights, and all keys and values of two layers do not.
        ("quest", 6, "GB of its memory, and 6.00 GB are free"),
    ],
)
def test_what_auto_gives_a_gpu_is_told(plan, recipe, memory, place):
    words = ("--config", recipe, "--dram", 500, "--gpu_memory", memory)
    shown = {attend_on: plan(*words, "--json", "--attend_on", attend_on) for attend_on in ("auto", "cpu")}
    chosen = shown["auto"].pop("attend_on")
    assert place in chosen
    assert shown["cpu"].pop("attend_on") is None
    if not chosen.startswith("cpu: "):
        shown["cpu"] = plan(*words, "--json", "--attend_on", "gpu")
        assert shown["cpu"].pop("attend_on") is None
    for report in shown.values():
        # DRAM of a machine that computes.
        del report["free_dram_limits"]
    assert shown["auto"] == shown["cpu"]
    assert f"attend_on: auto, with a GPU: {chosen}" in plan(*words, "--attend_on", "auto")
    assert "attend_on" not in plan(*words)
