"""Strided perplexity of fixed-memory methods, and the entries that they keep."""

from __future__ import annotations

import json
import statistics

import pytest
import torch

from hetero_kv import HeteroCache, HeteroKVError, eject, inject
from hetero_kv.evals import ConfiguredModel, RunOptions, config_specs, run
from hetero_kv.evals import perplexity as module
from hetero_kv.evals.config_spec import settings_for
from hetero_kv.evals.outcome import Result
from tests.support.slow_variants import with_few
from tests.support.tiny_evaluation import SPARSE, tiny_loaded

pytestmark = pytest.mark.usefixtures("no_plots")

LENGTH, PREFILL, STRIDE, BUDGET = 130, 60, 16, 30
TEXT = "".join(f"Line {n}: the {n * n}th word. " for n in range(30))[:LENGTH]
BOUNDED = {
    "streaming_llm": f"streaming_llm:budget={BUDGET}:stride=24",
    "cascade": f"cascade:budget={BUDGET}:sink_tokens=4:stride=24",
    "h2o": f"h2o:budget={BUDGET}",
    "d2o": f"d2o:budget={BUDGET}",
    "sirllm": f"sirllm:budget={BUDGET}:stride=24",
}


@pytest.fixture(scope="module")
def loaded():
    return tiny_loaded()


@pytest.fixture
def measured(loaded, tmp_path):
    """Runs the whole of a text under methods in strides; returns the run."""
    (tmp_path / "text.txt").write_text(TEXT)

    def measure(configs, stride, out="out", baseline=False, task="perplexity", **settings):
        options = RunOptions(
            lengths=(LENGTH,),
            depths=(50,),
            prompt_files=(tmp_path / "text.txt",),
            prefill_tokens=PREFILL,
            stride=stride,
            max_new_tokens=4,
        )
        model = ConfiguredModel(loaded, config_specs(configs), baseline=baseline, settings={**SPARSE, **settings})
        return run([task], model, tmp_path / out, options)

    return measure


def curve(result):
    return result.details["curve"]["nll"]


@torch.no_grad()
def reference(loaded, config, stride):
    """The likelihoods and the cache of plain calls of the model: the prefill, then `stride` tokens a call."""
    (spec,) = config_specs([config])
    inject(loaded.model, spec.rules, command_line=settings_for(spec, SPARSE))
    try:
        ids = loaded.tokenizer(TEXT, return_tensors="pt")["input_ids"]
        cache = HeteroCache(loaded.model, LENGTH, tokenizer=loaded.tokenizer)
        parts = [ids[:, :PREFILL], *ids[:, PREFILL:-1].split(stride, dim=1)]
        logits = torch.cat([loaded.model(part, past_key_values=cache).logits[0] for part in parts])[PREFILL - 1 :]
        return torch.nn.functional.cross_entropy(logits, ids[0, PREFILL:], reduction="none"), cache
    finally:
        eject(loaded.model)


# 69 tokens are fed: 16 leaves a rest of 5, 17 one of a single token, which is decoded; 23 none; 512 is one stride.
@pytest.mark.parametrize(
    ("policy", "stride"),
    with_few(
        [*((policy, STRIDE) for policy in BOUNDED), ("cascade", 17), ("d2o", 23), ("h2o", 512)],
        quick=[("h2o", STRIDE), ("d2o", 23), ("cascade", 17)],
    ),
)
def test_likelihoods_in_strides_are_those_of_plain_calls_of_the_model(loaded, measured, policy, stride):
    (result,) = measured([BOUNDED[policy]], stride).results
    nll, cache = reference(loaded, BOUNDED[policy], stride)
    assert len(nll) == LENGTH - PREFILL
    assert result.parts["nll"] == pytest.approx(nll.mean().item(), abs=1e-5)
    assert curve(result)[0] == pytest.approx(nll[0].item(), abs=1e-5)
    assert curve(result)[-1] == pytest.approx(nll[-1].item(), abs=1e-5)
    assert result.cost.counted["cached_entries"] == statistics.fmean(cache.statistics["cached_entries"])


@pytest.mark.parametrize("stride", with_few([STRIDE, 512], quick=[512]))
def test_where_the_budget_covers_the_text_every_stride_gives_the_untouched_models_likelihoods(measured, stride):
    config = f"streaming_llm:budget={LENGTH}"
    full, strided = measured([config], stride, "strided", baseline=True).results
    (one_by_one,) = measured([config], 1, "one").results
    assert curve(strided) == pytest.approx(curve(one_by_one), abs=1e-5)
    assert curve(strided) == pytest.approx(curve(full), abs=1e-5)
    assert strided.cost.counted["cached_entries"] == LENGTH - 1
    assert full.cost.counted.get("cached_entries") is None


def test_a_budget_that_does_not_cover_the_text_foretells_otherwise_in_every_stride(measured):
    full, strided = measured([BOUNDED["streaming_llm"]], STRIDE, "strided", baseline=True).results
    (one_by_one,) = measured([BOUNDED["streaming_llm"]], 1, "one").results
    values = [result.parts["nll"] for result in (full, strided, one_by_one)]
    assert all(abs(a - b) > 1e-3 for a, b in zip(values, [*values[1:], values[0]], strict=True))


def test_a_strides_likelihoods_are_the_same_in_tiles(measured, monkeypatch):
    (whole,) = measured([BOUNDED["h2o"]], 30, "whole").results
    monkeypatch.setattr(module, "_TILE", 10)
    (tiled,) = measured([BOUNDED["h2o"]], 30, "tiled").results
    assert curve(tiled) == pytest.approx(curve(whole), abs=1e-6)


def test_logits_are_taken_to_float32_a_tile_at_a_time(monkeypatch):
    seen, cross_entropy = [], torch.nn.functional.cross_entropy

    def watched(logits, *args, **kwargs):
        seen.append((len(logits), logits.dtype))
        return cross_entropy(logits, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", watched)
    assert len(module._nll(torch.randn(600, 7, dtype=torch.bfloat16), [3] * 600)) == 600
    assert seen == [(256, torch.float32), (256, torch.float32), (88, torch.float32)]


@pytest.mark.parametrize("recipe", ["quest", "streaming", "dense"])
def test_methods_that_prefill_with_full_attention_are_refused_in_strides(measured, tmp_path, recipe):
    expected = f"stride is 16, and '{recipe}' reads tokens that are fed together with full attention.*set --stride 1"
    with pytest.raises(HeteroKVError, match=expected):
        measured([BOUNDED["h2o"], recipe], STRIDE, baseline=True)
    assert not (tmp_path / "out").exists()


def test_grouped_positions_are_no_full_attention(measured):
    (result,) = measured(["self_extend:position_group=8:neighbour_window=8"], STRIDE).results
    (untouched,) = measured([], STRIDE, "full", baseline=True).results
    assert curve(result)[0] != pytest.approx(curve(untouched)[0], abs=1e-4)


def test_they_are_not_refused_under_tasks_that_know_no_strides(measured):
    assert len(measured(["streaming"], STRIDE, task="fidelity").results) == 1


def test_the_untouched_model_alone_is_measured_whatever_the_stride(measured):
    (first,), (second,) = (measured([], stride, str(stride), baseline=True).results for stride in (1, STRIDE))
    assert curve(first) == curve(second)


def test_a_method_of_bounded_and_of_retrieving_layers_is_measured_in_strides(measured, tmp_path):
    composed = tmp_path / "composed.yaml"
    composed.write_text(
        "extends: quest.yaml\n"
        "rules:\n"
        "  - match: {name: 'layers.[01].self_attn$'}\n"
        f"    replace: {{class: BoundedAttention, kwargs: {{policy: h2o, budget: {BUDGET}}}}}\n"
    )
    (result,) = measured([str(composed)], STRIDE).results
    assert result.cost.counted["cached_entries"] == BUDGET
    assert not result.cost.shared_prefill


def test_a_run_with_another_stride_does_not_go_on_in_the_same_folder(measured, tmp_path):
    first = measured([BOUNDED["h2o"]], STRIDE).results
    assert measured([BOUNDED["h2o"]], STRIDE).results == first
    with pytest.raises(HeteroKVError, match="holds a run with other settings: stride is 16 there and 8 now"):
        measured([BOUNDED["h2o"]], 8)
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("stride", [0, -4])
def test_a_stride_of_no_tokens_is_refused(stride):
    with pytest.raises(HeteroKVError, match=f"stride is {stride}; it must be a whole number of at least 1"):
        RunOptions(stride=stride)


@pytest.mark.parametrize("task", with_few(["fidelity", "perplexity", "recite"]))
def test_every_task_reports_the_entries_that_bounded_methods_hold(measured, tmp_path, task):
    methods = [BOUNDED["cascade"], BOUNDED["h2o"], "pyramidkv:budget=30:recent_tokens=8"]
    done = measured(methods, STRIDE, baseline=True, task=task)
    entries = {result.method: result.cost.counted.get("cached_entries") for result in done.results}
    assert entries.pop("full") is None
    assert list(entries) == methods
    assert all(0 < number <= BUDGET for number in entries.values())
    (of_h2o,) = json.loads((tmp_path / "out" / "costs.json").read_text())[BOUNDED["h2o"]].values()
    assert of_h2o["cached_entries"] == BUDGET
    cost = (tmp_path / "out" / "report.md").read_text().partition("## Cost")[2]
    rows = [line.split("|")[1:-1] for line in cost.splitlines() if line.startswith("| ")]
    number = {row[0].strip(): row[-1].strip() for row in rows}
    assert number["method"] == "entries"
    assert number["full"] == ""
    assert number[BOUNDED["h2o"]] == str(BUDGET)


def test_a_report_without_bounded_methods_has_no_column_of_entries(measured, tmp_path):
    measured(["streaming"], 1, baseline=True)
    report = (tmp_path / "out" / "report.md").read_text()
    (header,) = (line for line in report.splitlines() if "| decode tokens/s |" in line)
    assert [title.strip() for title in header.split("|")[5:-1]] == ["KV MB", "bytes read per token and layer"]
    assert "fed these tokens one by one" in report


def test_the_report_says_the_stride(measured, tmp_path):
    measured([BOUNDED["h2o"]], STRIDE)
    report = (tmp_path / "out" / "report.md").read_text()
    assert "Methods are fed these tokens in strides of 16" in report
    assert "Perplexity's decoded tokens are fed 16 at a time" in report


def test_a_line_from_before_entries_were_counted_is_still_a_result(measured):
    (result,) = measured([BOUNDED["h2o"]], STRIDE).results
    line = json.loads(result.to_json())
    assert line["cost"].pop("cached_entries") == BUDGET
    assert Result.from_json(json.dumps(line)).cost.counted.get("cached_entries") is None
