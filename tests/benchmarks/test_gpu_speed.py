"""`python -m benchmarks.gpu` runs at tiny size and keeps its time limit."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from transformers import DynamicCache

from benchmarks import gpu
from benchmarks.gpu_checks.long_prompt import TINY
from benchmarks.gpu_checks.setting import Setting, random_model
from benchmarks.gpu_speed import goals
from benchmarks.gpu_speed.attention_peers import CacheShape, FlexDecode, PeerUnavailable
from benchmarks.gpu_speed.budget import Budget, TimeUp
from benchmarks.gpu_speed.full_attention import FLASH, FLEX, FULL_ATTENTION, STATIC, FullAttention
from benchmarks.gpu_speed.measurements import GpuMeasurement, fitting_storage
from benchmarks.gpu_speed.step_parts import REST, WAITING
from benchmarks.gpu_speed.subject import SpeedRow
from hetero_kv.errors import OutOfMemoryError
from tests.support.devices import device_called

ROW = SpeedRow("quest", 400, 1, 2, None, 2.0, 500.0, 3_000_000_000, {"waits for queries": 0.5, REST: 1.5})


def not_compiled(attention, shape, device):
    raise PeerUnavailable("torch does not compile flex attention here")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_everything_is_measured_at_tiny_size(device, tmp_path, capsys, monkeypatch):
    report, on_gpu, is_real = tmp_path / "report.json", device == "cuda", torch.cuda.is_available()
    if on_gpu and not is_real:
        # A simulated device compiles nothing.
        monkeypatch.setattr(FlexDecode, "__init__", not_compiled)
    with device_called(device):
        words = ["--device", device, "--tiny", "--minutes", "30", "--without_checks", "--json", str(report)]
        assert gpu.main(words) == 0
        gc.collect()
    found = json.loads(report.read_text())
    # Flash decoding needs a GPU, and flex attention a compiler for it.
    lacking = FLASH if not on_gpu else FLEX
    assert found["failed"] == []
    assert {title.rpartition(", 400")[0] for title in found["left_out"]} == (set() if on_gpu and is_real else {lacking})
    resident = {(f"{name}, attend_on: gpu", 1) for name in ("quest", "adaptive", "adaptive_lean")}
    by_batch = {(name, batch) for name in ("untouched", "shadowkv") for batch in (1, 2)}
    full = {(name, 1) for name in FULL_ATTENTION if name not in (lacking if not is_real else "")}
    full |= {(name, 4) for name in (STATIC, FLASH) if on_gpu or name is STATIC}
    assert {(row["name"], row["batch"]) for row in found["rows"]} == by_batch | full | {
        ("ktransformers", 1), ("ktransformers, Q4_0", 1), ("quest", 1), ("minference", 1),
        *(resident | {("quest, attend_on: gpu, FP16", 3)} if on_gpu else set()),
        *({(f"quest, {way}", 1) for way in ("index_device: gpu", "attend_on: split")} if on_gpu else set()),
    }  # fmt: skip
    assert all(row["milliseconds"] > 0 for row in found["rows"])
    parts = {row["name"]: set(row["parts"]) for row in found["rows"]}
    assert ("waits for queries" in parts["quest"]) is on_gpu
    assert ("asks for values" in parts["shadowkv"]) is on_gpu
    assert all(WAITING in parts[name] for name, _ in resident if on_gpu)
    assert capsys.readouterr().out.count("\n| ") == len(found["rows"]) + 1


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize(
    ("name", "device"),
    [(STATIC, "cpu"), (FLEX, "cpu"), *(pytest.param(name, "cuda", marks=pytest.mark.cuda) for name in (STATIC, FLASH))],
)
def test_a_peer_computes_what_the_untouched_model_does(name, device):
    with device_called(device) as place:
        setting, tokens = Setting(place, True, 0, 0), 300
        model = random_model(setting, torch.bfloat16 if device == "cuda" else torch.float32, **TINY)
        peer = FullAttention(setting, model, name, 2, tokens, 3)
        plain, ids = DynamicCache(config=model.config), peer._ids.clone()
        for index, layer in enumerate(peer.cache.layers):
            plain.update(layer.keys[:, :, :tokens].clone(), layer.values[:, :, :tokens].clone(), index)
        peer.prepare()
        # A GPU's tokens run as one graph.
        assert (peer._graph is None) is (device == "cpu")
        for place_of_token in range(5):
            logits = model(ids, past_key_values=plain).logits
            ids = logits.argmax(dim=-1)
            if place_of_token > 1:
                found, expected = peer.decode().float().cpu(), logits.float().cpu()
                torch.testing.assert_close(found, expected, rtol=1e-5 if device == "cpu" else 0.02, atol=1e-2)
                ids = peer._ids.clone()
        del peer, plain
        gc.collect()


def test_another_attention_is_no_peer(monkeypatch):
    class Longer(FlexDecode):
        def begin(self, length):
            super().begin(length + 1)

    setting = Setting(torch.device("cpu"), True, 0, 0)
    monkeypatch.setitem(FULL_ATTENTION, FLEX, Longer)
    with pytest.raises(RuntimeError, match="Longer differs from torch's attention by"):
        FullAttention(setting, random_model(setting, torch.float32, **TINY), FLEX, 1, 300, 2)


def test_what_torch_does_not_compile_is_named():
    def refuse(*args, **kwargs):
        raise torch._dynamo.exc.TorchDynamoException("no compiler found\nand a long story")

    attention = FlexDecode(CacheShape(1, 2, 64, 32), torch.device("cpu"))
    attention._attend = refuse
    with pytest.raises(PeerUnavailable, match=r"torch does not compile flex attention here: no compiler found$"):
        attention(None, *torch.randn(3, 1, 2, 1, 32), None, scaling=1.0)


def test_keys_are_stored_as_finely_as_they_fit():
    half = 1000
    assert [fitting_storage(half, available) for available in (1500, 1000, 800, 500, 10)] == [
        "FP16", "Q8_0", "Q8_0", "Q4_0", "Q4_0",
    ]  # fmt: skip


def ends(lines):
    return [line.rpartition(": ")[2] for line in lines]


def test_a_row_with_a_goal_has_a_verdict():
    (name, tokens), (most, memory) = next(iter(goals.GOALS.items()))
    row = SpeedRow(name, tokens, 1, 32, None, most, 1e3 / most, int(memory))
    slower, larger = replace(row, milliseconds=most + 0.1), replace(row, gpu_bytes=int(memory) + 1)
    assert ends(goals.verdicts([ROW, row, slower, larger])) == ["met", "missed", "missed"]


def test_few_layers_meet_a_goal_only_if_all_would():
    (name, tokens), (most, memory) = next(iter(goals.GOALS.items()))
    row = SpeedRow(name, tokens, 1, 8, None, most / 4, 1e3 / most, int(memory / 4))
    undecided = replace(row, milliseconds=most)
    found = goals.verdicts([row, undecided, replace(row, milliseconds=most + 0.1)])
    assert ends(found)[::2] == ["met", "missed"]
    assert found[1].endswith("in 8 of 32 layers; no verdict, because the others were not measured")


def test_the_hosts_own_time_has_a_verdict():
    (name, tokens), (most, memory) = next(iter(goals.GOALS.items()))
    parts = {WAITING: most, REST: goals.HOST_GOAL}
    row = SpeedRow(name, tokens, 1, 32, None, most, 1e3 / most, int(memory), parts)
    assert ends(goals.verdicts([row])) == ["met", "met"]
    assert ends(goals.verdicts([replace(row, parts={**parts, REST: goals.HOST_GOAL + 0.01})])) == ["met", "missed"]


def test_a_prefill_has_a_verdict_beside_the_untouched_models():
    for (name, tokens), most in goals.PREFILL_GOALS.items():
        untouched = replace(ROW, name="untouched", tokens=tokens, prefill=1000.0)
        fast, slow = (replace(ROW, name=name, tokens=tokens, prefill=1000.0 / share) for share in (most, most + 0.01))
        assert ends(goals.verdicts([untouched, fast, slow])) == ["met", "missed"]
        assert goals.verdicts([fast])[0].endswith("no verdict, because that was not measured")
        assert goals.verdicts([untouched, replace(fast, tokens=tokens // 2)]) == []


def test_a_batch_has_a_verdict_beside_the_best_full_attention():
    many = replace(ROW, name="quest, attend_on: gpu, Q4_0", tokens=goals.BATCH_TOKENS, batch=goals.BATCH)
    peers = [
        replace(ROW, name=name, tokens=goals.BATCH_TOKENS, batch=7, tokens_per_s=speed)
        for name, speed in ((STATIC, 50.0), (FLASH, 100.0))
    ]
    fast, slow = (replace(many, tokens_per_s=100 * times) for times in (goals.BATCH_GOAL, goals.BATCH_GOAL - 0.01))
    found = goals.verdicts([*peers, fast, slow])
    assert ends(found) == ["met", "missed"]
    assert f"100.0 tokens/s ({FLASH}, 7 of them at once)" in found[0]
    assert goals.verdicts([fast])[0].endswith("no verdict, because that was not measured")


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


def test_a_run_that_is_ended_from_outside_has_what_it_measured(tmp_path, capsys):
    report = tmp_path / "report.json"

    def ended():
        # The file is written while the run goes on.
        assert [row["name"] for row in json.loads(report.read_text())["rows"]] == ["quest"]
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    measured = [GpuMeasurement(title, 0.0, run) for title, run in (("quick", lambda: ROW), ("ended", ended))]
    measured.append(GpuMeasurement("late", 0.0, lambda: pytest.fail("it began")))
    assert ran(measured, ["--json", str(report)]) == 0
    told = capsys.readouterr().out
    assert "| quest | 400 |" in told
    assert "left out: late (broken off when the time was over)" in told
    found = json.loads(report.read_text())
    assert set(found["left_out"]) == {"ended", "late"}
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_peer_that_cannot_run_is_named(capsys):
    def lacking():
        raise PeerUnavailable("torch does not compile flex attention here: no compiler")

    assert ran([GpuMeasurement("flex", 0.0, lacking)]) == 0
    assert "left out: flex (cannot run here: torch does not compile flex attention here" in capsys.readouterr().out


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
