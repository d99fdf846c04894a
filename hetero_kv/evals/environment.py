"""The environment of a run, apart from its settings: speed and memory depend on it."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hetero_kv.cpus import usable_cpus

PACKAGES = ("hetero-kv", "torch", "transformers", "numba", "numpy")


def environment(command_line: str | None, device: torch.device | None = None) -> dict[str, Any]:
    """Versions, processor, threads and the GPU, as plain data; `device` is the model's, if known."""
    return {
        "command_line": command_line,
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cpus": usable_cpus(),
        "gpu": _gpu(device),
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


def _gpu(device: torch.device | None) -> str | None:
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(device if device is not None and device.type == "cuda" else None)
