"""Texts and bytes of single tokens, for log-probabilities and `/tokenize`."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from hetero_kv.serving.stream import Piece

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: Any, token: int) -> bytes | None:
    """The bytes of a token, control tokens' texts included; None if a part of a character is unknown."""
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" not in text:
        return text.encode()
    word: str = tokenizer.convert_ids_to_tokens(token) or ""
    if found := _BYTE.fullmatch(word):
        return bytes([int(found[1], 16)])
    letters = _byte_letters()
    return bytes(letters[letter] for letter in word) if word and all(each in letters for each in word) else None


def token_text(tokenizer: Any, token: int) -> str:
    """The text of a token; of a part of a character `bytes:` and its bytes, as OpenAI writes them."""
    found = token_bytes(tokenizer, token)
    try:
        return (found or b"\xff").decode()
    except UnicodeDecodeError:
        return f"token:{token}" if found is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


@cache
def _byte_letters() -> dict[str, int]:
    """The letters for which byte-level vocabularies write bytes (GPT-2): printable ones stand for themselves."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}


def chat_logprobs(tokenizer: Any, piece: Piece) -> dict[str, Any]:
    """A token's log-probabilities in chat completions' format."""
    assert piece.logprob is not None
    return {
        **_entry(tokenizer, piece.token, piece.logprob),
        "top_logprobs": [_entry(tokenizer, token, value) for token, value in piece.alternatives.items()],
    }


def _entry(tokenizer: Any, token: int, value: float) -> dict[str, Any]:
    content = token_bytes(tokenizer, token)
    return {
        "id": token, "token": token_text(tokenizer, token), "logprob": value,
        "bytes": None if content is None else list(content),
    }  # fmt: skip


def completion_logprobs(tokenizer: Any, pieces: list[Piece], offset: int) -> dict[str, Any]:
    """Tokens' log-probabilities in completions' format; `offset` is where the first one's text begins.

    A token that was drawn is also among its alternatives, as in OpenAI's API.
    """
    offsets = [offset]
    for piece in pieces:
        offsets.append(offsets[-1] + len(piece.text))
    return {
        "tokens": [token_text(tokenizer, piece.token) for piece in pieces],
        "token_logprobs": [piece.logprob for piece in pieces],
        "top_logprobs": [
            {
                token_text(tokenizer, token): value
                for token, value in {**piece.alternatives, piece.token: piece.logprob}.items()
            }
            for piece in pieces
        ],
        "text_offset": offsets[:-1],
    }
