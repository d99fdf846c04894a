"""What blocks and beginnings of contexts are known by: hashes of what they belong to, their tokens and all before."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

#: Tokens of a piece: beginnings are known at multiples of it.
PIECE = 64


def beginnings(identity: str, tokens: Sequence[int], step: int = PIECE) -> list[bytes]:
    """Addresses of the first `step`, 2 · `step`, … tokens; what is left at the end has none."""
    hashed = hashlib.sha256(identity.encode())
    numbers = np.asarray(tokens, dtype=np.int32)
    found = []
    for start in range(0, len(numbers) - step + 1, step):
        hashed.update(numbers[start : start + step].tobytes())
        found.append(hashed.copy().digest())
    return found


def block_addresses(
    identity: str, layout: int, tokens: Sequence[int], block_size: int, contents: Sequence[str]
) -> list[bytes]:
    """Addresses of a sequence's blocks in a layout.

    Args:
        contents: of each block, one text for what is stored of it.
    """
    hashed = hashlib.sha256(identity.encode())
    numbers = np.asarray(tokens, dtype=np.int32)
    found = []
    for block, content in enumerate(contents):
        hashed.update(numbers[block * block_size : (block + 1) * block_size].tobytes())
        own = hashed.copy()
        own.update(f"{layout} {content}".encode())
        found.append(own.digest())
    return found
