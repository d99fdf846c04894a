"""The tasks, one module per task or family of tasks; importing the package registers them all."""

from hetero_kv.evals.tasks import (  # noqa: I001 the order of registration is the order of every list of tasks
    needle,
    passkey,
    kv_retrieval,
    multi_turn_needle,
    ruler_niah,
    ruler_vt,
    ruler_cwe,
    ruler_fwe,
    ruler_qa,
)
from hetero_kv.evals import formats

__all__ = [
    "formats",
    "kv_retrieval",
    "multi_turn_needle",
    "needle",
    "passkey",
    "ruler_cwe",
    "ruler_fwe",
    "ruler_niah",
    "ruler_qa",
    "ruler_vt",
]
