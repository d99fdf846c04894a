"""The layout of one architecture: metadata from a configuration, names of tensors, and their changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.gguf_models.changes import Change

#: A setting's name, or a function of the configuration; None is left out of the file.
Value = str | Callable[[Any], Any]


#: A tensor's name in the file, or (name, change).
Place = str | tuple[str, Change]


@dataclass(frozen=True)
class Layout:
    """How models of one architecture lie in a file.

    Attributes:
        architecture: `general.architecture`.
        keys: behind the architecture's name -> value.
        model, layer: parameter -> place. Names without `.weight` and `.bias` stand for both; `*` for numbers, whose
            tensors are stacked.
        blocks: where the layers lie in the model.
        further_blocks: where those lie that follow them in the file.
        pieces: whether the vocabulary is one of SentencePiece; otherwise of bytes, to be split as `pre` says.
        extra: tensors that are no parameters.
        scalars: parameter of one number -> the whole key of an array with its numbers of all layers.
    """

    architecture: str
    keys: Mapping[str, Value]
    layer: Mapping[str, Place]
    model: Mapping[str, Place]
    blocks: str = "model.layers"
    further_blocks: tuple[str, ...] = ()
    pre: str = "qwen2"
    pieces: bool = False
    extra: Callable[[Any], dict[str, np.ndarray]] = field(default=lambda config: {})
    scalars: Mapping[str, str] = field(default_factory=dict)


def always(value: Any) -> Value:
    return lambda config: value


def setting(name: str, default: Any = None) -> Value:
    return lambda config: getattr(config, name, default)
