"""The tokens that end an assistant's turn."""

from __future__ import annotations

from typing import Any

from hetero_kv.models.templates import TemplateError, TemplateLimitError, rendered_chat

ANSWER = "ANSWER"


def end_of_turn_ids(tokenizer: Any) -> frozenset[int]:
    """The token that the chat template writes after an assistant's answer, if it is an added token; else empty.

    A chat model ends its turn with this token, while its metadata often names only the token that ends a document.

    Raises:
        TemplateLimitError: the template exceeds a limit.
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
