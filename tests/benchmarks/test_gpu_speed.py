"""`python -m benchmarks.gpu` runs at tiny size and keeps its time limit."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_speed.budget import Budget, TimeUp
from benchmarks.gpu_speed.measurements import GpuMeasurement
from benchmarks.gpu_speed.step_parts import REST
from benchmarks.gpu_speed.subject import SpeedRow
from hetero_kv.errors import OutOfMemoryError
from tests.support.devices import device_called

ROW = SpeedRow("quest", 400, 1, 2, None, 2.0, 500.0, 3_000_000_000, {"waits for queries": 0.5, REST: 1.5})


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_everything_is_measured_at_tiny_size(device, tmp_path, capsys):
    report = tmp_path / "report.json"
    with device_called(device):
        words = ["--device", device, "--tiny", "--minutes", "30", "--without_checks", "--json", str(report)]
        assert gpu.main(words) == 0
        gc.collect()
    found = json.loads(report.read_text())
    assert (found["failed"], found["left_out"]) == ([], {})
    resident = [(f"{name}, attend_on: gpu", 1) for name in ("quest", "adaptive", "adaptive_lean")]
    by_batch = {(name, batch) for name in ("untouched", "shadowkv") for batch in (1, 2)}
    assert {(row["name"], row["batch"]) for row in found["rows"]} == by_batch | {
        ("ktransformers", 1), ("ktransformers, Q4_0", 1), ("quest", 1), ("minference", 1),
        *(resident if device == "cuda" else []),
    }  # fmt: skip
    assert all(row["milliseconds"] > 0 for row in found["rows"])
    parts = {row["name"]: set(row["parts"]) for row in found["rows"]}
    assert ("waits for queries" in parts["quest"]) is (device == "cuda")
    assert ("asks for values" in parts["shadowkv"]) is (device == "cuda")
    assert capsys.readouterr().out.count("\n| ") == len(found["rows"]) + 1


def test_a_row_with_a_goal_has_a_verdict():
    (name, tokens), (most, memory) = next(iter(gpu.GOALS.items()))
    row = SpeedRow(name, tokens, 1, 32, None, most, 1e3 / most, int(memory))
    slower, larger = replace(row, milliseconds=most + 0.1), replace(row, gpu_bytes=int(memory) + 1)
    found = gpu.verdicts([ROW, row, slower, larger])
    assert [line.rpartition(": ")[2] for line in found] == ["met", "missed", "missed"]


def test_a_sparse_prefill_has_a_verdict_beside_the_untouched_models():
    (name, tokens), most = next(iter(gpu.PREFILL_GOALS.items()))
    untouched = replace(ROW, name="untouched", tokens=tokens, prefill=1000.0)
    fast, slow = (replace(ROW, name=name, tokens=tokens, prefill=1000.0 / share) for share in (most, most + 0.01))
    assert [line.rpartition(": ")[2] for line in gpu.verdicts([untouched, fast, slow])] == ["met", "missed"]
    assert gpu.verdicts([fast])[0].endswith("no verdict, because that was not measured")
    assert gpu.verdicts([untouched, replace(fast, tokens=tokens // 2)]) == []


def ran(measurements, words=()):
    """The exit status of a run of these measurements."""

    class Given(list):
        def learn(self, row):
            pass

    with patch.object(gpu, "Measurements", lambda setting: Given(measurements)):
        return gpu.main(["--device", "cpu", "--tiny", "--without_checks", *words])


def test_slow_measurements_are_skipped_or_stopped(capsys):
    def endless():
        while True:
            time.sleep(0.01)

    measured = [
        GpuMeasurement("quick", 0.0, lambda: ROW),
        GpuMeasurement("long", 1e6, lambda: ROW),
        GpuMeasurement("endless", 0.0, endless),
        GpuMeasurement("late", 0.0, lambda: ROW),
    ]
    assert ran(measured, ["--minutes", "0.01"]) == 0
    told = capsys.readouterr().out
    assert "left out: long (would take some 1000000 s" in told
    assert "left out: endless (broken off when the time was over)" in told
    assert "left out: late (broken off when the time was over)" in told
    assert "1 rows, 0 failed, 3 left out" in told
    assert (
        "| quest | 400 | 1 | 2 | filled | 2.00 | 500.0 | 3.0 | waits for queries 0.50, the model, launches 1.50 |"
        in told
    )


def test_rows_can_be_chosen_by_their_titles(capsys):
    def not_selected():
        pytest.fail("it was measured")

    measured = [
        GpuMeasurement("quest, 32,768 tokens", 0.0, lambda: ROW),
        GpuMeasurement("untouched, 32,768 tokens", 0.0, not_selected),
        GpuMeasurement("shadowkv, 16,384 tokens, 4 rows", 0.0, lambda: ROW),
    ]
    assert ran(measured, ["--only", "quest, 32;4 rows"]) == 0
    assert "2 rows, 0 failed, 0 left out" in capsys.readouterr().out
    assert ran(measured[:1], ["--only", "quest;infllm"]) == 1
    told = capsys.readouterr().out
    assert "--only infllm: no row has that in its title; there are quest, 32,768 tokens" in told
    assert "1 rows, 1 failed, 0 left out" in told


def test_measurements_without_memory_are_skipped_and_errors_are_failures(capsys):
    def raising(error):
        def run():
            raise error

        return run

    measured = [
        GpuMeasurement("large", 0.0, raising(OutOfMemoryError("no room\nat all"))),
        GpuMeasurement("wrong", 0.0, raising(RuntimeError("logits that are not finite"))),
    ]
    assert ran(measured) == 1
    told = capsys.readouterr().out
    assert "left out: large (no room)" in told
    assert "0 rows, 1 failed, 1 left out" in told


def test_a_budget_that_is_spent_begins_nothing():
    budget = Budget(0.0)
    assert budget.left == 0
    with pytest.raises(TimeUp), budget.enforced():
        pytest.fail("it began")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_names_the_alternative(capsys):
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "--device cpu --tiny" in capsys.readouterr().err
