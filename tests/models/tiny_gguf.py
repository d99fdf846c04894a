"""Headers of tiny GGUF files in memory, and files of tiny models as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from hetero_kv.models.gguf.file import FileState, GGUFFile, TensorInfo
from hetero_kv.models.gguf.header import ARRAY, BOOL, STRING, MetadataValue
from hetero_kv.weights.tensor_types import BLOCK_SIZES
from tests.support.tiny_qwen2 import CHAT_TEMPLATE, END_OF_TEXT, SPECIAL_TOKENS, TOKENS

U32, F32 = 4, 6
SIZES = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
}


def value(content):
    """A Python value as a metadata entry."""
    if isinstance(content, list | tuple):
        element = value(content[0])
        return MetadataValue((ARRAY, *element.types), tuple(content))
    if isinstance(content, str):
        return MetadataValue((STRING,), content.encode())
    kind = BOOL if isinstance(content, bool) else U32 if isinstance(content, int) else F32
    return MetadataValue((kind,), float(np.float32(content)) if kind == F32 else content)


def header(architecture, metadata=None, tensors=None):
    """A file that is not there: its metadata behind the architecture's name, and tensors by name with their shapes."""
    entries = {"general.architecture": value(architecture)}
    for name, content in (SIZES | (metadata or {})).items():
        if content is not None:
            entries[f"{architecture}.{name}"] = value(content)
    shapes = {"token_embd.weight": (97, 64)} | (tensors or {})
    infos = tuple(TensorInfo(name, shape, GGMLQuantizationType.F32, 0, 4) for name, shape in shapes.items())
    return GGUFFile(Path("/nowhere/tiny.gguf"), entries, infos, FileState(0, 0, 0, 0), "")


def write(path, architecture, metadata, tensors, kind=None):
    """Write a file with the tiny vocabulary; `kind` is the matrices' quantisation, if any.

    Tensors are numbers, or blocks and their type.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for name, content in metadata.items():
        key = f"{architecture}.{name}"
        if isinstance(content, list):
            writer.add_array(key, content)
        elif isinstance(content, bool):
            writer.add_bool(key, content)
        elif isinstance(content, str):
            writer.add_string(key, content)
        else:
            (writer.add_uint32 if isinstance(content, int) else writer.add_float32)(key, content)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in TOKENS])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(END_OF_TEXT)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, numbers in tensors.items():
        if isinstance(numbers, tuple):
            # The writer asks for the size of a block, which it may not know.
            with patch.dict(gguf.GGML_QUANT_SIZES, BLOCK_SIZES):
                writer.add_tensor(name, numbers[0], raw_dtype=numbers[1])
            continue
        array = np.ascontiguousarray(numbers, np.float32)
        if kind is not None and array.ndim > 1:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
