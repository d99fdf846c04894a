"""The rotation of every position of a sequence, as the model's layers received it; layers share one table."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from hetero_kv.adapter.rotation import WAYS_TO_DOUBLE, Rotation
from hetero_kv.engine.saved_part import SavedPart
from hetero_kv.errors import HeteroKVError, shown
from hetero_kv.gpu_ops.rotary import RotaryLayout
from hetero_kv.store.growing_tensor import GrowingTensor

SLACK = 512
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class RotaryTable:
    """cos and sin of positions 0 to `len`, one number per pair of channels, in the dtype that the model rotates with.

    They are recorded, not recomputed: a model may change its frequencies as a sequence grows (dynamic scaling), and
    only the numbers that rotated the keys undo their rotation.
    """

    def __init__(self, rotation: Rotation) -> None:
        self.rotation = rotation
        self._cos, self._sin = GrowingTensor(0, SLACK), GrowingTensor(0, SLACK)
        # The last recorded tensor. The reference prevents reuse of its address: equal addresses mean equal rotations.
        self._source: torch.Tensor | None = None
        self._recorded = 0
        self._known: tuple[torch.Tensor, int] | None = None
        self._arrays: tuple[np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._cos)

    def record(self, cos: torch.Tensor, sin: torch.Tensor, start: int) -> bool:
        """Record the rotation of the positions from `start` on; returns False when the table has another one for them.

        Args:
            cos, sin: [1 or batch, tokens, width], the model's `position_embeddings`.

        Raises HeteroKVError when the rows of a batch are at different positions.
        """
        stop = start + cos.shape[1]
        if not self.is_source(cos):
            if cos.shape[0] > 1 and not torch.equal(cos, cos[:1].expand_as(cos)):
                raise HeteroKVError(
                    "the sequences of this batch are at different positions, but an operator that undoes the "
                    "rotation of keys needs prompts of equal length: group them by length, or run them one by one"
                )
            self._source, self._recorded = cos, start
        if stop <= self._recorded:
            return True
        new = [self.rotation.angles(part[0]) for part in (cos, sin)]
        known = min(stop, len(self)) - start
        for table, rows in zip((self._cos, self._sin), new, strict=True):
            if known > 0 and not torch.equal(table.entries[start : start + known], rows[:known]):
                self._source = None
                return False
        self._arrays, whole = None, len(self)
        try:
            for table, rows in zip((self._cos, self._sin), new, strict=True):
                table.append(rows[max(0, known) :])
        except BaseException:
            # Both or none: a table with enough positions is not recorded to again.
            for table in (self._cos, self._sin):
                table.truncate(whole)
            raise
        self._recorded = stop
        return True

    def is_known(self, cos: torch.Tensor, start: int) -> bool:
        """Whether the last `set_known` had these arguments: an earlier layer of the same forward has recorded them."""
        known = self._known
        return known is not None and known[0] is cos and known[1] == start

    def set_known(self, cos: torch.Tensor, start: int) -> None:
        """Remember that `cos` from `start` on is fully recorded."""
        self._known = cos, start

    def is_source(self, cos: torch.Tensor) -> bool:
        """Whether `cos` shares its memory with the last recorded tensor."""
        source = self._source
        return source is not None and source.untyped_storage().data_ptr() == cos.untyped_storage().data_ptr()

    def until(self, length: int) -> RotaryTable:
        """A table with the first `length` positions of this one."""
        copied = RotaryTable(self.rotation)
        if length:
            copied._cos.append(self._cos.entries[:length])
            copied._sin.append(self._sin.entries[:length])
        return copied

    def saved(self) -> SavedPart:
        """The data that `restored` needs."""
        layout = self.rotation.layout
        numbers = {"pairs": layout.pairs, "offset": layout.offset, "interleaved": int(layout.interleaved)}
        part = SavedPart(numbers=numbers | {"doubled": self.rotation.doubled})
        part.put(cos=self.cos, sin=self.sin)
        return part

    @classmethod
    def restored(cls, part: SavedPart, dim: int, device: torch.device) -> RotaryTable:
        """The table from `saved`'s data, for heads of dimension `dim`. Raises DamagedContextError for other data."""
        pairs = part.integer("pairs", 0, dim // 2)
        offset = part.integer("offset", 0, dim - 2 * pairs)
        doubled = part.numbers.get("doubled")
        if doubled not in WAYS_TO_DOUBLE:
            raise part.wrong(f"doubled is {shown(doubled)}")
        rotation = Rotation(RotaryLayout(pairs, offset, bool(part.integer("interleaved", 0, 1))), doubled)
        table = cls(rotation)
        cos = part.tensors.get("cos")
        if cos is None or cos.dtype not in _DTYPES:
            raise part.wrong("cos is missing, or not a floating-point table")
        positions = cos.shape[0] if cos.ndim else 0
        for name, target in (("cos", table._cos), ("sin", table._sin)):
            target.append(part.tensor(name, (positions, pairs), cos.dtype, device))
        return table

    @property
    def cos(self) -> torch.Tensor:
        """[positions, pairs], a view."""
        return self._cos.entries

    @property
    def sin(self) -> torch.Tensor:
        """[positions, pairs], a view."""
        return self._sin.entries

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray] | None:
        """cos and sin as float32 kernel arguments; None for another dtype or device."""
        if self._arrays is None:
            cos, sin = self.cos, self.sin
            if cos.dtype == torch.float32 and cos.device.type == "cpu":
                self._arrays = cos.numpy(), sin.numpy()
        return self._arrays

    @property
    def nbytes(self) -> int:
        """Memory of the table, bytes."""
        return self._cos.nbytes + self._sin.nbytes

    def __deepcopy__(self, memo: dict[int, Any]) -> RotaryTable:
        memo[id(self)] = copied = copy.copy(self)
        copied._cos, copied._sin, copied._source = self._cos.fork(), self._sin.fork(), None
        copied._known = copied._arrays = None
        return copied
