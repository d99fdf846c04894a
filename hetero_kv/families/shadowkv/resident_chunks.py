"""The chunks that a decode step attends to, on the compute device; chunks chosen again stay from step to step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hetero_kv.gpu_ops.host_copies import on_device
from hetero_kv.gpu_ops.side_stream import joined, joined_on_error, on_side_stream

#: Chunks [batch, kv_heads, n] int64 -> their keys or values [batch, kv_heads, n, chunk_size, dim].
Supply = Callable[[torch.Tensor], torch.Tensor]

_EMPTY = -1
_CPU = torch.device("cpu")


class ResidentChunks:
    """Outlier chunks, which stay, and slots for chosen chunks, separately per kv head.

    Args:
        outlier_keys: [batch, kv_heads, outliers, chunk_size, k_dim].
        outlier_values: [batch, kv_heads, outliers, chunk_size, v_dim].

    Attributes:
        ids: [batch, kv_heads, slots] int64, the chunk in each slot; -1 for none. On the CPU or the compute device, as
            set by `provide`.
    """

    ids: torch.Tensor
    _keys: torch.Tensor
    _values: torch.Tensor

    def __init__(self, outlier_keys: torch.Tensor, outlier_values: torch.Tensor) -> None:
        self._outliers = outlier_keys.shape[2]
        self._set_slots(0, outlier_keys, outlier_values)

    @classmethod
    def restored(cls, outliers: int, ids: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> ResidentChunks:
        """Returns resident chunks from `all_keys` and `all_values`, which begin with `outliers` outlier chunks."""
        residents = cls.__new__(cls)
        residents._outliers, residents.ids, residents._keys, residents._values = outliers, ids, keys, values
        return residents

    @property
    def all_keys(self) -> torch.Tensor:
        """[batch, kv_heads, outliers + slots + 1, chunk_size, k_dim]; the last chunk is a scratch chunk."""
        return self._keys

    @property
    def all_values(self) -> torch.Tensor:
        """[batch, kv_heads, outliers + slots + 1, chunk_size, v_dim]; the last chunk is a scratch chunk."""
        return self._values

    def empty(self) -> None:
        """Mark all slots as empty."""
        self.ids.fill_(_EMPTY)

    @property
    def outlier_keys(self) -> torch.Tensor:
        """[batch, kv_heads, outliers, chunk_size, k_dim], a view."""
        return self._keys[:, :, : self._outliers]

    @property
    def outlier_values(self) -> torch.Tensor:
        """[batch, kv_heads, outliers, chunk_size, v_dim], a view."""
        return self._values[:, :, : self._outliers]

    @property
    def keys(self) -> torch.Tensor:
        """Outliers, then slots: [batch, kv_heads, tokens, k_dim], a view."""
        return self._keys[:, :, :-1].flatten(2, 3)

    @property
    def values(self) -> torch.Tensor:
        """Outliers, then slots: [batch, kv_heads, tokens, v_dim], a view."""
        return self._values[:, :, :-1].flatten(2, 3)

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of outliers, slots and a last scratch chunk: [batch, kv_heads, n, chunk_size, dim]."""
        return self._keys, self._values

    @property
    def tokens(self) -> int:
        """Number of tokens of outliers and slots."""
        return (self._keys.shape[2] - 1) * self._keys.shape[3]

    @property
    def key_slots(self) -> torch.Tensor:
        """[batch, kv_heads, slots, chunk_size, k_dim], a view."""
        return self._keys[:, :, self._outliers : -1]

    @property
    def value_slots(self) -> torch.Tensor:
        """[batch, kv_heads, slots, chunk_size, v_dim], a view."""
        return self._values[:, :, self._outliers : -1]

    def provide(self, slots: int, device: torch.device = _CPU) -> None:
        """Have `slots` slots, emptied if their number changes, and `ids` on `device`."""
        if slots != self.ids.shape[2]:
            self._set_slots(slots, self.outlier_keys, self.outlier_values, device)
        elif self.ids.device != device:
            self.ids = self.ids.to(device)

    @property
    def nbytes(self) -> int:
        """Memory of outliers and slots, bytes."""
        return sum(t.numel() * t.element_size() for t in (self._keys, self._values))

    def hold(self, chosen: torch.Tensor, rebuild: Supply, fetch: Supply, chunks: int) -> int:
        """Load the chosen chunks into the slots: resident ones stay, the others are rebuilt and fetched.

        Args:
            chosen: the chunks to load, [batch, kv_heads, n] int64 on the CPU, distinct within a head.
            rebuild: returns keys on the compute device, for chunks on that device; on CUDA it runs parallel to `fetch`.
            fetch: returns values on the compute device, for chunks on the CPU.
            chunks: upper bound of ids, exclusive.

        Returns how many of the chosen chunks were resident, over all heads.
        """
        device = self._keys.device
        self.provide(chosen.shape[2])
        is_hit = _members(self.ids, chunks).gather(2, chosen)
        missing = (~is_hit).sum(dim=2)
        most = int(missing.max()) if missing.numel() else 0
        if most:
            kept = (self.ids != _EMPTY) & _members(chosen, chunks).gather(2, self.ids.clamp(min=0))
            # A head that misses fewer than `most` rebuilds surplus chunks into the scratch chunk.
            surplus = torch.arange(most) >= missing[..., None]
            misses = chosen.gather(2, is_hit.byte().argsort(dim=2, stable=True)[..., :most])
            slots = kept.byte().argsort(dim=2, stable=True)[..., :most].masked_fill(surplus, self.ids.shape[2])
            lacking, at = on_device(misses, device), on_device(slots + self._outliers, device)
            with joined_on_error(device):
                with on_side_stream(device):
                    keys = rebuild(lacking)
                _put(self._values, at, fetch(misses))
                _put(self._keys, at, joined(keys))
            ids = torch.nn.functional.pad(self.ids, (0, 1), value=_EMPTY)
            self.ids = ids.scatter_(2, slots, misses)[..., :-1].contiguous()
        return int(is_hit.sum())

    def _set_slots(
        self, slots: int, outlier_keys: torch.Tensor, outlier_values: torch.Tensor, device: torch.device = _CPU
    ) -> None:
        """Allocate buffers: outliers, empty slots, and a scratch chunk for surplus work."""
        ids = torch.full((*outlier_keys.shape[:2], slots), _EMPTY, device=device)
        keys, values = (
            torch.cat([part, part.new_zeros(*part.shape[:2], slots + 1, *part.shape[3:])], dim=2)
            for part in (outlier_keys, outlier_values)
        )
        # Assigned together: an interrupt in between would leave ids of slots that do not exist.
        self.ids, self._keys, self._values = ids, keys, values


def _put(target: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> None:
    target.scatter_(2, at[..., None, None].expand(-1, -1, -1, *new.shape[3:]), new)


def _members(ids: torch.Tensor, chunks: int) -> torch.Tensor:
    """[batch, kv_heads, chunks] bool: which chunks are among `ids` [batch, kv_heads, n]; -1 stands for none."""
    mask = torch.zeros(*ids.shape[:2], chunks + 1, dtype=torch.bool)
    return mask.scatter_(2, ids.masked_fill(ids == _EMPTY, chunks), True)[..., :-1]
