"""Vocabularies of tiny files: byte-level BPE and SentencePiece."""

from __future__ import annotations

import string
from typing import Any

from tokenizers import pre_tokenizers

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NORMAL, UNKNOWN, CONTROLLING, BYTE = 1, 2, 3, 6
_MERGED = ["he", "in", "er", "an"]


LLAMA, GEMMA = ("<unk>", "<s>", "</s>"), ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
_BEGINNING = {LLAMA: "<s>", GEMMA: "<bos>"}


def of_bytes(pre: str) -> dict[str, Any]:
    """As of GPT-2; `pre` names how text is split."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *_MERGED]
    tokens = [*letters, *CONTROL]
    return {
        **_named("gpt2", pre, tokens, [NORMAL] * len(letters) + [CONTROLLING] * len(CONTROL)),
        "tokenizer.ggml.merges": [f"{first} {second}" for first, second in _MERGED],
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }


def of_pieces(control: tuple[str, ...] = LLAMA) -> dict[str, Any]:
    """As of Llama 2: pieces with scores, and bytes for what they cannot spell.

    control: the first tokens, an unknown one, a beginning and an end among them.
    """
    pieces = ["▁", *string.ascii_letters, *_MERGED, "▁t", "▁a"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    first = [*control, "<|im_start|>", "<|im_end|>"]
    tokens = [*first, *bytes_, *pieces]
    kinds = [UNKNOWN if token == "<unk>" else CONTROLLING for token in first]
    kinds += [BYTE] * 256 + [NORMAL] * len(pieces)
    # Of a merged piece less than of its letters, so that it is found first.
    scores = [0.0] * (len(first) + 256) + [-float(place) for place in range(len(pieces), 0, -1)]
    return {
        **_named("llama", "default", tokens, kinds),
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": first.index(_BEGINNING[control]),
        "tokenizer.ggml.eos_token_id": first.index("<|im_end|>"),
        "tokenizer.ggml.unknown_token_id": first.index("<unk>"),
        "tokenizer.ggml.add_bos_token": True,
    }


def _named(model: str, pre: str, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.chat_template": TEMPLATE,
    }
