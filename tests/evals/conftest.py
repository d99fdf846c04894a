"""Fixtures of evaluations."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def no_plots():
    """Reports without plots, which take seconds to draw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetero_kv.evals.report.draw_plots", lambda folder, summary: ([], None))
        yield
