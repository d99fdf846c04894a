"""Maps the tensors of a GGUF file to the parameters and buffers of a model.

The architecture's table gives each tensor's parameter, and the transform that undoes the converter's.
`models/gguf/experts.py` finds the parameters of experts. A file is refused unless each tensor has a parameter, and each
parameter and persistent buffer a tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.architectures import architecture_of
from hetero_kv.models.gguf.architectures.declaration import Architecture, ParameterPlace, Places
from hetero_kv.models.gguf.architectures.inverse_transforms import InverseTransform
from hetero_kv.models.gguf.architectures.rope import ROPE_TENSORS
from hetero_kv.models.gguf.contract import BLOCK
from hetero_kv.models.gguf.experts import ExpertPlace, expert_places
from hetero_kv.models.gguf.file import GGUFFile, TensorInfo
from hetero_kv.models.gguf.row_parts import PartRows, are_whole, common_types
from hetero_kv.models.gguf.shapes import sizes_in
from hetero_kv.models.parameters import tied_parameters
from hetero_kv.models.placing import decoder_layers
from hetero_kv.weights.block_numbers import numbers_of_blocks

ROW = "{row}"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """The parameter or buffer that a tensor fills; see `ParameterPlace`."""

    path: str
    transform: InverseTransform | None
    part: PartRows | None = None

    def paths(self, info: TensorInfo) -> list[str]:
        """The paths of all parameters that the tensor fills."""
        return [self.path.replace(ROW, str(row)) for row in range(info.shape[0])] if ROW in self.path else [self.path]


@dataclass(frozen=True)
class WeightMap:
    """Maps the tensors of a GGUF file to the parameters and buffers of a model.

    Attributes:
        config: the model's text configuration.
        targets: GGUF tensor name -> its target.
        experts: GGUF tensor name -> the place of an expert tensor in a parameter.
        scalars: parameter or buffer, which the metadata have -> its one number, or its whole numbers.
        file: the file.
    """

    config: Any
    targets: dict[str, Target]
    experts: dict[str, ExpertPlace]
    scalars: dict[str, float | tuple[int, ...]]
    file: GGUFFile

    @classmethod
    def of(cls, model: Any, file: GGUFFile) -> WeightMap:
        """For a model as transformers builds it.

        Raises ModelError where a tensor has no place in the model, or the model has parameters that no tensor fills.
        """
        config = model.config.get_text_config()
        experts = expert_places(model, file)
        parameters = set(model.state_dict(keep_vars=True))
        known = _ParameterPaths(model, architecture_of(file), parameters)
        targets: dict[str, Target] = {}
        unplaced = []
        if predicting := known.predicting_blocks(file):
            _require_predictor(file, predicting)
            _logger.warning(
                "%s: blocks that predict further tokens are left out: %s", file.path, ", ".join(map(str, predicting))
            )
        for info in file.tensors:
            if info.name in ROPE_TENSORS or info.name in experts or known.is_unused(info.name):
                continue
            target = known.target(info)
            if target is None:
                unplaced.append(info.name)
            else:
                targets[info.name] = target
        if unplaced:
            raise ModelError(
                f"{str(file.path)!r} has {len(unplaced)} tensors that this version has no place for in "
                f"{type(model).__name__} ({', '.join(unplaced[:3])}); give the model in Hugging Face format, without "
                "this file, or weights that belong to the configuration"
            )
        weights = cls(config, targets, experts, known.scalars(file), file)
        weights._require_all_filled(model, file, parameters)
        return weights

    def _require_all_filled(self, model: Any, file: GGUFFile, parameters: set[str]) -> None:
        known = [(info, self.targets[info.name]) for info in file.tensors if info.name in self.targets]
        filled = [path for info, target in known if target.part is None for path in target.paths(info)]
        rows: dict[str, list[np.ndarray]] = {}
        for info, target in known:
            if target.part is not None:
                rows.setdefault(target.path, []).append(self.part_rows(info))
        filled += [path for path, found in rows.items() if are_whole(found, shape_of(*owner_of(model, path))[0])]
        parts: dict[str, list[str]] = {}
        for place in self.experts.values():
            parts.setdefault(place.parameter, []).append(place.part)
        # Gate and up of experts are one parameter, and either may be missing.
        filled += [path for path, found in parts.items() if sorted(found) in ([""], ["gate", "up"])]
        filled += list(self.scalars)
        duplicates = {path for path in filled if filled.count(path) > 1} if len(set(filled)) < len(filled) else set()
        if duplicates:
            raise ModelError(f"{str(file.path)!r} has two tensors for {min(duplicates)}; download the file again")
        left = sorted(parameters - set(filled) - tied_parameters(model).keys())
        if left:
            raise ModelError(
                f"{str(file.path)!r} has no weights for {len(left)} parameters of {type(model).__name__} "
                f"({', '.join(left[:3])}, …); give weights that belong to the configuration"
            )

    def _config_of(self, info: TensorInfo) -> Any:
        """The configuration of the tensor's layer, where layers have their own; otherwise the model's."""
        match = BLOCK.match(info.name)
        own = match is not None and getattr(self.config, "is_heterogeneous", False)
        return self.config.per_layer_config[int(match[1])] if match is not None and own else self.config

    def row_order(self, info: TensorInfo) -> np.ndarray | None:
        """The tensor's row for each row of the parameter or part; None if the transform changes numbers."""
        transform = self.targets[info.name].transform
        if transform is not None and not transform.keeps_blocks:
            return None
        rows = None if transform is None else transform.rows
        if rows is None:
            return np.arange(info.shape[0])
        with self._fitting(info):
            return rows(info.shape[0], self._config_of(info))

    def part_rows(self, info: TensorInfo) -> np.ndarray:
        """The parameter's row for each row of a tensor that is a part of it."""
        part = self.targets[info.name].part
        assert part is not None
        return part(self._config_of(info))

    def stored_types(self, file: GGUFFile) -> dict[str, str]:
        """Parameter -> GGML's type of its blocks, for the parameters whose modules may take blocks.

        For experts, a merged gate-and-up parameter has two entries: its path with ".gate", and with ".up".
        """
        experts = {
            place.parameter + (f".{place.part}" if place.part else ""): info.quantization.name
            for info in file.tensors
            if (place := self.experts.get(info.name)) is not None and len(info.shape) == 3
        }
        types: dict[str, list[str | None]] = {}
        for info in file.tensors:
            if info.name in self.targets:
                name = info.quantization.name if self.keeps_blocks(info) else None
                types.setdefault(self.targets[info.name].path, []).append(name)
        return experts | common_types(types)

    def column_order(self, info: TensorInfo) -> np.ndarray | None:
        """The tensor's column for each column of the parameter; None for the same order."""
        transform = self.targets[info.name].transform
        if transform is None or transform.columns is None:
            return None
        return transform.columns(info.shape[1], self._config_of(info))

    def keeps_blocks(self, info: TensorInfo) -> bool:
        """Whether the rows of a tensor's blocks are rows of the parameter, with their columns in some order."""
        return len(info.shape) == 2 and self.row_order(info) is not None

    def takes_blocks(self, model: nn.Module, info: TensorInfo) -> bool:
        """Whether the module of a tensor's parameter takes the tensor's blocks."""
        path = self.targets[info.name].path
        if ROW in path or not self.keeps_blocks(info):
            return False
        module, leaf = owner_of(model, path)
        return leaf == "weight" and hasattr(module, "load_blocks")

    def numbers(self, info: TensorInfo, data: np.ndarray) -> np.ndarray:
        """The tensor as numbers of the parameter, with the converter's transform undone.

        Raises ModelError for a tensor of another shape than the transform takes; so does `row_order`.
        """
        numbers = numbers_of_blocks(data, info.quantization)
        transform = self.targets[info.name].transform
        if transform is None:
            return numbers
        with self._fitting(info):
            return transform.apply(numbers, self._config_of(info))

    @contextmanager
    def _fitting(self, info: TensorInfo) -> Iterator[None]:
        """Within this context a transform's failure names the tensor."""
        try:
            yield
        except (ValueError, IndexError) as error:
            raise ModelError(
                f"tensor {info.name!r} of {str(self.file.parts[info.part].path)!r} is {list(info.shape)}, which does "
                f"not fit {sizes_in(self.file, info)}; download the file again, or convert it again"
            ) from error


class _ParameterPaths:
    """The paths of an architecture's table in a model; `parameters` is all that the model has."""

    def __init__(self, model: Any, architecture: Architecture, parameters: set[str]) -> None:
        paths = architecture.stacks or _path_of_layers(model)
        layers = [
            (f"{path}.{number}", layer) for path in paths for number, layer in enumerate(model.get_submodule(path))
        ]
        self.architecture, self.parameters = architecture, parameters
        self.layers, self.count = [path for path, _ in layers], len(layers)
        self.base = paths[0].rpartition(".")[0]
        attentions = [getattr(layer, "self_attn", None) for _, layer in layers]
        self.with_others_keys = {
            number for number, each in enumerate(attentions) if getattr(each, "is_kv_shared_layer", False)
        }

    def predicting_blocks(self, file: GGUFFile) -> list[int]:
        """The numbers of the blocks after the model's layers, if these predict further tokens."""
        numbers = {int(match[1]) for name in file.tensor_names if (match := BLOCK.match(name))}
        return sorted(number for number in numbers if number >= self.count) if self.architecture.predicts else []

    def scalars(self, file: GGUFFile) -> dict[str, float | tuple[int, ...]]:
        """Parameter -> its number, or its whole numbers, for the parameters that the file's metadata have.

        Raises ModelError if the file has not one for each layer.
        """
        found: dict[str, float | tuple[int, ...]] = {}
        for leaf, key in self.architecture.scalars.items():
            values = file.get(key)
            if not isinstance(values, tuple) or len(values) != self.count:
                raise ModelError(
                    f"{str(file.path)!r} has not one number for each of {self.count} layers in {key}; convert it again"
                )
            found |= {f"{path}.{leaf}": float(value) for path, value in zip(self.layers, values, strict=True)}
        for leaf, key in self.architecture.arrays.items():
            paths = {f"{layer}.{leaf}" for layer in self.layers} & self.parameters
            found |= {path: tuple(file.get(f"{self.architecture.name}.{key}")) for path in paths}
        return found

    def is_unused(self, name: str) -> bool:
        """Whether the model computes without a tensor.

        It belongs to a block after the model's layers, which predicts further tokens, or makes keys or values of a
        layer that uses another layer's.
        """
        match = BLOCK.match(name)
        if match is None:
            return False
        if int(match[1]) >= self.count:
            return self.architecture.predicts
        return name[match.end() :] in self.architecture.of_own_keys and int(match[1]) in self.with_others_keys

    def target(self, info: TensorInfo) -> Target | None:
        """A tensor's target; None if the model has no place for it."""
        match = BLOCK.match(info.name)
        if match is None:
            return self._first_existing(self.architecture.model, info.name, self.base, info)
        number = int(match[1])
        if number >= self.count:
            return None
        return self._first_existing(self.architecture.layer, info.name[match.end() :], self.layers[number], info)

    def _first_existing(self, places: Places, name: str, prefix: str, info: TensorInfo) -> Target | None:
        for place, suffix in _matching(places, name):
            path = place.path[1:] if place.path.startswith("/") else f"{prefix}.{place.path}"
            target = Target(path + suffix, place.transform, place.part)
            if all(each in self.parameters for each in target.paths(info)):
                return target
        return None


def _path_of_layers(model: Any) -> tuple[str]:
    """The path of the model's only list of layers. Raises ModelError if there is none."""
    layers = decoder_layers(model)
    for path, module in model.named_modules():
        if layers is not None and module is layers:
            return (path,)
    raise ModelError(f"{type(model).__name__} has no list of its layers; give the model in Hugging Face format")


def _require_predictor(file: GGUFFile, blocks: list[int]) -> None:
    """Raise ModelError unless one of the blocks that are left out has what makes its input of a token's state."""
    if not any(name.startswith(f"blk.{block}.nextn.") for block in blocks for name in file.tensor_names):
        key = f"{file.architecture}.nextn_predict_layers"
        raise ModelError(
            f"{str(file.path)!r} has {key} {file.get(key)}, and its last {len(blocks)} blocks have no tensor nextn.*, "
            "as those that predict further tokens do; convert it again"
        )


def _matching(places: Places, name: str) -> Iterator[tuple[ParameterPlace, str]]:
    """A tensor's places in the table, each with the suffix of its name that the table omits: `.weight`, `.bias`, ""."""
    stem, dot, suffix = name.rpartition(".")
    found: list[tuple[Any, str]] = []
    if name in places:
        found.append((places[name], ""))
    if suffix in ("weight", "bias") and stem in places:
        found.append((places[stem], dot + suffix))
    for place, rest in found:
        for each in place if isinstance(place, tuple) else (place,):
            yield (each if isinstance(each, ParameterPlace) else ParameterPlace(each)), rest


def owner_of(model: nn.Module, path: str) -> tuple[Any, str]:
    """The module of a parameter or buffer, and its name there."""
    parent, _, leaf = path.rpartition(".")
    return model.get_submodule(parent), leaf


def shape_of(module: Any, leaf: str) -> tuple[int, ...]:
    """The shape of a parameter or buffer; that of a packed one too."""
    return tuple(getattr(module, leaf).shape)
