"""`python -m benchmarks.gpu_check` runs on a CPU at tiny size without packages that it does not need."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_checks import chosen_sets, exactness
from hetero_kv.cpu_ops.weight_formats import FORMATS
from hetero_kv.families.retrieval import representatives
from hetero_kv.store import storage
from tests.support.devices import device_called

PACKED = (
    "a row times packed weights",
    "nine rows times packed weights",
    "packed weights unpacked",
    "rows of packed weights",
)
TINY = ["--device", "cpu", "--tiny"]


@pytest.mark.slow
def test_gpu_commands_need_no_packages_that_read_models():
    program = "import sys; sys.modules['gguf'] = sys.modules['flash_attn'] = None; import benchmarks.gpu"
    run = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_every_check_runs_on_a_cpu_without_the_packages_that_read_models(tmp_path):
    program = (
        "import sys; sys.modules['gguf'] = sys.modules['flash_attn'] = None; "
        "from benchmarks.gpu_check import main; sys.exit(main(sys.argv[1:]))"
    )
    root, report = Path(__file__).parents[2], tmp_path / "report.json"
    command = [sys.executable, "-c", program, *TINY, "--json", report]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(report.read_text())
    assert found["failed"] == 0
    by_group = {group: [check for check in found["checks"] if check["group"] == group] for group in gpu_check.CHECKS}
    names = " ".join(check["name"] for check in by_group["exactness"])
    operators = ("dense", "SlidingWindowAttention", "ShadowKVAttention", "float16", "bfloat16")
    assert all(name in names for name in (*operators, *storage.names(), *representatives.names()))
    recipes = [check["name"].split(", ")[-1] for check in by_group["long_prompt"]]
    assert recipes == ["ktransformers", "quest", "shadowkv"]
    assert all(check["figures"]["decode_ms_per_token"] > 0 for check in by_group["long_prompt"])
    assert {check["passed"] for check in by_group["kernels"]} == {None}
    assert len(run.stdout.splitlines()) == len(found["checks"]) + 2


def test_a_wrong_choice_fails_by_name_and_in_the_exit_status(monkeypatch, capsys):
    chosen = chosen_sets.chosen_chunks
    monkeypatch.setattr(chosen_sets, "chosen_chunks", lambda q, *rest: chosen(-q, *rest))
    assert gpu_check.main([*TINY, "--only", "sets"]) == 1
    assert "FAIL  sets: ShadowKV's landmarks, outliers and choice, float32" in capsys.readouterr().out


@pytest.mark.slow
def test_attention_that_leaves_tokens_out_is_no_full_attention():
    setting = gpu_check.Setting(torch.device("cpu"), True, 0, 0)
    subject = exactness.ExactnessSubject(setting, "llama")
    _, rules, _ = exactness.variants(subject.full_rank)["RetrievalAttention, MEAN representatives, FP16"]
    rules[-1]["replace"]["kwargs"]["top_k_blocks"] = 0
    assert subject.error_under(rules, torch.bfloat16) > 2 * subject.rounding[torch.bfloat16] + 2e-3


@pytest.mark.cuda
def test_it_runs_on_a_gpu(capsys):
    with device_called("cuda"):
        assert gpu_check.main(["--tiny", "--only", "kernels,sets,sparse,resident,experts"]) == 0
        # What is page-locked is released while there is a device.
        gc.collect()
    told = capsys.readouterr().out
    assert "pass  resident: adaptive_lean as by the CPU, bfloat16" in told
    assert "pass  resident: quest, index_device: gpu, as by the CPU, float16" in told
    assert "pass  resident: ktransformers, attend_on: split, as by the CPU, bfloat16" in told
    assert "pass  experts: gpt_oss in DRAM, weights q8_0, 1,000 rows, bfloat16" in told
    assert "pass  kernels: gathering of rows from page-locked DRAM, float16" in told
    for kernel in (
        "attention of a prompt, windowed, with sinks, float32",
        "what keys receive of a prompt's attention, float16",
        "sparse attention of a prompt, with sinks, bfloat16",
        "attention by token and distance, float32",
        "attention outside the lines, float16",
        "an entry written, bfloat16",
        "all entries but the lowest, float32",
        "entries gathered, bfloat16",
        "numbers drawn, float32",
        "keys rotated, float16",
        "likeness of an evicted key, float32",
        "an evicted entry merged, bfloat16",
        "estimated attention masses, float16",
        "choice by a share, float32",
        "single tokens from page-locked DRAM, bfloat16",
        "attention to single tokens, float16",
    ):
        assert f"pass  kernels: {kernel}" in told
    for recipe in ("minference", "flexprefill"):
        assert f"pass  sparse: sparse prefill's sets, {recipe}" in told
    for name in FORMATS:
        assert all(f"pass  kernels: {what}, {name}, bfloat16" in told for what in PACKED)
    assert " 0 failed, 0 left out" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_names_the_alternative(capsys):
    with pytest.raises(SystemExit):
        gpu_check.main([])
    assert "--device cpu --tiny" in capsys.readouterr().err
