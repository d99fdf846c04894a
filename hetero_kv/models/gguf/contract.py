"""What a GGUF file must be to be loaded: the checks of its metadata and of where its tensors lie.

The whole contract is in `docs/gguf_files.md`. Nothing here reads a tensor, and nothing is allocated before it holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from gguf import GGML_QUANT_SIZES

from hetero_kv.models.gguf.header import ARRAY, FLOATS, INTEGERS, STRING, MetadataValue, TensorEntry, UnsoundError
from hetero_kv.models.gguf.values import Whole, check_finite, check_values, check_whole, shown_entry

DEFAULT_ALIGNMENT = 32
LARGEST_ALIGNMENT = 1 << 16
#: More than any text model has in a row, a head, or a vocabulary.
LARGEST_DIMENSION = 1 << 24
NO_WEIGHTS = frozenset({"F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K"})
BLOCK = re.compile(r"blk\.(\d{1,9})\.")
#: What stands for no token: -1, as a file stores it without a sign and with one.
NO_TOKEN = ((1 << 32) - 1, -1)
TOKEN_ARRAYS = {"tokens": {STRING}, "merges": {STRING}, "scores": FLOATS, "token_type": INTEGERS}


def check_metadata(metadata: Mapping[str, MetadataValue]) -> None:
    """Raise UnsoundError where a value that is known is of another type, or beyond what it can be."""
    architecture = _text(metadata, "general.architecture")
    if architecture is not None:
        check_values(metadata, architecture)
    for key in ("split.count", "split.no"):
        check_whole(metadata, key, Whole(0, 1 << 16), None)
    _text(metadata, "tokenizer.chat_template")
    _text(metadata, "tokenizer.ggml.model")
    _check_vocabulary(metadata)


def alignment(metadata: Mapping[str, MetadataValue]) -> int:
    """The bytes of which every tensor's place is a multiple."""
    entry = metadata.get("general.alignment")
    if entry is None:
        return DEFAULT_ALIGNMENT
    check_whole(metadata, "general.alignment", Whole(8, LARGEST_ALIGNMENT), None)
    if entry.value & (entry.value - 1):
        raise UnsoundError(f"general.alignment is {entry.value:,}; a power of two is right")
    return int(entry.value)


def check_blocks(metadata: Mapping[str, MetadataValue], tensors: Iterable[TensorEntry]) -> None:
    """Raise UnsoundError where the file has tensors of more blocks, or of fewer, than it says."""
    entry = metadata.get("general.architecture")
    prefix = "" if entry is None else entry.value.decode()
    count = metadata.get(f"{prefix}.block_count")
    if count is None:
        return
    # Blocks that predict further tokens are counted, and may have been left out.
    spare = metadata.get(f"{prefix}.nextn_predict_layers")
    left_out = spare.value if spare is not None and spare.types[0] in INTEGERS else 0
    numbers = {int(match[1]) for tensor in tensors if (match := BLOCK.match(tensor.name))}
    wrong = max(numbers, default=0) >= count.value or len(numbers) < count.value - left_out
    if numbers and wrong:
        raise UnsoundError(
            f"{prefix}.block_count is {count.value:,}, and there are tensors of {len(numbers):,} blocks, "
            f"{min(numbers)} to {max(numbers)}"
        )


def size_in_file(tensor: TensorEntry) -> int:
    """The bytes that a tensor takes.

    Raises UnsoundError for dimensions that no tensor has, rows that are no whole blocks, and types of no weights.
    """
    shown = " by ".join(f"{length:,}" for length in tensor.shape)
    if any(not 1 <= length <= LARGEST_DIMENSION for length in tensor.shape):
        raise UnsoundError(f"tensor {tensor.name!r} is {shown}; dimensions are from 1 to {LARGEST_DIMENSION:,}")
    if tensor.quantization.name in NO_WEIGHTS:
        raise UnsoundError(
            f"tensor {tensor.name!r} is of type {tensor.quantization.name}, in which there are no weights"
        )
    block, block_bytes = GGML_QUANT_SIZES[tensor.quantization]
    if tensor.shape[-1] % block:
        raise UnsoundError(
            f"tensor {tensor.name!r} is {shown}; its rows are no whole blocks of {block} "
            f"{tensor.quantization.name} weights"
        )
    return math.prod(tensor.shape) // block * block_bytes


def check_places(tensors: Iterable[TensorEntry], each: int) -> int:
    """The bytes of all tensors' data, which lie one behind the other in the order of the header, each at the next
    multiple of `each` bytes: no two share a byte, and nothing lies between them.

    Raises UnsoundError where they do not.
    """
    end = 0
    for tensor in tensors:
        place = -(-end // each) * each
        if tensor.offset != place:
            raise UnsoundError(
                f"tensor {tensor.name!r} begins at byte {tensor.offset:,} of the data, where {place:,} follows from "
                "those before it"
            )
        end = place + size_in_file(tensor)
    return end


def _text(metadata: Mapping[str, MetadataValue], key: str) -> str | None:
    entry = metadata.get(key)
    if entry is None:
        return None
    if entry.types != (STRING,):
        raise UnsoundError(f"{key} is {shown_entry(entry)}; it is a text")
    return str(entry.value.decode())


def _check_vocabulary(metadata: Mapping[str, MetadataValue]) -> None:
    for name, kinds in TOKEN_ARRAYS.items():
        entry = metadata.get(f"tokenizer.ggml.{name}")
        if entry is not None and (entry.types[0] != ARRAY or entry.types[-1] not in kinds):
            raise UnsoundError(
                f"tokenizer.ggml.{name} is {shown_entry(entry)}; it is an array with something for each token"
            )
    check_finite(metadata, "tokenizer.ggml.scores")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return
    for name in ("scores", "token_type"):
        entry = metadata.get(f"tokenizer.ggml.{name}")
        if entry is not None and len(entry.value) != len(tokens.value):
            raise UnsoundError(
                f"tokenizer.ggml.{name} has {len(entry.value):,} elements for {len(tokens.value):,} tokens"
            )
    for key in metadata:
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id") and metadata[key].value not in NO_TOKEN:
            check_whole(metadata, key, Whole(0, len(tokens.value) - 1), None)
