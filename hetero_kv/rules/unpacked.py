"""Warns that a GGUF file's weights were unpacked at load, although the rules would have kept them packed."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_logger = logging.getLogger(__name__)


def warn_of_unpacked(model: PreTrainedModel, modules: Iterable[nn.Module]) -> None:
    """Warn once per model that the weights of `modules` were packed in their file and are unpacked in memory.

    `load_model` stores the file of an unpacked model as `hetero_kv_unpacked`; without it there is no warning.

    Args:
        modules: modules that the rules would have kept packed if they had been injected before the weights loaded.
    """
    path: Path | None = getattr(model, "hetero_kv_unpacked", None)
    if path is None:
        return
    matrices = {id(weight): weight for module in modules for weight in module.parameters() if weight.dim() > 1}
    unpacked = sum(weight.nbytes for weight in matrices.values())
    if not unpacked or not path.exists():
        return
    model.hetero_kv_unpacked = None
    _logger.warning(
        "the weights of %s were unpacked before the rules were injected: they take %s instead of about %s, and every "
        "token reads all of them. To keep them packed, and to decode with kernels for packed weights, load the model "
        "with its rules: hetero_kv.load_model(%r, config=...)",
        path.name, _gigabytes(unpacked), _gigabytes(path.stat().st_size), str(path),
    )  # fmt: skip


def _gigabytes(size: Any) -> str:
    return f"{size / 1e9:.2g} GB"
