"""Chooses the device and the dtype of a model."""

from __future__ import annotations

import difflib
import os
import warnings
from pathlib import Path

import torch

from hetero_kv.models.errors import ModelError

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
# x86 instructions that multiply bfloat16 numbers, as /proc/cpuinfo spells them.
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


#: The file with the loaded NVIDIA driver's version, on Linux.
DRIVER = Path("/proc/driver/nvidia/version")


def resolve_device(device: str) -> torch.device:
    """The device called `device`: `auto` (a CUDA GPU if there is one, else the CPU), `cpu`, `cuda` or `cuda:N`.

    Warns if `auto` is the CPU because torch cannot use the machine's GPU.

    Raises:
        ModelError: not a device of this machine.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    unused = "" if gpus else unused_gpu()
    if device == "auto":
        if unused:
            warnings.warn(f"{unused}; the model computes on the CPU", RuntimeWarning, stacklevel=2)
        return torch.device("cuda" if gpus else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        resolved = None
    if resolved is None or resolved.type not in ("cpu", "cuda"):
        raise ModelError(f"device is {device!r}; give auto, cpu, cuda or cuda:N")
    if resolved.type == "cuda" and (resolved.index or 0) >= gpus:
        why = f" ({unused})" if unused else ""
        raise ModelError(
            f"device is {device!r}, and this machine has {gpus} CUDA GPUs that torch can use{why}; give auto or cpu"
        )
    return resolved


def unused_gpu() -> str:
    """The reason why torch finds no GPU although an NVIDIA driver is loaded; "" without a driver.

    It is "" too if the user hides the GPU (CUDA_VISIBLE_DEVICES).
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    try:
        version = DRIVER.read_text().splitlines()[0].partition(":")[2].strip()
    except (OSError, IndexError):
        return ""
    if torch.version.cuda is None:
        return (
            f"this machine has a GPU ({version}), and torch {torch.__version__} lacks CUDA; install a build with CUDA"
        )
    return (
        f"this machine has a GPU ({version}), for which torch {torch.__version__} needs a driver for CUDA "
        f"{torch.version.cuda}; update the driver, or install a torch for an older CUDA"
    )


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The torch dtype called `dtype`: `auto`, `float32`, `bfloat16`, `float16`, or `fp32`, `bf16`, `fp16`.

    `auto` is bfloat16 on a GPU (float16 if the GPU lacks bfloat16) and on a CPU with bfloat16 instructions, where
    weights of half the size make prefill and decode 1.3 to 1.8 times as fast. It is float32 on other CPUs. bfloat16
    does not speed up torch's own attention over a long past: beyond about 4,000 tokens, the untouched model decodes
    faster in float32.

    Raises:
        ModelError: not one of these.
    """
    name = str(dtype).removeprefix("torch.").lower()
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        near = difflib.get_close_matches(name, ["auto", *DTYPES], n=1)
        hint = f"did you mean {near[0]}? Give" if near else "give"
        raise ModelError(f"dtype is {str(dtype)!r}; {hint} auto, {', '.join(DTYPES)}")
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if cpu_multiplies_bfloat16() else torch.float32


def cpu_multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this x86 CPU has bfloat16 instructions; False if `cpuinfo` cannot be read."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("flags") and BFLOAT16_FLAGS & set(line.split()) for line in lines)
