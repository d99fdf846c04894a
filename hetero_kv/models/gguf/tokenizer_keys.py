"""Lists the GGUF metadata keys that begin with `tokenizer.`: the used ones, and those without effect.

The names are llama.cpp's (`src/llama-arch.cpp`). Any other key is refused, since it may change the tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Key of a token id, after `tokenizer.ggml.` -> transformers' name of the token.
NAMED_TOKENS = {
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "unknown_token_id": "unk_token",
    "seperator_token_id": "sep_token",
    "padding_token_id": "pad_token",
    "cls_token_id": "cls_token",
    "mask_token_id": "mask_token",
}
#: Keys of further control tokens: ends of turns and messages, and fill-in-the-middle (FIM) markers.
CONTROL_TOKENS = (
    "eot_token_id",
    "eom_token_id",
    "fim_pre_token_id",
    "fim_suf_token_id",
    "fim_mid_token_id",
    "fim_pad_token_id",
    "fim_rep_token_id",
    "fim_sep_token_id",
    "prefix_token_id",
    "suffix_token_id",
    "middle_token_id",
)
#: Keys that are used, or refused for an unsupported value.
USED = frozenset(
    f"tokenizer.ggml.{name}"
    for name in (
        "model",
        "pre",
        "tokens",
        "token_type",
        "scores",
        "merges",
        "add_bos_token",
        "add_eos_token",
        "add_space_prefix",
        "remove_extra_whitespaces",
        "precompiled_charsmap",
        "normalizer.lowercase",
        "normalizer.strip_accents",
        "suppress_tokens",
        *NAMED_TOKENS,
        *CONTROL_TOKENS,
    )
) | {"tokenizer.huggingface.json", "tokenizer.chat_templates"}
#: `tokenizer.chat_template`, and `tokenizer.chat_template.NAME`.
CHAT_TEMPLATE = re.compile(r"tokenizer\.chat_template(?:\.(.+))?")
#: Key -> why it has no effect.
WITHOUT_EFFECT = {
    "tokenizer.ggml.token_type_count": "the number of segment types of BERT encoders; decoders have none",
    "tokenizer.ggml.add_sep_token": "whether a separator is put between two texts that an encoder ranks",
}


def unknown_keys(keys: Iterable[str]) -> list[str]:
    """The keys that begin with `tokenizer.` and are not known here."""
    return sorted(
        key
        for key in keys
        if key.startswith("tokenizer.")
        and key not in USED
        and key not in WITHOUT_EFFECT
        and not CHAT_TEMPLATE.fullmatch(key)
    )
