"""The evaluation harness: the quality of every method, on tasks of papers and on the user's texts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_kv.evals.comparison import Comparison, compare
    from hetero_kv.evals.config_spec import config_specs
    from hetero_kv.evals.configured_model import ConfiguredModel
    from hetero_kv.evals.options import RunOptions
    from hetero_kv.evals.packed_model import load_packed
    from hetero_kv.evals.runner import Run, run
    from hetero_kv.evals.sample import Sample, Score
    from hetero_kv.evals.subject import CallableSubject

__all__ = [
    "CallableSubject",
    "Comparison",
    "ConfiguredModel",
    "Run",
    "RunOptions",
    "Sample",
    "Score",
    "compare",
    "config_specs",
    "load_packed",
    "run",
]

_HOME = {
    "CallableSubject": "subject",
    "Comparison": "comparison",
    "ConfiguredModel": "configured_model",
    "Run": "runner",
    "RunOptions": "options",
    "Sample": "sample",
    "Score": "sample",
    "compare": "comparison",
    "config_specs": "config_spec",
    "load_packed": "packed_model",
    "run": "runner",
}


def __getattr__(name: str) -> Any:
    # Samples and scorers need neither torch nor transformers, which take seconds to import.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
