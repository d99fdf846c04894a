# ruff: noqa: RUF001 (DeepSeek's control tokens)
"""Tokenizers with the chat templates of families that write calls of tools, and what these templates write."""

from __future__ import annotations

import json
from functools import cache

from hetero_kv.models.templates import rendered_chat
from tests.support import tool_templates as templates
from tests.support.tiny_tokenizers import byte_level

FAMILIES = {
    "hermes": templates.HERMES,
    "qwen_coder": templates.QWEN_CODER,
    "llama": templates.LLAMA,
    "mistral": templates.MISTRAL,
    "mistral_args": templates.NEW_MISTRAL,
    "glm": templates.GLM,
    "deepseek": templates.DEEPSEEK,
    "deepseek_v31": templates.NEW_DEEPSEEK,
    "harmony": templates.HARMONY,
}
MARKERS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|start|>", "<|channel|>", "<|message|>"),
    *("<|constrain|>", "<|end|>", "<|call|>", "<|return|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
]


@cache
def tokenizer_of(family, has_markers):
    tokenizer = byte_level(add_prefix_space=False)
    if has_markers:
        # Some are special, as in published tokenizers, and some are not.
        tokenizer.add_tokens(MARKERS[:7])
        tokenizer.add_tokens(MARKERS[7:], special_tokens=True)
    else:
        tokenizer.get_added_vocab = dict
    tokenizer.chat_template = FAMILIES[family]
    return tokenizer


def written(family, content, calls):
    """The answer as the family's template writes it."""
    tokenizer = tokenizer_of(family, False)
    question = {"role": "user", "content": "?"}
    functions = [
        {
            "id": "123456789",
            "type": "function",
            "function": {
                "name": name,
                "arguments": json.dumps(arguments, ensure_ascii=False) if family == "deepseek" else arguments,
            },
        }
        for name, arguments in calls
    ]
    answer = {"role": "assistant", "content": content, "tool_calls": functions}
    before = rendered_chat(tokenizer, [question], add_generation_prompt=True).removesuffix("<think>\n")
    text = rendered_chat(tokenizer, [question, answer])
    assert text.startswith(before)
    text = text[len(before) :].removesuffix("\n")
    for end in ("<|im_end|>", "</s>", "<|eot_id|>", "<｜end▁of▁sentence｜>"):
        text = text.removesuffix(end)
    return text


def tool(name="f", **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}
