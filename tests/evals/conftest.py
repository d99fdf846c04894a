"""Fixtures of evaluations."""

from __future__ import annotations

import pytest


@pytest.fixture
def no_plots(monkeypatch):
    """Reports without plots, which take seconds to draw."""
    monkeypatch.setattr("hetero_kv.evals.report.draw_plots", lambda folder, summary: ([], None))
