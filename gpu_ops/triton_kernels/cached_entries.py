"""Entries of a bounded cache: append, select and gather, one launch each; `gpu_ops.cached_entries` defines the results.

Kernels only copy numbers, so vectors are viewed as integers of the same size, which halves the kernels to compile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096
_SCORES = 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

MOST_SCORES = 3
"""Number of score lists that one launch gathers."""


@triton.jit(do_not_specialize=["taken", "position"])
def _append(
    key, value, keys, values, positions, taken, position, heads, capacity, key_row, key_head, value_row, value_head,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    each = tl.program_id(0).to(tl.int64)
    row, head, to = each // heads, each % heads, each * capacity + taken
    k, v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    new_key = tl.load(key + row * key_row + head * key_head + k, mask=k < K_DIM)
    tl.store(keys + to * K_DIM + k, new_key, mask=k < K_DIM)
    new_value = tl.load(value + row * value_row + head * value_head + v, mask=v < V_DIM)
    tl.store(values + to * V_DIM + v, new_value, mask=v < V_DIM)
    tl.store(positions + to, position)


@triton.jit(do_not_specialize=["cached"])
def _all_but_lowest(
    scores, index, cached, first, last, lists, row_stride, list_stride, HIGHEST: tl.constexpr, BLOCK: tl.constexpr
):
    each = tl.program_id(0).to(tl.int64)
    own = scores + each // lists * row_stride + each % lists * list_stride
    lane = tl.arange(0, BLOCK)
    lowest = tl.full([BLOCK], HIGHEST, scores.dtype.element_ty)
    at = tl.full([BLOCK], -1, tl.int64)
    for start in range(0, cached, BLOCK):
        entry = start + lane
        score = tl.load(own + entry, mask=entry < cached, other=HIGHEST)
        # NaN counts as the lowest.
        score = tl.where(score == score, score, -HIGHEST)
        score = tl.where((entry < first) | (entry >= cached - last), HIGHEST, score)
        is_lower = (entry < cached) & (score <= lowest)
        lowest, at = tl.where(is_lower, score, lowest), tl.where(is_lower, entry.to(tl.int64), at)
    dropped = tl.max(tl.where(lowest == tl.min(lowest, 0), at, -1), 0)
    for start in range(0, cached - 1, BLOCK):
        entry = (start + lane).to(tl.int64)
        tl.store(index + each * (cached - 1) + entry, entry + (entry >= dropped), mask=entry < cached - 1)


@triton.jit
def _gather_scores(scores, known, row_stride, head_stride, each, heads, source, is_entry, out, place):
    """Write the scores of the entries `source` to `place` in `out`; entries beyond the `known` ones have 0."""
    own = scores + each // heads * row_stride + each % heads * head_stride
    tl.store(out + place, tl.load(own + source, mask=is_entry & (source < known), other=0), mask=is_entry)


@triton.jit(do_not_specialize=["known_a", "known_b", "known_c"])
def _keep(
    keys, values, positions, a, b, c, index, kept_keys, kept_values, kept_positions, kept_a, kept_b, kept_c,
    count, heads, capacity, kept_capacity, index_row, index_head, known_a, a_row, a_head, known_b, b_row, b_head,
    known_c, c_row, c_head,
    SCORES: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    each = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    is_entry = entry < count
    source = tl.load(index + each // heads * index_row + each % heads * index_head + entry, mask=is_entry, other=0)
    at, to = each * capacity + source, each * kept_capacity + entry
    k, v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    of_keys = is_entry[:, None] & (k < K_DIM)[None, :]
    found = tl.load(keys + at[:, None] * K_DIM + k[None, :], mask=of_keys)
    tl.store(kept_keys + to[:, None] * K_DIM + k[None, :], found, mask=of_keys)
    of_values = is_entry[:, None] & (v < V_DIM)[None, :]
    found = tl.load(values + at[:, None] * V_DIM + v[None, :], mask=of_values)
    tl.store(kept_values + to[:, None] * V_DIM + v[None, :], found, mask=of_values)
    tl.store(kept_positions + to, tl.load(positions + at, mask=is_entry), mask=is_entry)
    place = each * count + entry
    if SCORES > 0:
        _gather_scores(a, known_a, a_row, a_head, each, heads, source, is_entry, kept_a, place)
    if SCORES > 1:
        _gather_scores(b, known_b, b_row, b_head, each, heads, source, is_entry, kept_b, place)
    if SCORES > 2:
        _gather_scores(c, known_c, c_row, c_head, each, heads, source, is_entry, kept_c, place)


def append_token(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor,
    taken: int, position: int,
) -> None:  # fmt: skip
    """As `gpu_ops.cached_entries.append_token_in_torch`."""
    batch, heads, capacity, k_dim = keys.shape
    key, value, keys, values = (_integers(part) for part in (_dense(key), _dense(value), keys, values))
    strides = *key.stride()[:2], *value.stride()[:2]
    _append[(batch * heads,)](
        key, value, keys, values, positions, taken, position, heads, capacity, *strides, **_widths(k_dim, values)
    )


def all_but_lowest(scores: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """As `gpu_ops.cached_entries.all_but_lowest_in_torch`."""
    batch, lists, cached = scores.shape
    scores = _dense(scores)
    index = torch.empty(batch, lists, cached - 1, dtype=torch.int64, device=scores.device)
    highest = float("inf") if scores.dtype.is_floating_point else torch.iinfo(scores.dtype).max
    numbers = cached, first, last, lists, *scores.stride()[:2]
    _all_but_lowest[(batch * lists,)](scores, index, *numbers, HIGHEST=highest, BLOCK=_SCORES)
    return index


def keep(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scores: Sequence[torch.Tensor],
    index: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> list[torch.Tensor]:
    """As `gpu_ops.cached_entries.keep_in_torch`, for at most `MOST_SCORES` lists of scores."""
    batch, heads, capacity, k_dim = parts[0].shape
    count = index.shape[2]
    index = _dense(index.expand(batch, heads, count))
    scores = [_dense(each) for each in scores]
    gathered = [torch.empty(batch, heads, count, dtype=each.dtype, device=each.device) for each in scores]
    # The kernel does not read unused lists.
    unused = [parts[2]] * (MOST_SCORES - len(scores))
    described = [number for each in (*scores, *unused) for number in (each.shape[2], *each.stride()[:2])]
    keys, values, kept_keys, kept_values = (_integers(part) for part in (*parts[:2], *kept[:2]))
    entries = max(1, _ELEMENTS // triton.next_power_of_2(max(k_dim, values.shape[3])))
    _keep[(triton.cdiv(count, entries), batch * heads)](
        keys, values, parts[2], *scores, *unused, index, kept_keys, kept_values, kept[2], *gathered, *unused,
        count, heads, capacity, kept[0].shape[2], *index.stride()[:2], *described,
        SCORES=len(scores), ENTRIES=entries, **_widths(k_dim, values),
    )  # fmt: skip
    return gathered


def _widths(k_dim: int, values: torch.Tensor) -> dict[str, int]:
    v_dim = values.shape[3]
    blocks = {"BLOCK_K": triton.next_power_of_2(k_dim), "BLOCK_V": triton.next_power_of_2(v_dim)}
    return {"K_DIM": k_dim, "V_DIM": v_dim, **blocks}


def _dense(numbers: torch.Tensor) -> torch.Tensor:
    """A tensor with a contiguous last dimension."""
    return numbers if numbers.stride(-1) == 1 else numbers.contiguous()


def _integers(vectors: torch.Tensor) -> torch.Tensor:
    return vectors.view(_INTEGERS[vectors.element_size()])
