"""Triton kernels compute what the torch functions that define them compute."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu_ops.kernel_choice import runs_triton

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
HERE = Path(__file__).parent


def printed_by(script):
    root = HERE.parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(root)
    run = subprocess.run([sys.executable, HERE / script], cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def interpreted():
    return printed_by("interpreted_kernels.py")


@needs_triton
@pytest.mark.parametrize("kernel", ["merged", "rebuilt"])
def test_a_kernel_equals_its_twin_up_to_one_rounding(interpreted, kernel):
    assert len(interpreted[kernel]) >= 15
    # Sums of float32 may differ in their order, by a few roundings.
    limits = {case: 20 if "float32" in case.split(",")[0] else 1 for case in interpreted[kernel]}
    assert {case: apart for case, apart in interpreted[kernel].items() if not apart <= limits[case]} == {}


@needs_triton
def test_gathered_rows_are_the_rows_themselves(interpreted):
    assert set(interpreted["gathered"].values()) == {True}


@needs_triton
def test_kernels_compile_for_gpus_of_the_ampere_and_hopper_generations():
    code = printed_by("compiled_kernels.py")
    assert len(code) >= 6
    assert set(code.values()) == {"machine code"}


def test_the_cpu_does_without_triton():
    assert not runs_triton(torch.zeros(1))
