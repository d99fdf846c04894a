"""Content addresses of blocks and of context prefixes: hashes of the identity and all tokens up to their end."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

#: Prefixes have addresses at multiples of this many tokens.
PIECE = 64


def salted(identity: str, salt: str) -> str:
    """The digest of an identity under a tenant's salt, without which no address can be computed. "" is no salt."""
    return hashlib.sha256(f"{identity} {salt}".encode()).hexdigest() if salt else identity


def prefix_addresses(identity: str, tokens: Sequence[int], step: int = PIECE) -> list[bytes]:
    """Addresses of the first `step`, 2 · `step`, … tokens; an incomplete last step has none."""
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
        contents: per block, a text that identifies its stored content.
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
