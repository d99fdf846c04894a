"""Launches of the kernels that choose and attend to blocks, for rows that lie anywhere; see `compiled_kernels.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hetero_kv.gpu_ops.slot_formats import GROUP_BYTES, Slots, as_words
from hetero_kv.gpu_ops.triton_kernels import block_choice, resident_attention, resident_slots
from tests.gpu_ops.compiled_numbers import BRAIN, DIM, HALF, at_addresses, zeros


def of_rows(dtype: torch.dtype, bits: int) -> dict[str, Callable[[], Any]]:
    """Launches for rows that are found by addresses: of each kernel that takes them."""
    q, k = zeros(4, 1, 32, DIM, dtype=dtype).transpose(1, 2), zeros(4, 1, 8, DIM, dtype=dtype).transpose(1, 2)
    window, plain = at_addresses(zeros(4, 8, 352, DIM, dtype=dtype)), zeros(4, 8, 256, 16, DIM, dtype=dtype)
    packed = torch.zeros(4, 8, 256, 16, DIM // 32 * GROUP_BYTES.get(bits, 34), dtype=torch.uint8)
    slots, chunks = at_addresses(packed if bits else plain), torch.zeros(4, 8, 256, dtype=torch.int64)
    offsets = at_addresses(zeros(4, 8, 256, 1, DIM, dtype=HALF)) if bits else None
    ids, numbers, sent = at_addresses(chunks), torch.zeros(4, 3, dtype=torch.int64), zeros(*k.shape)
    places = (window, window), 16, ids, Slots(slots, slots, offsets), numbers
    width, number = (DIM // 32 * GROUP_BYTES[8], torch.uint8) if bits else (DIM, HALF)
    vectors = at_addresses(zeros(4, 8192, 8, 2, width, dtype=number).movedim(1, 2))
    stored = torch.zeros(9, 8, *as_words(slots).shape[3:], dtype=as_words(slots).dtype)
    lists = torch.zeros(4, 500, dtype=torch.int32), chunks, chunks
    kind = str(bits) if bits else "plain"
    return {
        f"attend to slots at addresses, {kind}": lambda: resident_attention.attend(
            q, k, k, *places, 0.1, None, (sent, sent), 16
        ),
        f"fetch to addresses, {kind}": lambda: resident_slots.fetch(stored, *lists, as_words(slots)),
        f"score at addresses, {kind}": lambda: block_choice.score(q, vectors, numbers[:, 2], True, 0.1, None, None),
        f"divide at addresses, {kind}": lambda: resident_slots.divide(
            ids, chunks, chunks, torch.zeros(32, dtype=torch.int32), 0.3, ids, torch.zeros(4, 8, 256, dtype=torch.int32)
        ),
        f"place at addresses, {kind}": lambda: resident_slots.place(ids, chunks, torch.zeros(32, dtype=torch.int32)),
    }


#: Plain blocks, and packed ones.
LAUNCHES = {**of_rows(BRAIN, 0), **of_rows(HALF, 4)}
