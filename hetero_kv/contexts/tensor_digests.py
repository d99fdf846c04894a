"""SHA-256 of all bytes of tensors, which are read again only where they have changed."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

# A tensor's bytes are hashed in pieces of so many, by several threads; their hashes are hashed.
_PIECE = 1 << 24
_ROW = 512


class _Known(NamedTuple):
    tensor: weakref.ref[torch.Tensor]
    checksum: bytes
    digest: bytes


class TensorDigests:
    """Digests of tensors that live on, such as a model's weights.

    A tensor of which a digest is known is read by a checksum, which takes a tenth of the time. Versions of torch's
    (`_version`) would not do: `tensor.data` has one apart, and tensors of inference mode have none.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def of(self, tensors: Iterable[torch.Tensor]) -> list[bytes]:
        """The SHA-256 of each tensor's bytes."""
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            found = [self._of_one(tensor, pool) for tensor in tensors]
        self._known = {key: known for key, known in self._known.items() if known.tensor() is not None}
        return found

    def _of_one(self, tensor: torch.Tensor, pool: ThreadPoolExecutor) -> bytes:
        data = _bytes_of(tensor)
        checksum = _checksum(data)
        known = self._known.get(id(tensor))
        if known is not None and known.tensor() is tensor and known.checksum == checksum:
            return known.digest
        pieces = pool.map(_hashed, data.split(_PIECE))
        digest = hashlib.sha256(b"".join(pieces)).digest()
        self._known[id(tensor)] = _Known(weakref.ref(tensor), checksum, digest)
        return digest


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """[bytes] uint8, of the same memory where the tensor is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _hashed(data: torch.Tensor) -> bytes:
    return hashlib.sha256(data.cpu().numpy().data).digest()


def _checksum(data: torch.Tensor) -> bytes:
    """Sums of a tensor's words by rows and by columns: one that changes, or two that change places, change these."""
    whole = len(data) - len(data) % (8 * _ROW)
    words = data[:whole]
    if words.data_ptr() % 8 or words.storage_offset() % 8:
        words = words.clone()
    square = words.view(torch.int64).view(-1, _ROW)
    sums = torch.cat([square.sum(dim=1), square.sum(dim=0)]).cpu()
    rest = data[whole:].cpu().numpy().tobytes()
    return hashlib.sha256(sums.numpy().tobytes() + rest + str(len(data)).encode()).digest()
