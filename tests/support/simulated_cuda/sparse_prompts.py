"""Triton kernels of sparse prefills on simulated tensors, by their torch functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hetero_kv.gpu_ops.key_sets import KeySets
from hetero_kv.gpu_ops.query_scores import line_sums_in_torch, logsumexp_in_torch, unseen_logsumexp_in_torch
from hetero_kv.gpu_ops.set_attention import set_attention_in_torch


def _attend_sets(
    q: Any, past_k: Any, past_v: Any, k: Any, v: Any, sink: Any, is_token: Any, is_offset: Any, tokens: Any,
    token_counts: Any, offsets: Any, offset_counts: Any, blocks: Any, block_counts: Any, out: Any, lse: Any,
    attended: Any, n: int, first: int, past: int, room: int, offset_room: int, length: int, offset_length: int,
    width: int, scale: float, softcap: float, *_: Any, **fixed: Any,
) -> None:  # fmt: skip
    sets = KeySets(is_token, is_offset, blocks, block_counts, first, n)
    scores = sink if fixed["HAS_SINK"] else None
    found = set_attention_in_torch(q, past_k, past_v, k, v, sets, scale, softcap, scores)
    for result, computed in zip((out, lse, attended), found, strict=True):
        result.copy_(computed)


def _logsumexp(
    q: Any, past_k: Any, k: Any, places: Any, out: Any, first: int, past: int, total: int, count: int, scale: float,
    softcap: float, *_: Any, **__: Any,
) -> None:  # fmt: skip
    out.fill_(float("-inf"))
    out[:, :, 0] = logsumexp_in_torch(q, past_k, k, places, first, scale, softcap)


def _line_sums(
    q: Any, past_k: Any, k: Any, lse: Any, by_token: Any, by_place: Any, n: int, first: int, past: int, total: int,
    count: int, scale: float, softcap: float, *_: Any, **fixed: Any,
) -> None:  # fmt: skip
    sums, by_distance = line_sums_in_torch(q, past_k, k, lse, first, scale, softcap)
    by_token.zero_()[:, :, 0] = sums
    places = by_place.zero_()[:, :, 0, :, : fixed["BLOCK"]]
    padded = torch.nn.functional.pad(by_distance.flip(-1), (0, places.shape[2] * fixed["BLOCK"] - total))
    places.copy_(padded.unflatten(2, places.shape[2:]))


def _unseen_logsumexp(
    q: Any, past_k: Any, k: Any, places: Any, is_token: Any, is_offset: Any, out: Any, unseen: Any, n: int, first: int,
    past: int, total: int, count: int, length: int, offset_length: int, key_blocks: int, scale: float, softcap: float,
    *_: Any, **__: Any,
) -> None:  # fmt: skip
    none = torch.zeros(*is_token.shape[:2], -(-n // 64), 1, dtype=torch.int32)
    sets = KeySets(is_token, is_offset, none, none[..., 0], first, n)
    out.fill_(float("-inf"))
    out[:, :, 0], by_block = unseen_logsumexp_in_torch(q, past_k, k, places, sets, scale, softcap)
    unseen.copy_(by_block)


#: As in `tests.support.simulated_cuda.kernels`.
DEFINITIONS: dict[str, Callable[..., None]] = {
    "_attend_sets": _attend_sets,
    "_logsumexp": _logsumexp,
    "_line_sums": _line_sums,
    "_unseen_logsumexp": _unseen_logsumexp,
}
WRITTEN: dict[str, tuple[str, ...]] = {
    "_attend_sets": ("out", "lse", "attended"),
    "_logsumexp": ("out",),
    "_line_sums": ("by_token", "by_place"),
    "_unseen_logsumexp": ("out", "unseen"),
}
