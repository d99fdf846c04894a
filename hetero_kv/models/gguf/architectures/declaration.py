"""Declares the tables of architectures, and reads a file's metadata for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.architectures.inverse_transforms import InverseTransform
from hetero_kv.models.gguf.file import GGUFFile
from hetero_kv.models.gguf.row_parts import PartRows
from hetero_kv.models.gguf.tensor_reader import numbers_of


@dataclass(frozen=True)
class ParameterPlace:
    """The parameter that a tensor fills, and the transform that undoes the converter's.

    Attributes:
        path: as in the tables of `Architecture`; with `{row}` each of the tensor's rows is a parameter.
        transform: None if the file stores the parameter unchanged.
        part: the parameter's rows that the tensor fills, if it is not the whole parameter.
    """

    path: str
    transform: InverseTransform | None = None
    part: PartRows | None = None


#: Tensor -> its place; of several places, the first that exists in the model counts.
Places = Mapping[str, str | ParameterPlace | tuple[str | ParameterPlace, ...]]


@dataclass(frozen=True)
class Architecture:
    """The table of one architecture.

    Attributes:
        name: the file's `general.architecture`.
        model_types: transformers' names of the models that such a file may belong to. A file without a configuration
            becomes the first one, unless `settings` puts another `model_type`.
        keys: key, without the architecture's name -> the configuration's setting with the same value.
        optional: the subset of `keys` that a file may omit.
        settings: puts the settings that need more than a new name.
        predicts: whether blocks after the model's layers may predict further tokens (MTP); they are not loaded.
        of_own_keys: the tensors that a layer with the keys and values of another one does not use.
        scalars: parameter of a layer -> the whole key (without the architecture's name) of an array that has its number
            for each layer; such a parameter has no tensor.
        arrays: buffer of a layer, where it has one -> the key of the array that has its whole numbers.
        without_effect: key -> why it does not change the computation.
        model: tensor -> place. A name without `.weight` or `.bias` stands for both. Paths are relative to the module
            that contains the layers, or to the model if they begin with "/".
        layer: the same for the tensors `blk.N.…`; paths are relative to the layer.
        stacks: the lists of layers in the model, whose layers follow each other in a file; () for its only one.
    """

    name: str
    model_types: tuple[str, ...]
    keys: Mapping[str, str]
    model: Places
    layer: Places
    settings: Callable[[MetadataReader, ConfigSettings], None] = lambda metadata, settings: None
    optional: frozenset[str] = frozenset()
    predicts: bool = False
    of_own_keys: frozenset[str] = frozenset()
    scalars: Mapping[str, str] = field(default_factory=dict)
    without_effect: Mapping[str, str] = field(default_factory=dict)
    stacks: tuple[str, ...] = ()
    arrays: Mapping[str, str] = field(default_factory=dict)


class MetadataReader:
    """Reads the metadata under an architecture's name, and records which keys are used and which tensors are read.

    Args:
        config: the text configuration that belongs to the file's weights; None if the file is the only source.
    """

    def __init__(self, file: GGUFFile, architecture: Architecture, config: Any | None) -> None:
        self.file, self.architecture, self.config = file, architecture, config
        self.used: set[str] = set()
        self.read_tensors: set[str] = set()

    def key(self, suffix: str) -> str:
        """The key with the architecture's name."""
        return f"{self.architecture.name}.{suffix}"

    def has(self, suffix: str) -> bool:
        """Whether the file has the key."""
        return self.key(suffix) in self.file.metadata

    def get(self, suffix: str, default: Any = None) -> Any:
        """The value; a tuple or list for an array."""
        self.used.add(self.key(suffix))
        return self.file.get(self.key(suffix), default)

    def scalar(self, suffix: str, default: Any = None) -> Any:
        """The value, or the common value of an array's elements. Raises ModelError if they differ."""
        value = self.get(suffix, default)
        if isinstance(value, tuple | list):
            if len(set(value)) != 1:
                raise self.unsupported(suffix, "differs between layers, which this version does not compute")
            return value[0]
        return value

    def require(self, suffix: str, name: str) -> Any:
        """The value, or the configuration's value of the setting `name`. Raises ModelError if both lack it."""
        if self.has(suffix):
            return self.scalar(suffix)
        known = getattr(self.config, name, None)
        if known is None:
            raise ModelError(
                f"{str(self.file.path)!r} has no {self.key(suffix)} in its metadata; convert it again, or give the "
                "directory or hub id of the configuration as the model and this file as gguf_path"
            )
        return known

    def expect(self, suffix: str, allowed: Any, why: str) -> None:
        """Raise ModelError if the file has the key with another value than `allowed`."""
        value = self.scalar(suffix, allowed)
        if not same(value, allowed):
            raise self.unsupported(suffix, why)

    def has_tensor(self, name: str) -> bool:
        """Whether the file has the tensor `name`, or the tensor `blk.N.name` for any block N."""
        return any(each == name or each.endswith(f".{name}") for each in self.file.tensor_names)

    def tensor(self, name: str) -> list[float] | None:
        """The numbers of a small tensor; None if the file lacks it."""
        self.read_tensors.add(name)
        return numbers_of(self.file, name)

    def unsupported(self, suffix: str, why: str) -> ModelError:
        """The error for a value that this version cannot use."""
        return ModelError(
            f"{str(self.file.path)!r} has {self.key(suffix)} {shown(self.file.get(self.key(suffix)))}, which {why}; "
            "give the model's directory or hub id in Hugging Face format"
        )


class ConfigSettings:
    """Settings of a transformers configuration, and which of them come from a file.

    Attributes:
        values: setting -> value.
        from_file: setting -> (its key in the file, its value; for `rope_parameters` only the part in the file).
    """

    def __init__(self, metadata: MetadataReader) -> None:
        self._metadata = metadata
        self.values: dict[str, Any] = {}
        self.from_file: dict[str, tuple[str, Any]] = {}

    def put(self, name: str, value: Any, *suffixes: str) -> None:
        """Set `name`; it counts as from the file if the file has one of the keys `suffixes`."""
        self.values[name] = value
        for suffix in suffixes:
            if self._metadata.has(suffix):
                self.from_file[name] = (self._metadata.key(suffix), value)
                break
        else:
            self.from_file.pop(name, None)

    def copy(self, name: str, suffix: str) -> None:
        """Set `name` to the value of a key. Raises ModelError if the file and the configuration lack it."""
        self.put(name, self._metadata.require(suffix, name), suffix)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def same(value: Any, other: Any) -> bool:
    """Whether two settings are equal; numbers are compared to the precision of float32."""
    if isinstance(value, tuple | list) and isinstance(other, tuple | list):
        return len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, tuple | list) or isinstance(other, tuple | list):
        # A list with a value per layer, and one value for all layers.
        many, one = (value, other) if isinstance(value, tuple | list) else (other, value)
        return bool(many) and all(same(each, one) for each in many)
    if isinstance(value, bool) or isinstance(other, bool) or isinstance(value, str) or isinstance(other, str):
        return bool(value == other)
    if isinstance(value, int | float) and isinstance(other, int | float):
        return abs(value - other) <= 1e-6 * max(abs(value), abs(other))
    return bool(value == other)


def shown(value: Any) -> str:
    """A value as errors show it."""
    text = f"{value:g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
