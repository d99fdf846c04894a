"""Where a run was made: what its figures, but not its settings, depend on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("hetero-kv", "torch", "transformers", "numba", "numpy")


def environment(command_line: str | None) -> dict[str, Any]:
    """Versions, processor and threads, as plain data."""
    return {
        "command_line": command_line,
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": _gpu(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
