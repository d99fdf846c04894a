"""Conversations with a tiny random model whose tokens are bytes and some words."""

from __future__ import annotations

import hetero_kv
from hetero_kv.chat.conversation import Conversation
from tests.support.small_recipes import small_recipe
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizers import byte_level

TOKENIZER = byte_level(add_prefix_space=False)
#: Answers of these many tokens.
FEW = {"max_new_tokens": 4}


def new_model(recipe=None):
    model = tiny_model("llama", vocab_size=len(TOKENIZER), eos_token_id=None)
    if recipe is not None:
        hetero_kv.inject(model, small_recipe(recipe, chunk_size=16))
    return model


def conversation(model, **settings):
    return Conversation(model, TOKENIZER, **settings)


def replies(talk, *questions):
    return [talk.ask(question, **FEW).text for question in questions]
