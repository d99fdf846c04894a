"""The check of commit subjects accepts valid ones and names the mistakes of others."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_PATH = Path(__file__).parents[1] / ".ci" / "commit_subjects.py"
_SPEC = importlib.util.spec_from_file_location("commit_subjects", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
commit_subjects = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(commit_subjects)


@pytest.mark.parametrize(
    "subject", ["engine: share one store per model", "cpu_ops/simd: drop eight_lanes", "a: " + "x" * 69]
)
def test_a_subject_with_an_area_passes(subject):
    assert commit_subjects.problem(subject) is None


@pytest.mark.parametrize(
    ("subject", "reason"),
    [
        ("What fwe's figures are words of, and what changed in benchmarks", "area: imperative"),
        ("engine:share one store", "area: imperative"),
        ("engine: share one store.", "full stop"),
        ("Engine: share one store", "area: imperative"),
        ("a: " + "x" * 70, "73 characters"),
    ],
)
def test_any_other_subject_is_named_with_the_reason(subject, reason):
    assert reason in commit_subjects.problem(subject)
