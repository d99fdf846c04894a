"""Whether the tokens of two models are the same: a draft model's guesses are ids of the other model's tokens."""

from __future__ import annotations

import re
from typing import Any

#: Of ids that only one of the two vocabularies has, the most: models of a family differ in a few control tokens.
#: llama.cpp's limit (SPEC_VOCAB_MAX_SIZE_DIFFERENCE).
MOST_EXTRA = 128
# Ids without a token, which fill a vocabulary up to a round number: of llama.cpp's converter, Gemma and Llama 3.
_PADDING = re.compile(r"\[PAD\d+\]|<unused\d+>|<\|reserved_special_token_\d+\|>|<pad\d+>")


def difference(tokenizer: Any, drafts: Any) -> str | None:
    """How a draft model's vocabulary differs from the model's, for the middle of a sentence; None if they agree.

    They agree where every id that both have is the same token, padding aside, and at most `MOST_EXTRA` ids are of one
    of them alone.

    Args:
        tokenizer: the model's.
        drafts: the draft model's.
    """
    mine, theirs = _tokens(tokenizer), _tokens(drafts)
    sizes = f"the model's vocabulary has {len(mine):,} tokens and the draft model's {len(theirs):,}"
    for number in sorted(mine.keys() & theirs.keys()):
        if mine[number] != theirs[number]:
            return f"{sizes}, of which {number} is {mine[number]!r} and {theirs[number]!r}"
    extra = len(mine.keys() ^ theirs.keys())
    return f"{sizes}, and {extra:,} ids are of one of them alone" if extra > MOST_EXTRA else None


def _tokens(tokenizer: Any) -> dict[int, str]:
    """Id -> token, without padding."""
    found = ((number, token) for token, number in tokenizer.get_vocab().items())
    return {number: token for number, token in found if not _PADDING.fullmatch(token)}
