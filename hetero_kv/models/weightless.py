"""Builds a model without weights, on torch's meta device, from the configuration alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hetero_kv.models.boundary import as_model_error
from hetero_kv.models.config_contract import require_possible_config
from hetero_kv.models.configuration import config_and_header
from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.weights import WeightMap
from hetero_kv.models.initial_values import NothingDrawn
from hetero_kv.models.named import DEFAULT_MODEL


@dataclass(frozen=True)
class WeightlessModel:
    """A transformers causal language model on the meta device, in eval mode: no parameter takes any memory.

    Attributes:
        stored: parameter -> its quantized type in the file, by GGML's name; None if all weights load unquantized (a
            model in Hugging Face format, or a GGUF file that only transformers can map).
    """

    model: Any
    name: str
    stored: Mapping[str, str] | None = None


def weightless_model(
    name_or_path: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    gguf_path: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
) -> WeightlessModel:
    """The structure of a model.

    Args:
        name_or_path: as `load_model` takes it, or a `config.json`.
        gguf_path, trust_remote_code: see `load_model`.

    Raises:
        ModelError: the model or its configuration cannot be found or read, or transformers has no causal language model
            for it.
    """
    path = Path(name_or_path).expanduser()
    is_config = path.suffix == ".json"
    config, file = (
        (_config_in(path), None)
        if is_config
        else config_and_header(name_or_path, gguf_path=gguf_path, trust_remote_code=trust_remote_code)
    )
    name = (path.resolve().parent.name if path.name == "config.json" else path.stem) if is_config else str(name_or_path)
    with as_model_error(name, f"cannot be built from its {type(config).__name__}"):
        with torch.device("meta"), NothingDrawn():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        stored = WeightMap.of(model, file).stored_types(file) if file is not None else None
        return WeightlessModel(model.eval(), name, stored)


def _config_in(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(f"there is no configuration {str(path)!r}; check the path")
    with as_model_error(repr(str(path)), "is no transformers configuration"):
        require_possible_config(path)
        return AutoConfig.from_pretrained(str(path))
