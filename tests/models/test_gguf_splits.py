"""Texts are split into tokens as llama.cpp splits them: `gguf_splits.json`, which `make_gguf_splits.py` writes."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest

from hetero_kv.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from tests.models.gguf_vocabularies import byte_level, entry, file_of, lengths, sentencepiece, tokenizer_of
from tests.models.make_gguf_splits import CHARACTERS, TEXTS

SPLITS = json.loads(Path(__file__).with_name("gguf_splits.json").read_text())


def test_llama_cpps_splits_are_of_the_texts_that_the_script_has():
    assert SPLITS["texts"] == TEXTS
    in_bytes = {name for name, pre in PRE_TOKENIZERS.items() if pre.in_bytes}
    assert {name for split in SPLITS["splits"] for name in split["pre"]} == in_bytes


#: Where the models' own tokenizers split otherwise than llama.cpp, and why; see docs/gguf_files.md.
MARKS = {
    text for text in TEXTS if text.startswith(("e\u0301", "A\u030a", "\u0645\u0631", "\u0e2a\u0e27", "\u0928\u092e"))
}
CAPITALS = {text for text in TEXTS if text.startswith("\u00c9COLE")}
CAMELS = {text for text in TEXTS if text.startswith("snake_case")}
NUMBERS = {text for text in TEXTS if text.startswith("3.14159e")}
SPACES = {text for text in TEXTS if text.startswith(("zero\u200b", "\u2028", "\u00a0\u00a0x"))}
TAGS = {text for text in TEXTS if text.startswith("\U000e0041")}
FORMATS = {text for text in TEXTS if text.startswith(("\u202e", "1\ufe0f"))} | TAGS
DIFFERENT = {
    # A letter's marks belong to it, and what a capital is, is so for every letter.
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "tekken"), MARKS | CAPITALS),
    "granite-embed-multi-97m": CAPITALS,
    "kimi-k2": MARKS | CAPITALS | CAMELS | TAGS,
    # Digits split off whatever stands before them.
    "afmoe": FORMATS,
    "youtu": CAPITALS | CAMELS,
    # Digits are grouped in threes from the right where no letter follows them.
    **dict.fromkeys(("tiny_aya", "cohere2moe"), CAPITALS | CAMELS | NUMBERS),
    # U+3000, U+2028 and U+2029 stand in the range U+0800 to U+4E00, which splits off.
    **dict.fromkeys(("deepseek-llm", "deepseek-coder"), SPACES),
}
#: Those whose own tokenizers split by something else than llama.cpp does, whatever the text.
OWN = ("falcon3", "gigachat")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param(name, split["lengths"], id=name)
        for split in SPLITS["splits"]
        for name in split["pre"]
        if name not in OWN
    ],
)
def test_texts_are_split_as_llama_cpp_splits_them(name, expected):
    tokenizer = tokenizer_of(byte_level(["<s>"], pre=name, bos_token_id=257))
    found = [lengths(tokenizer, text) for text in TEXTS]
    different = {text for text, ours, theirs in zip(TEXTS, found, expected, strict=True) if ours != theirs}
    assert different == DIFFERENT.get(name, set())


@pytest.mark.parametrize("name", CHARACTERS)
def test_texts_are_the_ids_that_llama_cpp_gives_for_vocabularies_of_characters(name):
    tokenizer = tokenizer_of(file_of(**CHARACTERS[name]))
    assert [" ".join(map(str, tokenizer(text).input_ids)) for text in TEXTS] == SPLITS["ids"][name]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-4o", "camelCase e\u0301s\u00c9s's", ["camel", "Case", " e\u0301s", "\u00c9s's"]),
        ("gigachat", "camelCase 1234\n\n  x", ["camel", "Case", " ", "123", "4", "\n\n", " ", " x"]),
        ("tekken", "don't 12", ["don", "'t", " ", "1", "2"]),
        ("kimi-k2", "\u4f60\u597dabC", ["\u4f60\u597d", "ab", "C"]),
        ("falcon3", "(a) 12\n\n  x", ["(", "a", ")", " ", "1", "2", "\n\n ", " x"]),
        ("tiny_aya", "1234 1234a", ["1", "234", " ", "123", "4", "a"]),
    ],
)
def test_texts_are_split_as_the_models_own_tokenizers_split_them(name, text, pieces):
    tokenizer = tokenizer_of(byte_level(["<s>"], pre=name, bos_token_id=257))
    assert lengths(tokenizer, text) == " ".join(str(len(piece)) for piece in pieces)


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_a_text_is_its_tokens_decoded(name):
    tokenizer = tokenizer_of(byte_level(pre=name) if PRE_TOKENIZERS[name].in_bytes else sentencepiece_with_merges(name))
    for text in TEXTS:
        composed = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[name].composes else text
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == composed


def sentencepiece_with_merges(name):
    file = sentencepiece(pre=name, merges=["h e", "l l"], add_space_prefix=False, bos_token_id=1)
    file.metadata["tokenizer.ggml.model"] = entry("gpt2")
    return file


@pytest.mark.parametrize("name", ["qwen2", "qwen35", "command-r", "olmo", "mpt"])
def test_letters_and_their_marks_are_composed_where_the_models_own_tokenizer_does(name):
    tokenizer = tokenizer_of(byte_level(pre=name))
    assert tokenizer("e\u0301").input_ids == tokenizer("\u00e9").input_ids
    plain = tokenizer_of(byte_level(pre="gpt-2"))
    assert plain("e\u0301").input_ids != plain("\u00e9").input_ids


@pytest.mark.model
def test_smollm2_splits_every_digit_from_what_stands_before_it(smollm2_tokenizer):
    # By llama.cpp: of llama-cpp-python 0.3.36.
    assert smollm2_tokenizer("\u00bd \u00b2 12").input_ids == [16738, 216, 19133, 216, 33, 34]
