"""After `compile_kernels` no kernel is compiled during an answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SLOW = (
    "dense",
    "adaptive",
    "shadowkv",
    "streaming_llm",
    "minference",
    "snapkv",
    "infllm",
    "h2o",
    "sparq",
    "self_extend",
)


@pytest.mark.parametrize("recipe", ["quest", *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_nothing_is_compiled_after_compile_kernels(recipe):
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.late_compilations", recipe, "float32"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    before, *uses = json.loads(ended.stdout).items()
    assert len(before[1]) > 5
    assert len(uses) == 11
    assert {use: made for use, made in uses if made} == {}
