"""The data that one layer of a cache saves beyond its blocks, and the checks when it is read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hetero_kv.engine.errors import DamagedContextError
from hetero_kv.engine.statistics import Tally
from hetero_kv.errors import shown

#: Larger than any number of tokens, bytes or steps.
_LARGEST = 2**53


class Shareable(Protocol):
    """An object that several layers share, and that is saved once."""

    def saved(self) -> SavedPart: ...


@dataclass
class SavedPart:
    """Named tensors and numbers. Each reading method checks that the value is what the caller expects.

    Attributes:
        tensors: on any device; a name has no `/`.
        numbers: JSON values: numbers, texts, None, and lists of these.
        shared: objects that other layers share.
        where: the part's name in errors.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Shareable] = field(default_factory=dict)
    where: str = "a part"

    def put(self, **tensors: torch.Tensor | None) -> None:
        """Add these tensors, except those that are None."""
        self.tensors |= {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def has(self, name: str) -> bool:
        """Whether a tensor of this name exists."""
        return name in self.tensors

    def tensor(self, name: str, shape: Sequence[int | None], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The tensor of this name on `device`; it must have `dtype` and `shape`, in which None stands for any extent.

        Raises DamagedContextError when it differs or is missing.
        """
        found = self.tensors.get(name)
        if found is None:
            raise self.wrong(f"{name} is missing")
        fits = len(found.shape) == len(shape) and all(
            expected is None or expected == extent for expected, extent in zip(shape, found.shape, strict=True)
        )
        if not fits or found.dtype != dtype:
            expected = ["any" if extent is None else extent for extent in shape]
            raise self.wrong(f"{name} is {found.dtype} {list(found.shape)}; expected {dtype} {expected}")
        return found.to(device)

    def like(self, name: str, other: torch.Tensor, extent: int | None = None) -> torch.Tensor:
        """As `tensor`, with `other`'s dtype, device and shape, except that dimension 2 is `extent`; None: any."""
        shape: list[int | None] = list(other.shape)
        shape[2] = extent
        return self.tensor(name, shape, other.dtype, other.device)

    def indices(self, name: str, shape: Sequence[int | None], dtype: torch.dtype, stop: int) -> torch.Tensor:
        """As `tensor`, on the CPU, with numbers in [0, stop)."""
        found = self.tensor(name, shape, dtype, torch.device("cpu"))
        if found.numel() and (int(found.min()) < 0 or int(found.max()) >= stop):
            raise self.wrong(f"{name} has values outside of 0 to {stop - 1}")
        return found

    def integer(self, name: str, least: int = 0, most: int = _LARGEST) -> int:
        """The whole number of this name. Raises DamagedContextError outside of [least, most]."""
        found = self.numbers.get(name)
        if type(found) is not int or not least <= found <= most:
            raise self.wrong(f"{name} is {shown(found)}; expected a whole number from {least} to {most}")
        return found

    def optional_integer(self, name: str, least: int = 0, most: int = _LARGEST) -> int | None:
        """As `integer`, or None where it is absent."""
        return None if self.numbers.get(name) is None else self.integer(name, least, most)

    def real(self, name: str) -> float:
        """The number of this name. Raises DamagedContextError for anything else."""
        found = self.numbers.get(name)
        if not isinstance(found, int | float) or isinstance(found, bool):
            raise self.wrong(f"{name} is {shown(found)}; expected a number")
        return float(found)

    def tally(self, name: str) -> Tally:
        """The sum and count of this name, saved as a list of two."""
        found = self.numbers.get(name)
        match found:
            case [float() | int() as total, int() as count] if count >= 0:
                return Tally(total, count)
        raise self.wrong(f"{name} is {shown(found)}; expected a sum and a count")

    def wrong(self, what: str) -> DamagedContextError:
        """The error for contents that do not fit."""
        return DamagedContextError(f"{self.where}: {what}; the file is damaged, or was not written by hetero-kv")


@dataclass
class RestoreTarget:
    """The target of a restored layer.

    Attributes:
        keys, values: [rows, kv_heads, 0, dim], no tokens, of the model's shape, dtype and device.
        parts: the saved objects that layers share.
        states: for a layer with a recurrent state: name -> its shape, [1, ...], and dtype.
    """

    keys: torch.Tensor
    values: torch.Tensor
    parts: Sequence[SavedPart] = ()
    _made: dict[int, Any] = field(default_factory=dict)
    states: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def shared(self, part: SavedPart, name: str, make: Callable[[SavedPart], Any]) -> Any:
        """The object that `part` shares with other layers under this name, created once; None if it has none."""
        index = part.optional_integer(name, 0, len(self.parts) - 1)
        if index is None:
            return None
        if index not in self._made:
            self._made[index] = make(self.parts[index])
        return self._made[index]
