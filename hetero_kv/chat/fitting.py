"""Checks that a question fits into the free capacity of a conversation, and bounds the length of its answer."""

from __future__ import annotations

from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.errors import CacheFullError
from hetero_kv.models.text_encoding import CHARACTERS_OF_A_TOKEN
from hetero_kv.planning.plan import beyond_training


def require_encodable(cache: HeteroCache, question: str, trained: int) -> None:
    """Raise CacheFullError for a question too long to fit, before encoding it, which alone takes memory and time.

    Args:
        trained: the model's training context length, tokens.
    """
    capacity = cache.max_seq_len
    if capacity is not None and len(question) > capacity * CHARACTERS_OF_A_TOKEN:
        raise CacheFullError(
            f"the question has {len(question):,} characters, and at most "
            f"{capacity * CHARACTERS_OF_A_TOKEN:,} can fit: max_seq_len is {capacity}; shorten the question, or "
            f"raise max_seq_len{_beyond(len(question) // CHARACTERS_OF_A_TOKEN, trained)}"
        )


def new_tokens_that_fit(cache: HeteroCache, prompt_tokens: int, max_new_tokens: int, trained: int) -> int:
    """How many of `max_new_tokens` fit after a prompt, counting the stored tokens.

    Raises CacheFullError if the prompt does not fit, or no token of its answer.
    """
    capacity = cache.max_seq_len
    if capacity is None:
        return max_new_tokens
    if prompt_tokens > capacity:
        needed = f"{prompt_tokens + max_new_tokens}{_beyond(prompt_tokens + max_new_tokens, trained)}"
        raise CacheFullError(
            f"the conversation would be {prompt_tokens} tokens long and max_seq_len is {capacity}; set max_seq_len "
            f"to at least {needed}, shorten the question by {prompt_tokens - capacity} tokens, or start a new "
            "conversation (/reset)"
        )
    stored = cache.get_seq_length()
    cache.require_room(1, prompt_tokens - stored)
    room = cache.room
    assert room is not None
    # The last token of an answer is not stored until the next turn.
    return min(max_new_tokens, stored + room + 1 - prompt_tokens)


def _beyond(tokens: int, trained: int) -> str:
    """A remedy's addition if its number of tokens exceeds the model's training context length."""
    return f" ({beyond_training(tokens, trained)})" if tokens > trained else ""
