"""What it costs that a GGUF file's weights were unpacked before rules came that would have kept them packed."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_logger = logging.getLogger(__name__)


def warn_of_unpacked(model: PreTrainedModel, left: Iterable[nn.Module]) -> None:
    """Say once of a model that the weights of `left` were packed in their file and are not any more.

    `load_model` notes the file of a model that it unpacks as `hetero_kv_unpacked`; without the note nothing is said.

    Args:
        left: modules that the rules would have kept packed, had their weights not been there.
    """
    path: Path | None = getattr(model, "hetero_kv_unpacked", None)
    if path is None:
        return
    matrices = {id(weight): weight for module in left for weight in module.parameters() if weight.dim() > 1}
    unpacked = sum(weight.nbytes for weight in matrices.values())
    if not unpacked or not path.exists():
        return
    model.hetero_kv_unpacked = None
    _logger.warning(
        "the weights of %s were unpacked before these rules came: they take %s instead of about %s, and every token "
        "reads them all. To keep them packed, and to decode by kernels for packed weights, load the model with its "
        "rules: hetero_kv.load_model(%r, config=...)",
        path.name, _gigabytes(unpacked), _gigabytes(path.stat().st_size), str(path),
    )  # fmt: skip


def _gigabytes(size: Any) -> str:
    return f"{size / 1e9:.2g} GB"
