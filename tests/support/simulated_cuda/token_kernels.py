"""What the kernels compute that choose single tokens and attend to them; `kernels` has the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hetero_kv.gpu_ops.estimated_masses import (
    BlockMasses,
    log_totals_in_torch,
    mean_shares_in_torch,
    score_codes_in_torch,
    score_means_in_torch,
)
from hetero_kv.gpu_ops.stored_keys import score_stored_keys_in_torch
from hetero_kv.gpu_ops.token_attention import (
    KeyOffsets,
    Parts,
    attend_to_rest_in_torch,
    attend_to_stored_in_torch,
    attend_to_tokens_in_torch,
    sum_masses_in_torch,
)
from hetero_kv.gpu_ops.token_choice import Target, choose_in_torch, leave_in_torch
from hetero_kv.gpu_ops.token_slots import TokenSlots, fetch_tokens_in_torch, place_tokens_in_torch


def _score_means(
    q: Any, vectors: Any, number: Any, plain: Any, weights: Any, likely: Any, masses: Any, capacity: int,
    kv_heads: int, scale: float, softcap: float, log_n: float, *_: Any, **__: Any,
) -> None:  # fmt: skip
    found = score_means_in_torch(q, vectors, number, round(math.exp(log_n)), scale, softcap)
    for out, each in zip((plain, weights, likely, masses), found, strict=True):
        out.copy_(each)


def _score_codes(
    q: Any, codes: Any, listed: Any, number: Any, plain: Any, masses: Any, token_scores: Any, listed_count: int,
    capacity: int, kv_heads: int, scale: float, softcap: float, *_: Any, **fixed: Any,
) -> None:  # fmt: skip
    known = BlockMasses(plain, plain, plain, masses)
    lists = (listed, token_scores) if fixed["LISTED"] else (None, None)
    score_codes_in_torch(q, codes, lists[0], number, fixed["TOKENS"], known, scale, softcap, lists[1])


def _score_stored_keys(
    q: Any, keys: Any, offsets: Any, listed: Any, number: Any, masses: Any, token_scores: Any, listed_count: int,
    capacity: int, kv_heads: int, scale: float, softcap: float, *_: Any, **fixed: Any,
) -> None:  # fmt: skip
    known = BlockMasses(masses, masses, masses, masses)
    added = offsets if fixed["HAS_OFFSETS"] else None
    lists = (listed, token_scores) if fixed["LISTED"] else (None, None)
    score_stored_keys_in_torch(q, keys, added, lists[0], number, known, scale, softcap, lists[1])


def _log_totals(likely: Any, masses: Any, outside: Any, number: Any, totals: Any, *_: Any, **__: Any) -> None:
    totals.copy_(log_totals_in_torch(likely, masses, outside, number))


def _mean_shares(scores: Any, masses: Any, totals: Any, keys: Any, shares: Any, *_: Any, **__: Any) -> None:
    for out, each in zip((keys, shares), mean_shares_in_torch(scores, masses, totals), strict=True):
        out.copy_(each)


def _choose_by_share(
    keys: Any, shares: Any, totals: Any, number: Any, places: Any, place_counts: Any, chosen: Any, counts: Any,
    taken: Any, lists: int, n: int, width: int, share: float, least: int, most: int, times: int, covering: int,
    *_: Any, **fixed: Any,
) -> None:  # fmt: skip
    among = (places, place_counts) if fixed["LISTED"] else (None, None)
    target = Target(share, least, most, times, covering)
    marks = taken if fixed["MARKS"] else None
    choose_in_torch(keys, shares, totals, number, fixed["UNIT"], *among, target, chosen, counts, marks)


def _leave(
    token_scores: Any, taken: Any, places: Any, totals: Any, weights: Any, masses: Any, counted: Any, *_: Any, **__: Any
) -> None:
    leave_in_torch(token_scores, taken, places, totals, weights, masses, counted)


def _place_tokens(
    chosen: Any, counts: Any, ids: Any, slot_of: Any, following: Any, at: Any, misses: Any, into: Any, missed: Any,
    *_: Any, **__: Any,
) -> None:  # fmt: skip
    found = place_tokens_in_torch(TokenSlots(ids, slot_of, following), chosen, counts, missed)
    for out, each in zip((at, misses, into), found, strict=True):
        out.copy_(each)


def _fetch_tokens(stored: Any, table: Any, misses: Any, into: Any, missed: Any, out: Any, *_: Any, **__: Any) -> None:
    fetch_tokens_in_torch(stored, table, misses, into, missed, out)


def _attend_tokens(
    q: Any, slot_keys: Any, slot_values: Any, slots: Any, counts: Any, tokens: Any, offsets: Any, lse: Any, out: Any,
    width: int, size: int, scale: float, softcap: float, kv_heads: int, q0: int, q1: int, table: Any, *_: Any,
    **fixed: Any,
) -> None:  # fmt: skip
    block_size, listed = fixed["OFFSET_TOKENS"], (slots, counts, scale, softcap, Parts(out, lse))
    if fixed["STORED"]:
        attend_to_stored_in_torch(q, slot_keys, slot_values, table, *listed)
    else:
        added = KeyOffsets(offsets, tokens, block_size) if block_size else None
        attend_to_tokens_in_torch(q, slot_keys, slot_values, *listed, added)


def _attend_rest(
    weights: Any, masses: Any, means: Any, number: Any, lse: Any, out: Any, rest: Any, *_: Any, **__: Any
) -> None:
    rest.copy_(attend_to_rest_in_torch(weights, masses, means, number, Parts(out, lse)))


def _sum_masses(lse: Any, rest: Any, shares: Any, **__: Any) -> None:
    sum_masses_in_torch(lse, rest, shares)


def blocks_read(arguments: dict[str, Any]) -> torch.Tensor:
    """The blocks that `_fetch_tokens` reads in DRAM."""
    misses, size = arguments["misses"], arguments["tokens"]
    is_miss = torch.arange(misses.shape[2]) < arguments["missed"].view(*misses.shape[:2], 1)
    row, _, _ = is_miss.nonzero(as_tuple=True)
    return arguments["table"][row, (misses[is_miss] // size).long()].long()


def blocks_attended(arguments: dict[str, Any]) -> torch.Tensor:
    """The blocks that `_attend_tokens` reads in DRAM."""
    listed, size = arguments["slots"], arguments["STORED"]
    is_listed = torch.arange(listed.shape[2]) < arguments["counts"].view(*listed.shape[:2], 1)
    row, _, _ = is_listed.nonzero(as_tuple=True)
    return arguments["table"][row, (listed[is_listed] // size).long()].long()


#: See `kernels`.
DEFINITIONS: dict[str, Callable[..., None]] = {
    "_score_means": _score_means,
    "_score_codes": _score_codes,
    "_score_stored_keys": _score_stored_keys,
    "_log_totals": _log_totals,
    "_mean_shares": _mean_shares,
    "_choose_by_share": _choose_by_share,
    "_leave": _leave,
    "_place_tokens": _place_tokens,
    "_fetch_tokens": _fetch_tokens,
    "_attend_tokens": _attend_tokens,
    "_attend_rest": _attend_rest,
    "_sum_masses": _sum_masses,
}
#: See `kernels`.
WRITTEN: dict[str, tuple[str, ...]] = {
    "_score_means": ("plain", "weights", "likely", "masses"),
    "_score_codes": ("masses", "token_scores"),
    "_score_stored_keys": ("masses", "token_scores"),
    "_log_totals": ("totals",),
    "_mean_shares": ("keys", "shares"),
    "_choose_by_share": ("chosen", "counts", "taken"),
    "_leave": ("weights", "masses", "counted"),
    "_place_tokens": ("ids", "slot_of", "following", "at", "misses", "into", "missed", "stays", "free"),
    "_fetch_tokens": ("out",),
    "_attend_tokens": ("lse", "out"),
    "_attend_rest": ("lse", "out", "rest"),
    "_sum_masses": ("shares",),
}
