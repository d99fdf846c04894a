"""Separates queries, keys and values that a file has as one tensor, where the model has a matrix for each.

llama.cpp's converter merges them with `--fuse-qkv`, and files of ChatGLM have them merged. The rows of each follow each
other, so that its tensor is a range of the file's bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.architectures.declaration import Architecture
from hetero_kv.models.gguf.contract import BLOCK
from hetero_kv.models.gguf.file import GGUFFile, TensorInfo

MERGED, PARTS = "attn_qkv", ("attn_q", "attn_k", "attn_v")
#: A tensor of a gated delta net, whose merged matrix is one in the model too.
OF_DELTA_NET = "ssm_out"


def separated(file: GGUFFile, architecture: Architecture) -> GGUFFile:
    """The file with a tensor for queries, keys and values each, where the architecture's attention has these alone.

    Raises ModelError if the rows of a merged tensor are not those of the file's heads.
    """
    is_known, net = MERGED in architecture.layer, f"{OF_DELTA_NET}.weight"
    if not all(part in architecture.layer for part in PARTS) or (is_known and OF_DELTA_NET not in architecture.layer):
        return file
    nets = {name.removesuffix(net) for name in file.tensor_names if is_known and name.endswith(net)}
    tensors = [each for info in file.tensors for each in _parts(file, info, nets)]
    return file if len(tensors) == len(file.tensors) else replace(file, tensors=tuple(tensors))


def _parts(file: GGUFFile, info: TensorInfo, kept: set[str]) -> Iterator[TensorInfo]:
    """The parts of a tensor; itself where it is no merged one, or of one of the blocks `kept`."""
    match = BLOCK.match(info.name)
    stem, _, kind = info.name[match.end() :].rpartition(".") if match else ("", "", "")
    if match is None or stem != MERGED or match[0] in kept:
        yield info
        return
    layer = int(match[1])
    heads = _of_layer(file, "attention.head_count", layer, 0)
    groups = _of_layer(file, "attention.head_count_kv", layer, heads)
    rows = info.shape[0]
    key, value = (_of_layer(file, f"attention.{part}_length", layer, 0) for part in ("key", "value"))
    if not groups and (linear := _of_layer(file, "kda.head_dim", layer, 0)):
        # Of Kimi's delta attention, which has a key and a value for each query.
        groups, key, value = heads, linear, linear
    # A gated query has as many rows again.
    query = next((size for size in (key, 2 * key) if heads * size + groups * (key + value) == rows), 0)
    if not groups or not query:
        # The sizes are not in the file, or other ones in this layer.
        if heads < 1 or groups < 1 or rows % (heads + 2 * groups):
            raise ModelError(
                f"tensor {info.name!r} of {str(file.parts[info.part].path)!r} has {rows:,} rows, which are not those "
                f"of {heads} query heads and {groups} key and value heads of one size; convert it again"
            )
        query = key = value = rows // (heads + 2 * groups)
    offset = info.offset
    for part, count in zip(PARTS, (heads * query, groups * key, groups * value), strict=True):
        nbytes = info.nbytes // rows * count
        name = f"{match[0]}{part}.{kind}"
        yield TensorInfo(name, (count, *info.shape[1:]), info.quantization, offset, nbytes, info.part)
        offset += nbytes


def _of_layer(file: GGUFFile, suffix: str, layer: int, default: int) -> int:
    value: Any = file.get(f"{file.architecture}.{suffix}", default)
    return int(value[layer] if isinstance(value, tuple | list) else value)
