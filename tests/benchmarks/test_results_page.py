"""Recipes at equal budgets, and the page of their results."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import results, results_page
from benchmarks.budgeted_recipes import FRACTIONS, RECIPES, SHIPPED, cells
from benchmarks.results import CELLS
from hetero_kv.evals.config_spec import config_specs
from hetero_kv.evals.outcome import Cost, Result
from hetero_kv.families.token_retrieval.choosers.magicpig import sampling_chance
from tests.support.slow_variants import with_slow


@pytest.mark.parametrize("length", with_slow([4096, 16384], slow=[16384]))
def test_every_recipe_attends_to_its_budget(length):
    chosen = cells(length)
    specs = config_specs([cell.spec for cell in chosen])
    assert len(specs) == len(RECIPES) * len(FRACTIONS) + 1
    for cell, spec in zip(chosen, specs, strict=True):
        found = spec.settings
        if cell.fraction == SHIPPED:
            assert (cell.recipe, found) == ("adaptive", {"max_dense_blocks": 0})
            continue
        if cell.recipe == "shadowkv":
            attended = found["sparse_budget"] + 8 * (found["outlier_chunks"] + 4)
        elif cell.recipe in ("cam", "bigbird"):
            attended = found["budget"]
        else:
            size = found["block_size"]
            # Local is longer by up to a block less a token, by half of it on average.
            around = found["sink_tokens"] + found["local_windows_len"] + (size - 1) / 2
            attended = around + chosen_tokens(found, length - around)
        assert attended == pytest.approx(length / cell.fraction, abs=8), cell


def chosen_tokens(found, context):
    """Tokens that a step attends to in a Context of this length."""
    if "hash_tables" in found:
        at_right_angles = torch.zeros(())
        return context * float(sampling_chance(at_right_angles, found["hash_bits"], found["hash_tables"]))
    for name, tokens in (("token_budget", 1), ("exact_clusters", 16)):
        if name in found:
            return found[name] * tokens
    return found["top_k_blocks"] * found["block_size"]


def line(sample, method, score, **counted):
    return Result(
        sample=sample,
        task="fidelity",
        prompt="",
        length=64,
        depth=None,
        method=method,
        score=score,
        parts={"top_1_agreement": score, "kl_divergence": 1 - score, "nll": 3 - score},
        cost=Cost(counted=counted),
    )


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs of the same samples: quest at two budgets, of which one has not answered all, and another recipe."""
    results = {
        "a": [
            *(line(name, "full", 1.0) for name in "xyz"),
            *(
                line(name, "quest:n=1", score, read_bytes=2000.0)
                for name, score in zip("xyz", (0.5, 0.75, 0.0), strict=True)
            ),
            *(line(name, "quest:n=2", 0.75, read_bytes=4000.0) for name in "xy"),
        ],
        "b": [line(name, "infllm:n=1", 0.25, read_bytes=1000.0) for name in "yxz"],
    }
    named = {"a": [["quest", 16, "quest:n=1"], ["quest", 8, "quest:n=2"]], "b": [["infllm", 16, "infllm:n=1"]]}
    for folder, cells_of_run in named.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / CELLS).write_text(json.dumps(cells_of_run))
    monkeypatch.setattr(results_page, "read_results", lambda path: results[path.parent.name])
    return [tmp_path / "a", tmp_path / "b"]


def test_rows_have_the_samples_that_all_of_them_have(runs):
    rows = {(row.recipe, row.fraction): row for row in results_page.rows_of(runs)}
    assert {len(row.results) for row in rows.values()} == {2}
    assert rows["quest", 16].values("score") == [0.5, 0.75]
    assert rows["infllm", 16].counted("read_bytes") == 1000
    assert results_page.rows_of([]) == []


def test_rows_come_recipe_by_recipe_from_the_smallest_budget_on(runs, tmp_path):
    (tmp_path / "b" / CELLS).write_text(json.dumps([["quest", SHIPPED, "infllm:n=1"]]))
    (tmp_path / "a" / CELLS).write_text(json.dumps([["infllm", 8, "quest:n=1"], ["infllm", 16, "quest:n=2"]]))
    rows = [(row.recipe, row.fraction) for row in results_page.rows_of(runs[::-1])]
    assert rows == [("full attention", None), ("infllm", 16), ("infllm", 8), ("quest", SHIPPED)]


def test_a_row_is_of_one_run(runs, tmp_path):
    (tmp_path / "b" / CELLS).write_text(json.dumps([["quest", 16, "infllm:n=1"]]))
    (of_first,) = (row for row in results_page.rows_of(runs) if row.fraction == 16)
    assert of_first.values("score") == [0.5, 0.75]
    (of_other,) = (row for row in results_page.rows_of(runs[::-1]) if row.fraction == 16)
    assert of_other.values("score") == [0.25, 0.25]


def test_the_table_has_means_intervals_and_bytes(runs):
    lines = results_page.fidelity_table(results_page.rows_of(runs)).splitlines()
    assert "| quest | 1/16 | 0.62 (0.50 to 0.75) | 0.38 (0.25 to 0.50) | 2 |" in lines
    assert "| full attention | all | 1.00 (1.00 to 1.00) | 0.000 (0.000 to 0.000) |  |" in lines


def test_the_table_of_perplexity_has_what_each_sample_has_above_full_attention(runs):
    lines = results_page.perplexity_table(results_page.rows_of(runs)).splitlines()
    assert "| full attention | all | 7.39 |  |  |" in lines
    # Likelihoods of 2.5 and 2.25 nats, where full attention has 2.
    assert "| quest | 1/16 | 10.75 | 0.38 (0.25 to 0.50) | 2 |" in lines


@pytest.mark.parametrize(("part", "task"), [("ruler", "ruler/nothing"), ("needle", "ruler/vt")])
def test_a_task_of_another_part_is_refused_before_the_model_is_loaded(part, task, tmp_path, monkeypatch, capsys):
    chosen = [part, "--haystack", "essays.json", "--out", str(tmp_path / "out"), "--tasks", task]
    monkeypatch.setattr("sys.argv", ["results", *chosen])
    monkeypatch.setattr(results, "load_packed", lambda _: pytest.fail("the model is loaded"))
    with pytest.raises(SystemExit):
        results.main()
    assert f"--tasks: {task} is none of {part}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
