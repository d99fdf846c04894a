"""The roles of GGUF files by their names: models, and later parts of split ones."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import TypeVar

#: The name of a part of a split model, by llama.cpp's convention; numbers begin with 1.
PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)
#: Names of files that accompany a model: image or audio encoders, importance matrices, models that draft its tokens.
_BESIDE = re.compile(r"(.*[-._])?(mmproj|imatrix)\b.*|(mtp|eagle3|dflash|dspark)-.*", re.IGNORECASE)
_ENCODER = re.compile(r"(.*[-._])?mmproj\b.*", re.IGNORECASE)

AnyPath = TypeVar("AnyPath", bound=PurePath)


def model_stem(path: PurePath) -> str:
    """The file's name without the suffix, and without the number of its part."""
    match = PART_NAME.fullmatch(path.name)
    return path.stem if match is None else match["stem"]


def gguf_models(paths: Iterable[AnyPath]) -> list[AnyPath]:
    """The GGUF files that are models, sorted; of a split model, the first part that is there."""
    found: dict[tuple[PurePath, str, str], AnyPath] = {}
    for path in sorted(paths):
        if path.suffix.lower() != ".gguf" or _BESIDE.fullmatch(path.name):
            continue
        match = PART_NAME.fullmatch(path.name)
        key = (path, "", "") if match is None else (path.parent, match["stem"], match["count"])
        found.setdefault(key, path)
    return sorted(found.values())


def encoders(paths: Iterable[AnyPath]) -> list[AnyPath]:
    """The GGUF files with a model's image or audio encoder, sorted."""
    return sorted(path for path in paths if path.suffix.lower() == ".gguf" and _ENCODER.fullmatch(path.name))
