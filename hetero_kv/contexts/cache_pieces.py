"""Converts a cache to the tensors and numbers of a file, and back, except for its blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from hetero_kv.engine import hf_cache_layers
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.equal_length_group import EqualLengthGroup
from hetero_kv.engine.errors import ContextError, DamagedContextError
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.engine.saved_part import SavedPart, Shareable
from hetero_kv.errors import shown

#: Limit on the rows of a batch, against damaged files.
MOST_ROWS = 65_536


def can_be_saved(layers: Iterable[CacheLayerMixin]) -> bool:
    """Whether all of these cache layers are of kinds that can be saved. A policy may still refuse to save its state."""
    return all(
        type(layer).saved is not FamilyLayer.saved
        if isinstance(layer, FamilyLayer)
        else hf_cache_layers.can_be_saved(layer)
        for layer in layers
    )


@dataclass
class CachePieces:
    """The content of a saved cache, except for its blocks.

    Attributes:
        tensors: the tensors by name in the file.
        metadata: JSON values.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, cache: HeteroCache) -> CachePieces:
        """The pieces of a cache with tokens, outside prefill. Raises ContextError for a layer that cannot be saved."""
        pieces, shared = cls(), _Shared()
        pieces.metadata["columns"] = cache.columns.count
        if cache.columns.padding is not None:
            pieces.tensors["columns"] = cache.columns.padding
        pieces.metadata["cohorts"] = [
            pieces._group(group, f"cohorts/{number}", shared) for number, group in enumerate(cache.groups)
        ]
        parts: list[dict[str, Any]] = []
        while len(parts) < len(shared.objects):
            parts.append(pieces._part(shared.objects[len(parts)].saved(), f"parts/{len(parts)}", shared))
        pieces.metadata["parts"] = parts
        return pieces

    def _group(self, group: EqualLengthGroup, path: str, shared: _Shared) -> dict[str, Any]:
        layers = []
        for index, layer in enumerate(group.layers):
            part = layer.saved() if isinstance(layer, FamilyLayer) else hf_cache_layers.saved(layer, index)
            layers.append(self._part(part, f"{path}/layers/{index}", shared) | {"class": type(layer).__name__})
        return {
            "rows": len(group.sequences),
            "length": group.length,
            "prompt_length": group.prompt_length,
            "stored": [group.sequences[0].tables[layout].length for layout in group.layouts],
            "closed": [group.finalized[layout] for layout in group.layouts],
            "layers": layers,
            "shared": [
                [name, self._shared_values(values, f"{path}/shared/{number}")]
                for number, (name, values) in enumerate(group.shared.items())
            ],
        }

    def _shared_values(self, values: dict[Any, np.ndarray], path: str) -> list[list[Any]]:
        """Adds the tensors that layers share; returns their keys, each with its tensor's name."""
        keys = []
        for index, (key, value) in enumerate(values.items()):
            if tupled(json.loads(json.dumps(key))) != key:
                raise ContextError(f"layers share values under the key {shown(key)}, which JSON cannot express")
            self.tensors[f"{path}/{index}"] = torch.from_numpy(np.ascontiguousarray(value))
            keys.append([key, f"{path}/{index}"])
        return keys

    def _part(self, part: SavedPart, path: str, shared: _Shared) -> dict[str, Any]:
        self.tensors |= {f"{path}/{name}": tensor for name, tensor in part.tensors.items()}
        return {"numbers": part.numbers | {name: shared.number(each) for name, each in part.shared.items()}}


class _Shared:
    """Numbers the objects that several layers share, so that each is saved once."""

    def __init__(self) -> None:
        self.objects: list[Shareable] = []

    def number(self, shared: Shareable) -> int:
        for number, known in enumerate(self.objects):
            if known is shared:
                return number
        self.objects.append(shared)
        return len(self.objects) - 1


@dataclass(frozen=True)
class SavedGroup:
    """A group as read from a file, checked as far as possible without its layers.

    Attributes:
        stored, closed: stored tokens and finalized blocks by layout, in the order of `EqualLengthGroup.layouts`.
        shared: the values that layers share.
    """

    rows: int
    length: int
    prompt_length: int
    stored: list[int]
    finalized: list[int]
    layers: list[SavedPart]
    classes: list[str]
    shared: dict[Any, dict[Any, Any]]


def saved_groups(
    metadata: dict[str, Any], names: Sequence[str], tensor: Callable[[str], torch.Tensor], where: str
) -> tuple[list[SavedGroup], list[SavedPart]]:
    """The groups in a file's metadata, and the parts that their layers share.

    Args:
        metadata: the metadata of CachePieces.
        names: the names of the file's tensors.
        tensor: reads the tensor of a name.

    Raises DamagedContextError for invalid metadata.
    """
    inside: dict[str, dict[str, torch.Tensor]] = {}
    for name in names:
        path, _, leaf = name.rpartition("/")
        if path.startswith(("cohorts/", "parts/")) and "/shared/" not in path:
            inside.setdefault(path, {})[leaf] = tensor(name)

    def part(value: object, path: str) -> SavedPart:
        numbers = value.get("numbers") if isinstance(value, dict) else None
        if not isinstance(numbers, dict):
            raise DamagedContextError(f"{where} has no description of {path}")
        return SavedPart(inside.get(path, {}), numbers, where=f"{where}: {path}")

    groups, parts = metadata.get("cohorts"), metadata.get("parts")
    if not isinstance(groups, list) or not groups or not isinstance(parts, list):
        raise DamagedContextError(f"{where} has no sequences")
    read = [_saved_group(value, f"cohorts/{number}", part, names, tensor, where) for number, value in enumerate(groups)]
    if sum(group.rows for group in read) > MOST_ROWS:
        raise DamagedContextError(f"{where} has more than {MOST_ROWS} rows")
    return read, [part(value, f"parts/{number}") for number, value in enumerate(parts)]


def _saved_group(
    value: object,
    path: str,
    part: Callable[[object, str], SavedPart],
    names: Sequence[str],
    tensor: Callable[[str], torch.Tensor],
    where: str,
) -> SavedGroup:
    if not isinstance(value, dict) or not isinstance(value.get("layers"), list):
        raise DamagedContextError(f"{where} does not say what {path} is")
    own = SavedPart(numbers=value, where=f"{where}: {path}")
    rows, length = own.integer("rows", 1, MOST_ROWS), own.integer("length", 1)
    layers = [part(each, f"{path}/layers/{index}") for index, each in enumerate(value["layers"])]
    classes = [str(each.get("class")) for each in value["layers"]]
    shared = {}
    try:
        for name, pairs in value.get("shared", []):
            shared[tupled(name)] = {tupled(key): tensor(place).numpy() for key, place in pairs if place in names}
    except (TypeError, ValueError) as error:
        raise own.wrong("the values that layers share cannot be read") from error
    stored, finalized = _sizes(own, "stored", length), _sizes(own, "closed", length)
    return SavedGroup(rows, length, own.integer("prompt_length", 0, length), stored, finalized, layers, classes, shared)


def _sizes(part: SavedPart, name: str, most: int) -> list[int]:
    found = part.numbers.get(name)
    if not isinstance(found, list) or not all(type(number) is int and 0 <= number <= most for number in found):
        raise part.wrong(f"{name} is {shown(found)}")
    return found


def tupled(value: Any) -> Any:
    """A key with tuples again, which JSON has turned into lists."""
    return tuple(tupled(each) for each in value) if isinstance(value, list) else value
