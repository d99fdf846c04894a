"""SHA-256 digests of tensors, recomputed only for tensors that have changed."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

# Bytes of a piece. Several threads hash a tensor's pieces; the digest is the hash of their hashes.
_PIECE = 1 << 24
_ROW = 512


class _Known(NamedTuple):
    tensor: weakref.ref[torch.Tensor]
    checksum: bytes
    digest: bytes


class TensorDigests:
    """Digests of long-lived tensors, such as a model's weights.

    For a tensor with a known digest, a checksum detects changes in a tenth of the time. Torch's version counter
    (`_version`) does not suffice: `tensor.data` has a separate one, and inference tensors have none.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def of(self, tensors: Iterable[torch.Tensor]) -> list[bytes]:
        """The SHA-256 digest of each tensor's bytes."""
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            found = [self._of_one(tensor, pool) for tensor in tensors]
        # Several models over the same weights may look at the same time.
        self._known = {key: known for key, known in list(self._known.items()) if known.tensor() is not None}
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
    """The tensor's bytes as [bytes] uint8, a view if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _hashed(data: torch.Tensor) -> bytes:
    return hashlib.sha256(data.cpu().numpy().data).digest()


def _checksum(data: torch.Tensor) -> bytes:
    """A hash of the sums of a tensor's words by rows and by columns, which detects changed and swapped words."""
    whole = len(data) - len(data) % (8 * _ROW)
    words = data[:whole]
    if words.data_ptr() % 8 or words.storage_offset() % 8:
        words = words.clone()
    square = words.view(torch.int64).view(-1, _ROW)
    sums = torch.cat([square.sum(dim=1), square.sum(dim=0)]).cpu()
    rest = data[whole:].cpu().numpy().tobytes()
    return hashlib.sha256(sums.numpy().tobytes() + rest + str(len(data)).encode()).digest()
