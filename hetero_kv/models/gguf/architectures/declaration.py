"""What an architecture's table declares, and the metadata that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.architectures.changes import Change
from hetero_kv.models.gguf.file import GGUFFile
from hetero_kv.models.gguf.reading import numbers_of


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a model, and what undoes the converter's change.

    Attributes:
        path: as in the tables of `Architecture`; with `{row}` each of the tensor's rows is a parameter.
        change: None where the tensor is stored as the parameter is.
    """

    path: str
    change: Change | None = None


#: Of several places the first that the model has.
Places = Mapping[str, str | Place | tuple[str | Place, ...]]


@dataclass(frozen=True)
class Architecture:
    """The table of one architecture.

    Attributes:
        name: the file's `general.architecture`.
        model_types: transformers' names of the models whose weights such a file has; the first is what the file alone
            becomes, unless `settings` puts another `model_type`.
        keys: key behind the architecture's name -> setting of the configuration, where the value is the same.
        optional: of these keys, those that a file may leave out.
        settings: puts what takes more than a name.
        predicts: whether blocks behind the model's layers may predict further tokens; they are left out.
        without_effect: key -> why it changes nothing that is computed.
        model: tensor -> place. A name without `.weight` or `.bias` stands for both. Paths are relative to the module
            that has the layers; those that begin with "/" to the model.
        layer: likewise, relative to a layer, of tensors `blk.N.…`.
    """

    name: str
    model_types: tuple[str, ...]
    keys: Mapping[str, str]
    model: Places
    layer: Places
    settings: Callable[[Said, Settings], None] = lambda said, settings: None
    optional: frozenset[str] = frozenset()
    predicts: bool = False
    without_effect: Mapping[str, str] = field(default_factory=dict)


class Said:
    """The metadata under an architecture's name; what is read counts as used.

    Args:
        given: the text configuration that the file's weights are for; None where the file says it all.
    """

    def __init__(self, file: GGUFFile, architecture: Architecture, given: Any | None) -> None:
        self.file, self.architecture, self.given = file, architecture, given
        self.used: set[str] = set()

    def key(self, suffix: str) -> str:
        """The whole key."""
        return f"{self.architecture.name}.{suffix}"

    def has(self, suffix: str) -> bool:
        """Whether the file has the key."""
        return self.key(suffix) in self.file.metadata

    def get(self, suffix: str, default: Any = None) -> Any:
        """The value, a tuple or list where it is an array."""
        self.used.add(self.key(suffix))
        return self.file.get(self.key(suffix), default)

    def one(self, suffix: str, default: Any = None) -> Any:
        """The value; of an array what all its elements are.

        Raises ModelError where they differ.
        """
        value = self.get(suffix, default)
        if isinstance(value, tuple | list):
            if len(set(value)) != 1:
                raise self.refused(suffix, "differs between layers, which this version does not compute")
            return value[0]
        return value

    def require(self, suffix: str, name: str) -> Any:
        """The value, or that of the setting `name` of the configuration which is given.

        Raises ModelError where neither has it.
        """
        if self.has(suffix):
            return self.one(suffix)
        known = getattr(self.given, name, None)
        if known is None:
            raise ModelError(
                f"{str(self.file.path)!r} has no {self.key(suffix)} in its metadata; convert it again, or give the "
                "directory or hub id of the configuration as the model and this file as gguf_path"
            )
        return known

    def only(self, suffix: str, allowed: Any, why: str) -> None:
        """Raise ModelError where the file has the key with another value than `allowed`."""
        value = self.one(suffix, allowed)
        if not same(value, allowed):
            raise self.refused(suffix, why)

    def has_tensor(self, name: str) -> bool:
        """Whether the file has a tensor of that name in any block; `name` is what follows `blk.N.`, or all of it."""
        return any(each == name or each.endswith(f".{name}") for each in self.file.tensor_names)

    def tensor(self, name: str) -> list[float] | None:
        """The numbers of a small tensor, or None."""
        return numbers_of(self.file, name)

    def refused(self, suffix: str, why: str) -> ModelError:
        """The error for a value that this version cannot compute with."""
        return ModelError(
            f"{str(self.file.path)!r} says {self.key(suffix)} {shown(self.file.get(self.key(suffix)))}, which {why}; "
            "give the model's directory or hub id in Hugging Face format"
        )


class Settings:
    """Settings of a transformers configuration, and which of them a file says.

    Attributes:
        values: setting -> value.
        said: setting -> (the key that says it, the value; of `rope_parameters` the part that is said).
    """

    def __init__(self, said: Said) -> None:
        self._said = said
        self.values: dict[str, Any] = {}
        self.said: dict[str, tuple[str, Any]] = {}

    def put(self, name: str, value: Any, *suffixes: str) -> None:
        """Set `name`; the file says it where it has one of the keys `suffixes`."""
        self.values[name] = value
        for suffix in suffixes:
            if self._said.has(suffix):
                self.said[name] = (self._said.key(suffix), value)
                break
        else:
            self.said.pop(name, None)

    def copy(self, name: str, suffix: str) -> None:
        """Set `name` to what the key says, which the file or the configuration given beside it must have."""
        self.put(name, self._said.require(suffix, name), suffix)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def same(value: Any, other: Any) -> bool:
    """Whether two settings are equal; numbers to the precision of a file's."""
    if isinstance(value, tuple | list) and isinstance(other, tuple | list):
        return len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, tuple | list) or isinstance(other, tuple | list):
        # One for each layer, and one for all of them.
        many, one = (value, other) if isinstance(value, tuple | list) else (other, value)
        return bool(many) and all(same(each, one) for each in many)
    if isinstance(value, bool) or isinstance(other, bool) or isinstance(value, str) or isinstance(other, str):
        return bool(value == other)
    if isinstance(value, int | float) and isinstance(other, int | float):
        return abs(value - other) <= 1e-6 * max(abs(value), abs(other))
    return bool(value == other)


def shown(value: Any) -> str:
    """A value as it stands in an error."""
    text = f"{value:g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
