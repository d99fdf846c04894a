"""Benchmarks of the project against its goals and its peers, in the environment that users have."""

import os
from collections.abc import Mapping

GIVEN_ENVIRONMENT: Mapping[str, str] = dict(os.environ)
"""The environment before `cpu_ops` changes it for this project's kernels; peers' processes run with it."""

# Import this before torch, as hetero_kv does; most benchmarks import hetero_kv first.
import hetero_kv.cpu_ops  # noqa: E402, F401
