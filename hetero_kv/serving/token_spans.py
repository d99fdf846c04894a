"""The positions of tokens in their text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetero_kv.serving.text_stream import UNFINISHED


def token_spans(tokenizer: Any, tokens: Sequence[int]) -> list[tuple[int, int]]:
    """The characters that each token is a part of, as (start, stop) in the tokens' text.

    That text is `tokenizer.decode(tokens, skip_special_tokens=True)`, which `TextStream` gives too. Tokens that share a
    character, as bytes of it, both have it in their spans. Special tokens have empty ones.

    Args:
        tokenizer: a transformers tokenizer.
        tokens: of one message, or of one document.
    """
    ids, known = list(tokens), 0
    spans: list[tuple[int, int]] = []
    # As in TextStream: the text of tokens [first, read) is known; a token's text may depend on the one before.
    first = read = 0
    for place in range(len(ids)):
        before, now = (tokenizer.decode(ids[first:stop], skip_special_tokens=True) for stop in (read, place + 1))
        begun = spans[-1][1] - 1 if read < place and spans[-1][1] > known else known
        whole = len(now.rstrip(UNFINISHED)) - len(before)
        spans.append((max(begun, known), known + max(0, whole)))
        if now.endswith(UNFINISHED):
            # The character that the next tokens complete.
            spans[-1] = spans[-1][0], spans[-1][1] + 1
        elif len(now) > len(before):
            known += len(now) - len(before)
            first, read = read, place + 1
    text = len(tokenizer.decode(ids, skip_special_tokens=True))
    return [(min(start, text), min(stop, text)) for start, stop in spans]
