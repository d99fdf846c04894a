"""What the project measures of itself and beside its peers, under the settings that its users have it under."""

import os
from collections.abc import Mapping

GIVEN_ENVIRONMENT: Mapping[str, str] = dict(os.environ)
"""As this process was given it: for a peer's process, which what `cpu_ops` sets for our own kernels is not for."""

# Before anything loads torch, as hetero_kv does: which most benchmarks import first.
import cpu_ops  # noqa: E402, F401
