"""Rows that kernels find by addresses on the device (`gpu_ops.row_memory`): what lies there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Rows(NamedTuple):
    """How the rows of a kernel's argument lie: their shape, and the type of their numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None


_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "uint8": torch.uint8,
}


def _of(kind: Any) -> torch.dtype:
    return _DTYPES[str(kind)]


def _score_blocks(of: dict[str, Any]) -> dict[str, Rows]:
    shape, strides = (of["kv_heads"], of["capacity"], of["VECTORS"], of["WIDTH"]), (of["vectors1"], of["vectors2"])
    return {"vectors": Rows(shape, _of(of["KIND"]), (*strides, of["WIDTH"], 1))}


def _place(of: dict[str, Any]) -> dict[str, Rows]:
    rows = Rows(tuple(of["chosen"].shape[1:]), torch.int64)
    return {"resident": rows, "after": rows}


def _divide(of: dict[str, Any]) -> dict[str, Rows]:
    rows = Rows(tuple(of["misses"].shape[1:]), torch.int64)
    return {"ids": rows, "attended": rows}


def _fetch(of: dict[str, Any]) -> dict[str, Rows]:
    shape = of["heads"], of["out_head"] // of["width"], *of["stored"].shape[2:]
    return {"out": Rows(shape, _of(of["KIND"]))}


def _attend_resident(of: dict[str, Any]) -> dict[str, Rows]:
    heads, dims, dtype = of["kv_heads"], (of["K_DIM"], of["V_DIM"]), of["q"].dtype
    slots, tokens, capacity = of["slots"], of["SLOT_TOKENS"], of["initial"] + of["ring"]
    packed = ((of["K_BITS"], of["K_BYTES"]), (of["V_BITS"], of["V_BYTES"]))
    widths = [dim // 32 * size if bits else dim for dim, (bits, size) in zip(dims, packed, strict=True)]
    found = {
        "keys": Rows((heads, capacity, dims[0]), dtype),
        "values": Rows((heads, capacity, dims[1]), dtype),
        "ids": Rows((heads, slots), torch.int64),
        "slot_keys": Rows((heads, slots, tokens, widths[0]), _of(of["SLOT_KEY"])),
        "slot_values": Rows((heads, slots, tokens, widths[1]), _of(of["SLOT_VALUE"])),
        "offsets": Rows((heads, slots), torch.int64),
    }
    if of["HAS_OFFSETS"]:
        found["offsets"] = Rows((heads, slots, 1, dims[0]), torch.float16)
    return found


def _score_means(of: dict[str, Any]) -> dict[str, Rows]:
    shape = of["kv_heads"], of["capacity"], 2 if of["SPREAD"] else 1, of["WIDTH"]
    return {"vectors": Rows(shape, _of(of["KIND"]), (of["vectors1"], of["vectors2"], of["WIDTH"], 1))}


def _score_codes(of: dict[str, Any]) -> dict[str, Rows]:
    # A block's codes, and the scales of its tokens in half precision.
    size = of["TOKENS"] * (of["STEPS"] * 4 + 2)
    return {"codes": Rows((of["kv_heads"], of["capacity"], size), torch.uint8, (of["codes1"], of["codes2"], 1))}


def _score_stored_keys(of: dict[str, Any]) -> dict[str, Rows]:
    blocks, width = (of["kv_heads"], of["capacity"]), of["DIM"] // 32 * of["BYTES"]
    strides = of["keys1"], of["keys2"], width, 1
    found = {"keys": Rows((*blocks, of["TOKENS"], width), torch.uint8, strides)}
    found["offsets"] = found["keys"]
    if of["HAS_OFFSETS"]:
        strides = of["offsets1"], of["offsets2"], of["DIM"], 1
        found["offsets"] = Rows((*blocks, 1, of["DIM"]), torch.float16, strides)
    return found


def _place_tokens(of: dict[str, Any]) -> dict[str, Rows]:
    heads = of["kv_heads"]
    sizes = {"ids": (heads, of["size"]), "slot_of": (heads, of["capacity"]), "following": (heads,)}
    return {name: Rows(shape, torch.int32) for name, shape in sizes.items()}


def _fetch_tokens(of: dict[str, Any]) -> dict[str, Rows]:
    return {"out": Rows((of["heads"], of["size"], of["width"]), _of(of["KIND"]))}


def _attend_tokens(of: dict[str, Any]) -> dict[str, Rows]:
    heads, found = of["kv_heads"], {}
    for name, letter, kind in (("slot_keys", "K", "KEY"), ("slot_values", "V", "VALUE")):
        dim, nbytes = of[f"{letter}_DIM"], of[f"{letter}_BYTES"]
        found[name] = Rows((heads, of["size"], dim // 32 * nbytes if nbytes else dim), _of(of[kind]))
    found["offsets"] = found["slot_keys"]
    if of["OFFSET_TOKENS"]:
        dim = of["K_DIM"]
        found["offsets"] = Rows((heads, of["blocks"], 1, dim), torch.float16, (dim, heads * dim, dim, 1))
    return found


def _attend_rest(of: dict[str, Any]) -> dict[str, Rows]:
    width = of["V_DIM"] // 32 * of["BYTES"] if of["BITS"] else of["V_DIM"]
    strides = of["means1"], of["means2"], 1
    return {"means": Rows((of["kv_heads"], of["capacity"], width), _of(of["KIND"]), strides)}


def _blocks(of: dict[str, Any], name: str, count: int, *shape: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a row of `count` blocks, which are contiguous."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return (of["kv_heads"], count, *shape), (of[f"{name}1"], of[f"{name}2"], *strides)


def _score_clusters(of: dict[str, Any]) -> dict[str, Rows]:
    each, blocks = of["EACH"], of["capacity"] // of["EACH"]
    keys, sizes = _blocks(of, "keys", blocks, of["DIM"], each), _blocks(of, "sizes", blocks, each)
    kind, single = _of(of["KIND"]), _of("fp32")
    return {"keys": Rows(keys[0], kind, keys[1]), "sizes": Rows(sizes[0], single, sizes[1])}


def _list_tokens(of: dict[str, Any]) -> dict[str, Rows]:
    shape, strides = _blocks(of, "clusters", of["blocks"], of["SIZE"])
    return {"clusters": Rows(shape, _of("int32"), strides)}


def _attend_clusters(of: dict[str, Any]) -> dict[str, Rows]:
    each, blocks = of["EACH"], of["clusters"] // of["EACH"]
    sums, sizes = _blocks(of, "sums", blocks, each, of["V_DIM"]), _blocks(of, "sizes", blocks, each)
    return {"sums": Rows(sums[0], _of("fp32"), sums[1]), "sizes": Rows(sizes[0], _of("fp32"), sizes[1])}


#: By kernel, the arguments that may be addresses.
ROWS: dict[str, Callable[[dict[str, Any]], dict[str, Rows]]] = {
    "_score_blocks": _score_blocks,
    "_place": _place,
    "_divide": _divide,
    "_fetch": _fetch,
    "_attend_resident": _attend_resident,
    "_score_means": _score_means,
    "_score_codes": _score_codes,
    "_score_stored_keys": _score_stored_keys,
    "_place_tokens": _place_tokens,
    "_fetch_tokens": _fetch_tokens,
    "_attend_tokens": _attend_tokens,
    "_attend_rest": _attend_rest,
    "_score_clusters": _score_clusters,
    "_count_tokens": _list_tokens,
    "_list_tokens": _list_tokens,
    "_attend_clusters": _attend_clusters,
}


def rows_of(name: str, named: dict[str, Any]) -> dict[str, Rows]:
    """The arguments of a kernel that are addresses, by parameter."""
    return ROWS[name](named) if name in ROWS and named["ALIGNMENT"] else {}


def addresses_of(named: dict[str, Any], rows: dict[str, Rows]) -> dict[str, list[int]]:
    """The addresses at present, of arguments on the CPU."""
    return {each: [address for address in named[each].tolist() if address] for each in rows}


def _at(address: int, rows: Rows) -> torch.Tensor | None:
    count = 1
    for size, stride in zip(rows.shape, rows.strides or _dense(rows.shape), strict=True):
        count += (size - 1) * stride
    if not address or 0 in rows.shape:
        return None
    memory = (ctypes.c_byte * (count * rows.dtype.itemsize)).from_address(address)
    flat = torch.frombuffer(memory, dtype=rows.dtype)
    return flat.as_strided(rows.shape, rows.strides or _dense(rows.shape))


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


class StackedRows:
    """The rows of a kernel's arguments side by side, as the kernel's definition takes them.

    Args:
        named: the arguments by parameter, on the CPU.
    """

    def __init__(self, named: dict[str, Any], rows: dict[str, Rows]) -> None:
        self._lying = {each: [_at(address, of) for address in named[each].tolist()] for each, of in rows.items()}
        self.tensors: dict[str, torch.Tensor] = {}
        for each, of in rows.items():
            # A row without memory has zeros, which nobody reads.
            parts = [torch.zeros(of.shape, dtype=of.dtype) if row is None else row for row in self._lying[each]]
            self.tensors[each] = torch.stack(parts)

    def write(self, names: tuple[str, ...]) -> None:
        """Write the rows of these arguments back to where they lie."""
        for each in names:
            for row, new in zip(self._lying.get(each, ()), self.tensors.get(each, ()), strict=True):
                if row is not None:
                    row.copy_(new)
