"""The device and sizes of the checks, and a check's result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hetero_kv.store.memory import reserve

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Setting:
    """The device and sizes of the checks.

    Attributes:
        device: the models' device.
        tiny: whether to use sizes that take seconds on a CPU.
        tokens: the length of the long prompt.
        gpu_memory: the limit on GPU memory for the long prompt, bytes.
    """

    device: torch.device
    tiny: bool
    tokens: int
    gpu_memory: int

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU, with separate memory and Triton kernels."""
        return self.device.type == "cuda"


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        name: the checked part.
        passed: None if the check needs a GPU or a package that this machine lacks.
        detail: figures in words.
        figures: figures for programs.
    """

    name: str
    passed: bool | None
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)


Check = Callable[[Setting], Iterator[CheckResult]]


def random_model(
    setting: Setting, dtype: torch.dtype, model_type: str = "llama", attention: str = "sdpa", **shape: Any
) -> Any:
    """A model of random weights, made on the device in `dtype`: nothing is read, and nothing copied."""
    config = AutoConfig.for_model(model_type, **shape)
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.eval().requires_grad_(False)


def random_tokens(setting: Setting, count: int, seed: int, vocabulary: int) -> torch.Tensor:
    """[1, count] token ids on the device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, vocabulary, (1, count), generator=generator).to(setting.device)


def in_own_pages(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU whose pages hold nothing else, as a pool's: CUDA refuses to lock a page twice."""
    return torch.from_numpy(reserve(tensor.nbytes)).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, divided by the norm of the expected values."""
    difference = torch.linalg.vector_norm(actual.double() - expected.double())
    return float(difference / torch.linalg.vector_norm(expected.double()))


def synchronise(setting: Setting) -> None:
    """Wait for the device."""
    if setting.on_gpu:
        torch.cuda.synchronize(setting.device)
