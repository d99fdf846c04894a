"""Hashes of a prompt's beginning in whole blocks of tokens, by which a router finds the replica that has it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from hetero_kv.errors import HeteroKVError

#: Tokens of a block. A replica and the routers that send to it must use the same number.
BLOCK = 64


def block_hashes(token_ids: Sequence[int] | np.ndarray, block_size: int = BLOCK, salt: str = "") -> list[int]:
    """64-bit hashes of the first `block_size`, 2 · `block_size`, … tokens; an incomplete last block has none.

    A hash stands for all tokens up to its block's end. Of n hashes two are equal by chance with a probability of about
    n² / 2⁶⁵, and then a request goes to a replica that has to compute its prompt.

    Args:
        salt: a secret of the tenant. Hashes under another salt have nothing in common with these, so that nobody finds
            out by guessed tokens what another tenant has sent.

    Raises HeteroKVError unless `block_size` is at least 1.
    """
    if block_size < 1:
        raise HeteroKVError(f"block_size is {block_size}; it must be at least 1 token")
    # A key has at most 64 bytes; a salt may have more.
    hashed = blake2b(digest_size=8, key=blake2b(salt.encode(), digest_size=32).digest())
    # The same bytes on every machine.
    numbers = np.asarray(token_ids, dtype="<i4")
    found = []
    for start in range(0, len(numbers) - block_size + 1, block_size):
        hashed.update(numbers[start : start + block_size].tobytes())
        found.append(int.from_bytes(hashed.copy().digest(), "little"))
    return found
