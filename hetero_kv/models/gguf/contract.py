"""Checks the metadata of a GGUF file and the positions of its tensors, before anything is allocated.

`docs/gguf_files.md` states all requirements. No tensor is read here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Protocol

from hetero_kv.models.gguf.header import (
    ARRAY,
    FLOATS,
    INTEGERS,
    MOST_TENSORS,
    STRING,
    GGUFTensorEntry,
    MalformedHeaderError,
    MetadataValue,
    PartOfModelError,
)
from hetero_kv.models.gguf.metadata_ranges import IntegerRange, check_finite, check_integer, check_values, shown_entry
from hetero_kv.weights.tensor_types import BLOCK_SIZES

DEFAULT_ALIGNMENT = 32
LARGEST_ALIGNMENT = 1 << 16
#: Limit on a tensor's dimensions; the rows, heads and vocabularies of text models are smaller.
LARGEST_DIMENSION = 1 << 24
#: The same of a table of embeddings of sequences of tokens.
LARGEST_TABLE, TABLE = (1 << 31) - 1, "per_layer_token_embd.weight"
#: Limit on the files of a split model.
MOST_PARTS = 1 << 10
#: The end of the names of tables of each token's experts, which are whole numbers.
EXPERTS_BY_TOKEN = ".ffn_gate_tid2eid.weight"
NO_WEIGHTS = frozenset({"F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K"})
BLOCK = re.compile(r"blk\.(\d{1,9})\.")
#: The ids that mean "no token": -1, stored unsigned and signed.
NO_TOKEN = ((1 << 32) - 1, -1)
TOKEN_ARRAYS = {"tokens": {STRING}, "merges": {STRING}, "scores": FLOATS, "token_type": INTEGERS}


class NamedTensor(Protocol):
    """A tensor with a name."""

    @property
    def name(self) -> str:
        """The name, as GGUF spells it."""


def check_metadata(metadata: Mapping[str, MetadataValue]) -> None:
    """Raise MalformedHeaderError if a known key has a value of the wrong type, or out of range."""
    architecture = _text(metadata, "general.architecture")
    if architecture is not None:
        check_values(metadata, architecture)
    for key, largest in (("split.count", MOST_PARTS), ("split.no", MOST_PARTS), ("split.tensors.count", MOST_TENSORS)):
        check_integer(metadata, key, IntegerRange(0, largest), None)
    for key in ("general.type", "tokenizer.chat_template", "tokenizer.ggml.model"):
        _text(metadata, key)
    _check_vocabulary(metadata)


def alignment(metadata: Mapping[str, MetadataValue]) -> int:
    """The alignment of tensors, bytes."""
    entry = metadata.get("general.alignment")
    if entry is None:
        return DEFAULT_ALIGNMENT
    check_integer(metadata, "general.alignment", IntegerRange(8, LARGEST_ALIGNMENT), None)
    if entry.value & (entry.value - 1):
        raise MalformedHeaderError(f"general.alignment is {entry.value:,}; it must be a power of two")
    return int(entry.value)


def check_blocks(metadata: Mapping[str, MetadataValue], tensors: Iterable[NamedTensor]) -> None:
    """Raise MalformedHeaderError unless the file has the tensors of as many blocks as its metadata say.

    PartOfModelError: it has only those that predict further tokens, as files of them alone do.
    """
    entry = metadata.get("general.architecture")
    prefix = "" if entry is None else entry.value.decode()
    count = metadata.get(f"{prefix}.block_count")
    if count is None:
        return
    # HRM counts how often a token passes a layer, and has two stacks of them.
    in_stack = metadata.get(f"{prefix}.hrm.layers_per_stack")
    whole = count.value if in_stack is None or in_stack.types[0] not in INTEGERS else 2 * in_stack.value
    # The count includes blocks that predict further tokens, which a file may omit.
    spare = metadata.get(f"{prefix}.nextn_predict_layers")
    left_out = spare.value if spare is not None and spare.types[0] in INTEGERS else 0
    if left_out >= count.value:
        raise MalformedHeaderError(
            f"{prefix}.nextn_predict_layers is {left_out:,}, which leaves no layer of {prefix}.block_count "
            f"{count.value:,}"
        )
    numbers = {int(match[1]) for tensor in tensors if (match := BLOCK.match(tensor.name))}
    if numbers and count.value - left_out <= min(numbers) and max(numbers) < count.value:
        raise PartOfModelError("no layers, only blocks that predict further tokens")
    wrong = max(numbers, default=0) >= whole or len(numbers) < whole - left_out
    if numbers and wrong:
        raise MalformedHeaderError(
            f"{prefix}.block_count is {count.value:,}, and the file has tensors of {len(numbers):,} blocks, "
            f"{min(numbers)} to {max(numbers)}"
        )


def stored_bytes(tensor: GGUFTensorEntry) -> int:
    """Bytes of a tensor in the file.

    Raises MalformedHeaderError for impossible dimensions, rows that are not whole blocks, and types without weights.
    """
    shown = " by ".join(f"{length:,}" for length in tensor.shape)
    largest = LARGEST_TABLE if tensor.name == TABLE else LARGEST_DIMENSION
    if any(not 1 <= length <= largest for length in tensor.shape):
        raise MalformedHeaderError(f"tensor {tensor.name!r} is {shown}; dimensions must be from 1 to {largest:,}")
    is_table = tensor.name.endswith(EXPERTS_BY_TOKEN) and tensor.quantization.name == "I32"
    if tensor.quantization.name in NO_WEIGHTS and not is_table:
        raise MalformedHeaderError(
            f"tensor {tensor.name!r} has the type {tensor.quantization.name}, which no weights have"
        )
    block, block_bytes = BLOCK_SIZES[tensor.quantization]
    if tensor.shape[-1] % block:
        raise MalformedHeaderError(
            f"tensor {tensor.name!r} is {shown}; its rows must be whole blocks of {block} "
            f"{tensor.quantization.name} weights"
        )
    return math.prod(tensor.shape) // block * block_bytes


def check_places(tensors: Iterable[GGUFTensorEntry], each: int) -> int:
    """Bytes of all tensors' data, padding included.

    Tensors must follow each other in the order of the header, each at the next multiple of `each` bytes.

    Raises MalformedHeaderError for gaps and overlaps.
    """
    end = 0
    for tensor in tensors:
        place = -(-end // each) * each
        if tensor.offset != place:
            raise MalformedHeaderError(
                f"tensor {tensor.name!r} begins at byte {tensor.offset:,} of the data; after the tensors before it, "
                f"it must begin at {place:,}"
            )
        end = place + stored_bytes(tensor)
    return end


def _text(metadata: Mapping[str, MetadataValue], key: str) -> str | None:
    entry = metadata.get(key)
    if entry is None:
        return None
    if entry.types != (STRING,):
        raise MalformedHeaderError(f"{key} is {shown_entry(entry)}; it must be text")
    return str(entry.value.decode())


def _check_vocabulary(metadata: Mapping[str, MetadataValue]) -> None:
    for name, kinds in TOKEN_ARRAYS.items():
        entry = metadata.get(f"tokenizer.ggml.{name}")
        if entry is not None and (entry.types[0] != ARRAY or entry.types[-1] not in kinds):
            raise MalformedHeaderError(
                f"tokenizer.ggml.{name} is {shown_entry(entry)}; it must be an array with an element per token"
            )
    check_finite(metadata, "tokenizer.ggml.scores")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return
    for name in ("scores", "token_type"):
        entry = metadata.get(f"tokenizer.ggml.{name}")
        if entry is not None and len(entry.value) != len(tokens.value):
            raise MalformedHeaderError(
                f"tokenizer.ggml.{name} has {len(entry.value):,} elements for {len(tokens.value):,} tokens"
            )
    for key in metadata:
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id") and metadata[key].value not in NO_TOKEN:
            check_integer(metadata, key, IntegerRange(0, len(tokens.value) - 1), None)
