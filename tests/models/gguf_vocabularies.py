"""Vocabularies as the headers of GGUF files have them, and what their tokenizers make of texts."""

from __future__ import annotations

from pathlib import Path

from hetero_kv.models.gguf.file import FileState, GGUFFile
from hetero_kv.models.gguf.header import ARRAY, BOOL, STRING, MetadataValue
from hetero_kv.models.gguf.tokenizer import fast_tokenizer, tokenizer_parts
from tests.models.make_gguf_splits import letters

UINT, INT, FLOAT = 4, 5, 6
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
NOBODY = (1 << 32) - 1


def entry(value):
    """A metadata value as a file would have it."""
    if isinstance(value, bool):
        return MetadataValue((BOOL,), int(value))
    if isinstance(value, str):
        return MetadataValue((STRING,), value.encode())
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], str):
            return MetadataValue((ARRAY, STRING), tuple(text.encode() for text in value))
        return MetadataValue((ARRAY, FLOAT if value and isinstance(value[0], float) else INT), tuple(value))
    return MetadataValue((FLOAT if isinstance(value, float) else UINT,), value)


def file_of(architecture="llama", **keys):
    """A file's header; `x` stands for `tokenizer.ggml.x`, `x__y_` for `tokenizer.x.y`; None leaves a key out."""
    metadata = {"general.architecture": entry(architecture)}
    for name, value in keys.items():
        key = f"tokenizer.{name[:-1].replace('__', '.')}" if name.endswith("_") else f"tokenizer.ggml.{name}"
        if value is not None:
            metadata[key] = entry(value)
    return GGUFFile(Path("some.gguf"), metadata, (), FileState(0, 0, 0, 0), "")


def tokenizer_of(file):
    """The tokenizer that a file describes."""
    return fast_tokenizer(tokenizer_parts(file))


def byte_level(more=(), types=None, merges=("h e",), **keys):
    """A byte-level vocabulary: the letters of all bytes, `he`, and `more`, which are control tokens by default."""
    tokens = [*letters(), "he", *more]
    kinds = [NORMAL] * 257 + list(types or [CONTROL] * len(more))
    metadata = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": kinds, "merges": list(merges)}
    return file_of(**{**metadata, **keys})


WORDS = ["▁", *"helowrd!", "he", "ll", "hell", "hello", "▁hello", "lo"]


def sentencepiece(words=WORDS, more=(), types=(), **keys):
    """A SentencePiece vocabulary: `<unk>`, `<s>`, `</s>`, all bytes, the words by falling score, and `more`."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *more]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words), *types]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))] + [-1000.0] * len(more)
    return file_of(**{"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, **keys})


def lengths(tokenizer, text):
    """How many characters each piece has that a text is split into."""
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return " ".join(str(end - start) for _, (start, end) in pieces)


def words_of(tokenizer, text, **settings):
    return tokenizer.convert_ids_to_tokens(tokenizer(text, **settings).input_ids)
