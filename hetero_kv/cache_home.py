"""The folder of everything that is kept on the disk for later processes."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """The folder of all fetched and kept files: HETERO_KV_HOME, or ~/.cache/hetero_kv."""
    return Path(os.environ.get("HETERO_KV_HOME") or "~/.cache/hetero_kv").expanduser()
