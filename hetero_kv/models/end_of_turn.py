"""The tokens that end an assistant's turn."""

from __future__ import annotations

from typing import Any

from hetero_kv.models.templates import TemplateError, TemplateLimitError, rendered_chat

ANSWER = "ANSWER"


def end_of_turn_ids(tokenizer: Any) -> frozenset[int]:
    """The token that the chat template writes after an assistant's answer, where it is one added to the vocabulary.

    A model's metadata often names only the token that ends a document; a chat model ends its turn with this one.

    Raises:
        TemplateLimitError: see there.
    """
    if not tokenizer.chat_template:
        return frozenset()
    conversation = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = rendered_chat(tokenizer, conversation)
    except TemplateLimitError:
        raise
    except TemplateError:
        return frozenset()  # a template with demands of its own; the metadata's tokens remain
    after = text.rpartition(ANSWER)[2]
    ids = tokenizer.encode(after, add_special_tokens=False)
    return frozenset(ids[:1]) & frozenset(tokenizer.added_tokens_decoder)
