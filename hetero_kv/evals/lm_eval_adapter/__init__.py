"""Runs the tasks of EleutherAI's lm-evaluation-harness (`lm_eval`) by a configured method.

`register` needs `lm_eval`; everything else does without it.
"""

from __future__ import annotations

from hetero_kv.evals.lm_eval_adapter.harness_model import HarnessModel
from hetero_kv.evals.lm_eval_adapter.lm import lm_class, register
from hetero_kv.evals.lm_eval_adapter.model_arguments import ModelArguments

__all__ = ["HarnessModel", "ModelArguments", "lm_class", "register"]
