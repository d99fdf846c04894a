"""A tensor that grows at its end along one dimension, and may shrink at both, without a copy at each change."""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass

import torch

from hetero_kv.gpu_ops.page_locked import PageLocked

_Extent = tuple[torch.Tensor | None, int, int]


@dataclass(eq=False)
class Extent:
    """Where entries are stored: a buffer (None if there are none yet) and [start, end) in it.

    The extent is one attribute, so that an interrupt never leaves it half changed.
    """

    extent: _Extent


class GrowingTensor:
    """Entries along `dim`, in a buffer with spare capacity.

    Entries are only appended, so a checkpoint stays valid until entries before it are removed.
    When the entries move to a larger buffer, checkpoints are updated and the smaller buffer is freed at once.

    Args:
        dim: the dimension that grows.
        slack: spare entries of a new buffer.
    """

    def __init__(self, dim: int, slack: int) -> None:
        self.dim = dim
        self.slack = slack
        self._buffer: torch.Tensor | None = None
        self._start = self._end = 0
        # A buffer that two tensors share is written to by neither.
        self._is_shared = False
        self._checkpoints: weakref.WeakSet[Extent] = weakref.WeakSet()
        # The page-locked copy of parked entries, and the GPU that they came from.
        self._parked: tuple[PageLocked, torch.device] | None = None

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def entries(self) -> torch.Tensor:
        """A view of the entries. There must have been some."""
        assert self._buffer is not None
        return self._buffer.narrow(self.dim, self._start, len(self))

    @property
    def extent(self) -> _Extent:
        """The buffer (None if there are no entries yet), and where in it the entries begin and end."""
        return self._buffer, self._start, self._end

    def append(self, new: torch.Tensor) -> None:
        """Append the entries of `new`, which has the shape of the others in all dimensions but `dim`."""
        count = new.shape[self.dim]
        self.reserve(new, count)
        assert self._buffer is not None
        self._buffer.narrow(self.dim, self._end, count).copy_(new)
        self._end += count

    def room(self, like: torch.Tensor, count: int) -> torch.Tensor:
        """Append `count` entries, shaped like `like` but for `dim`; returns a view for the caller to write."""
        self.reserve(like, count)
        assert self._buffer is not None
        self._end += count
        return self._buffer.narrow(self.dim, self._end - count, count)

    def reserve(self, like: torch.Tensor, count: int) -> None:
        """Ensure capacity for `count` more entries, which have the shape of `like` in all dimensions but `dim`."""
        if self._buffer is None or self._is_shared or self._end + count > self._buffer.shape[self.dim]:
            self._move(like, room=count + self.slack)

    def replace(self, new: torch.Tensor) -> None:
        """Replace all entries by those of `new`, in a new buffer."""
        self._buffer, self._start, self._end = None, 0, 0
        self.append(new)

    def drop_first(self, count: int) -> None:
        """Remove the first `count` entries."""
        self._start += count

    def truncate(self, length: int) -> None:
        """Remove all but the first `length` entries."""
        self._end = self._start + length

    def select(self, index: torch.Tensor) -> None:
        """Reorder dimension 0: entry i becomes the former entry `index[i]`."""
        if self._buffer is not None:
            self.replace(self.entries.index_select(0, index.to(self._buffer.device)))

    def fork(self) -> GrowingTensor:
        """Returns a second tensor with the same entries. The one that grows first moves out of the shared buffer."""
        self._is_shared = self._buffer is not None
        forked = copy.copy(self)
        forked._checkpoints = weakref.WeakSet()
        return forked

    def checkpoint(self) -> Extent:
        """Returns the state that `restore` takes to return to the present entries."""
        made = Extent(self.extent)
        self._checkpoints.add(made)
        return made

    def restore(self, checkpoint: Extent) -> None:
        """Return to the entries at `checkpoint`."""
        # A fork may use a buffer that this tensor has moved out of.
        self._is_shared = self._is_shared or checkpoint.extent[0] is not self._buffer
        self._buffer, self._start, self._end = checkpoint.extent
        if self._parked is not None and self._buffer is self._parked[0].tensor:
            # The entries were parked on the host; they return to the GPU.
            self._resettle(self._buffer.to(self._parked[1]))
            self._parked = None

    def park(self) -> None:
        """Move the entries from a GPU to page-locked DRAM until `restore`; until then nothing reads them.

        For entries that a checkpoint may restore after others have replaced them. Entries shared with a fork stay on
        the GPU. Does nothing for entries on a CPU.
        """
        if self._buffer is None or not self._buffer.is_cuda or self._is_shared or not self._checkpoints:
            return
        entries = self.entries
        host = PageLocked(entries.shape, entries.dtype, entries.device)
        host.tensor.copy_(entries, non_blocking=True)
        self._parked = host, entries.device
        self._resettle(host.tensor)

    @property
    def nbytes(self) -> int:
        """Memory of the buffer, bytes."""
        return 0 if self._buffer is None else self._buffer.numel() * self._buffer.element_size()

    def _move(self, like: torch.Tensor, room: int) -> None:
        """Move to a new buffer with `room` spare entries; the first one takes shape, dtype and device from `like`."""
        source = like if self._buffer is None else self._buffer
        shape = list(source.shape)
        shape[self.dim] = len(self) + room
        buffer = source.new_empty(shape)
        if self._buffer is not None:
            buffer.narrow(self.dim, 0, len(self)).copy_(self.entries)
            self._have_checkpoints_follow(buffer)
        self._buffer, self._start, self._end, self._is_shared = buffer, 0, len(self), False

    def _resettle(self, buffer: torch.Tensor) -> None:
        """Use `buffer`, which contains exactly the entries, from now on."""
        self._have_checkpoints_follow(buffer)
        self._buffer, self._start, self._end = buffer, 0, len(self)

    def _have_checkpoints_follow(self, buffer: torch.Tensor) -> None:
        """Point checkpoints whose entries have all moved to the beginning of `buffer` there."""
        for each in self._checkpoints:
            before, start, end = each.extent
            if before is self._buffer and self._start <= start and end <= self._end:
                each.extent = buffer, start - self._start, end - self._start
