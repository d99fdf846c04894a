"""Whether a question fits into what is left of a conversation's capacity, and how long its answer may be."""

from __future__ import annotations

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.errors import CacheFullError
from hetero_kv.models.text_encoding import CHARACTERS_OF_A_TOKEN
from hetero_kv.planning.plan import beyond_training


def require_encodable(cache: HeteroCache, question: str, trained: int) -> None:
    """Raise CacheFullError for a question so long that encoding it is in vain: that alone takes memory and time.

    Args:
        trained: tokens that the model was made for.
    """
    capacity = cache.max_seq_len
    if capacity is not None and len(question) > capacity * CHARACTERS_OF_A_TOKEN:
        raise CacheFullError(
            f"the question has {len(question):,} characters, of which no more than "
            f"{capacity * CHARACTERS_OF_A_TOKEN:,} can fit: max_seq_len is {capacity}; shorten the question, or "
            f"raise max_seq_len{_beyond(len(question) // CHARACTERS_OF_A_TOKEN, trained)}"
        )


def new_tokens_that_fit(cache: HeteroCache, prompt_tokens: int, wanted: int, trained: int) -> int:
    """How many of the tokens that are `wanted` for an answer have room behind a prompt, what is stored included.

    Raises CacheFullError where the prompt has none, or its answer none at all.
    """
    capacity = cache.max_seq_len
    if capacity is None:
        return wanted
    if prompt_tokens > capacity:
        needed = f"{prompt_tokens + wanted}{_beyond(prompt_tokens + wanted, trained)}"
        raise CacheFullError(
            f"the conversation would be {prompt_tokens} tokens long and max_seq_len is {capacity}; set max_seq_len "
            f"to at least {needed}, shorten the question by {prompt_tokens - capacity} tokens, or start anew "
            "(/reset)"
        )
    stored = cache.get_seq_length()
    cache.require_room(1, prompt_tokens - stored)
    room = cache.room
    assert room is not None
    # The last token of an answer is not stored until the next turn.
    return min(wanted, stored + room + 1 - prompt_tokens)


def _beyond(tokens: int, trained: int) -> str:
    """What a remedy of so many tokens adds where the model was made for fewer."""
    return f" ({beyond_training(tokens, trained)})" if tokens > trained else ""
