"""The tokenizer follows the GGUF file, or the file is refused by name; how it splits texts: test_gguf_splits.py."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from hetero_kv.models import ModelError, load_model
from hetero_kv.models.gguf.contract import check_metadata
from hetero_kv.models.gguf.header import MalformedHeaderError
from hetero_kv.models.gguf.tokenizer_keys import USED, WITHOUT_EFFECT, unknown_keys
from hetero_kv.models.gguf.vocabulary import suppressed_ids
from tests.models.gguf_vocabularies import (
    CONTROL,
    NOBODY,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WORDS,
    byte_level,
    entry,
    sentencepiece,
    tokenizer_of,
    words_of,
)
from tests.models.make_gguf_splits import letters


def test_a_piece_that_is_a_word_is_that_token_where_merges_are_ignored():
    # No merge makes `hey`.
    tokens, kinds = ["hey"], [NORMAL]
    assert words_of(tokenizer_of(byte_level(tokens, kinds, pre="llama-bpe")), "hey") == ["hey"]
    assert words_of(tokenizer_of(byte_level(tokens, kinds, pre="gpt-2")), "hey") == ["he", "y"]


@pytest.mark.parametrize("name", ["gpt-5", "", "whitespace", 7, ["qwen2"], None])
def test_an_unknown_or_missing_splitting_is_refused(name):
    with pytest.raises(ModelError, match=r"some\.gguf.*tokenizer\.ggml\.pre|tokenizer\.ggml\.pre .*some\.gguf"):
        tokenizer_of(byte_level(pre=name))


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "plamo2", "hybriddna", "whitespace", "none", "test", None])
def test_a_kind_of_vocabulary_that_is_not_read_is_refused_by_its_name(kind):
    with pytest.raises(ModelError, match=rf"some\.gguf' has a vocabulary of the kind {kind!r} .* as gguf_path"):
        tokenizer_of(byte_level(model=kind))


def test_every_key_is_used_or_without_effect_or_refused():
    whole = tokenizer_of(byte_level()).backend_tokenizer.to_str()
    for key in WITHOUT_EFFECT:
        file = byte_level()
        file.metadata[key] = entry(1)
        assert tokenizer_of(file).backend_tokenizer.to_str() == whole
    file = byte_level(more_words=True, rwkv__world_="x")
    assert unknown_keys(file.metadata) == ["tokenizer.ggml.more_words", "tokenizer.rwkv.world"]
    with pytest.raises(ModelError, match=r"has tokenizer\.ggml\.more_words, tokenizer\.rwkv\.world for its tokenizer"):
        tokenizer_of(file)


@pytest.mark.parametrize(
    "key", ["remove_extra_whitespaces", "normalizer.lowercase", "normalizer.strip_accents", "precompiled_charsmap"]
)
def test_unsupported_text_transformations_are_refused(key):
    for made in (byte_level, sentencepiece):
        with pytest.raises(ModelError, match=rf"changes texts before it splits them \(tokenizer\.ggml\.{key}\)"):
            tokenizer_of(made(**{key: [1] if key == "precompiled_charsmap" else True}))
        assert tokenizer_of(made(**{key: [] if key == "precompiled_charsmap" else False}))


def test_control_tokens_are_special_and_user_defined_ones_are_not():
    tokenizer = tokenizer_of(
        byte_level(["<|im_start|>", "<tool_call>", "[PAD259]", "<?>"], [CONTROL, USER_DEFINED, UNUSED, UNKNOWN])
    )
    added = {number: (token.content, token.special) for number, token in tokenizer.added_tokens_decoder.items()}
    assert added == {257: ("<|im_start|>", True), 258: ("<tool_call>", False), 260: ("<?>", True)}
    ids = tokenizer("he<|im_start|><tool_call>he").input_ids
    assert ids == [256, 257, 258, 256]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he<tool_call>he"
    assert 259 not in tokenizer("[PAD259]").input_ids
    assert len(tokenizer) == 261


def test_a_letter_that_was_added_to_a_byte_level_vocabulary_is_shown_as_that_letter():
    # As a letter of GPT-2's alphabet it is a byte that no text has. DeepSeek's vocabularies have added all of these.
    added = [chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))]
    rest = [letter if letter not in added else f"[{letter}]" for letter in letters()]
    tokenizer = tokenizer_of(
        byte_level(tokens=[*rest, "he", *added], token_type=[NORMAL] * 257 + [USER_DEFINED] * len(added))
    )
    text = " he ".join(added)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_end_of_a_turn_is_a_control_token_even_if_the_file_calls_it_a_word():
    tokenizer = tokenizer_of(byte_level(["<|im_end|>", "<end_of_turn>"], [NORMAL, USER_DEFINED]))
    assert all(tokenizer.added_tokens_decoder[number].special for number in (257, 258))


def test_a_word_that_a_file_names_for_filling_up_remains_a_word():
    tokenizer = tokenizer_of(byte_level(padding_token_id=0, merges=["h e", "! !"], more=["!!"], types=[NORMAL]))
    assert tokenizer.added_tokens_decoder == {}
    assert words_of(tokenizer, "he!!") == ["he", "!!"]
    assert tokenizer.pad_token is None


def test_texts_get_the_tokens_that_begin_and_end_them_where_the_file_says_so():
    ends = {"bos_token_id": 257, "eos_token_id": 258}
    more = ["<s>", "</s>"]
    for pre, add_bos, add_eos, expected in [
        ("gpt-2", None, None, [256]),
        ("llama-bpe", None, None, [257, 256]),
        ("llama-bpe", False, None, [256]),
        ("gpt-2", True, True, [257, 256, 258]),
    ]:
        tokenizer = tokenizer_of(byte_level(more, pre=pre, add_bos_token=add_bos, add_eos_token=add_eos, **ends))
        assert tokenizer("he").input_ids == expected
        assert tokenizer("he", add_special_tokens=False).input_ids == [256]
    assert tokenizer_of(sentencepiece())("hello").input_ids[0] == 1
    with pytest.raises(
        ModelError, match=r"adds a token to every text \(tokenizer\.ggml\.add_bos_token\) and does not name"
    ):
        tokenizer_of(byte_level(more, add_bos_token=True))


def test_an_id_of_minus_one_stands_for_no_token():
    tokenizer = tokenizer_of(byte_level(["</s>"], eos_token_id=257, padding_token_id=NOBODY, eot_token_id=NOBODY))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (257, None)
    with pytest.raises(
        ModelError, match=r"tokenizer\.ggml\.eot_token_id of '.*' has 258, and the vocabulary has 258 tokens"
    ):
        tokenizer_of(byte_level(["</s>"], eot_token_id=258))


def test_sentencepiece_merges_the_word_of_the_highest_score_first():
    assert words_of(tokenizer_of(sentencepiece()), "hello", add_special_tokens=False) == ["▁hello"]
    words = ["▁", *"helo", "el", "he", "lo"]
    assert words_of(tokenizer_of(sentencepiece(words)), "helo", add_special_tokens=False) == ["▁", "h", "el", "o"]


def test_a_sentencepiece_vocabulary_that_merges_what_is_no_token_is_refused():
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.tokens of '.*' has 'hé' and not its character 'é'"):
        tokenizer_of(sentencepiece([*WORDS, "hé"]))
    # No merge leads to this one.
    assert words_of(tokenizer_of(sentencepiece([*WORDS, "xéz"])), "xéz", add_special_tokens=False) != ["xéz"]


def test_words_of_one_score_merge_in_the_order_of_their_ids():
    file = sentencepiece(["▁", *"helo", "el", "he", "lo"], add_space_prefix=False)
    count = len(file.get("tokenizer.ggml.tokens"))
    file.metadata["tokenizer.ggml.scores"] = entry([-1000.0] * count)
    assert words_of(tokenizer_of(file), "helo", add_special_tokens=False) == ["h", "el", "o"]


def test_a_space_is_put_before_a_text_and_behind_control_tokens_unless_the_file_says_no():
    with_space, without = (tokenizer_of(sentencepiece(add_space_prefix=flag)) for flag in (None, False))
    assert words_of(with_space, "he</s>he") == ["<s>", "▁", "he", "</s>", "▁", "he"]
    assert words_of(without, "he</s>he") == ["<s>", "he", "</s>", "he"]
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.add_space_prefix"):
        tokenizer_of(byte_level(add_space_prefix=True))


def test_characters_that_are_in_no_word_are_their_bytes():
    tokenizer = tokenizer_of(sentencepiece(add_space_prefix=False))
    assert words_of(tokenizer, "hé", add_special_tokens=False) == ["h", "<0xC3>", "<0xA9>"]
    assert words_of(tokenizer, "<0xC3>", add_special_tokens=False) != ["<0xC3>"]


def test_a_vocabulary_that_would_lose_characters_is_refused():
    few = ["<s>", "</s>", "<0xC3>", *WORDS]
    keys = {"tokens": few, "token_type": [CONTROL] * 2 + [NORMAL] * (len(few) - 2), "scores": [0.0] * len(few)}
    with pytest.raises(ModelError, match=r"some\.gguf' has neither an unknown token nor a token for each byte"):
        tokenizer_of(sentencepiece(**keys))
    tokenizer = tokenizer_of(sentencepiece(**keys, unknown_token_id=0))
    assert words_of(tokenizer, "hé", add_special_tokens=False)[-1] == "<s>"


# U+2581 is how SentencePiece writes a space.
@given(st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=50, deadline=None)
def test_any_text_comes_back_from_its_tokens(text):
    for tokenizer in ROUND_TRIP:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


ROUND_TRIP = [
    tokenizer_of(byte_level()),
    tokenizer_of(byte_level(pre="llama-bpe")),
    tokenizer_of(byte_level(pre="tekken")),
    tokenizer_of(sentencepiece(add_space_prefix=False)),
    tokenizer_of(sentencepiece()),
]


def test_phi_3_takes_the_white_space_behind_its_added_tokens():
    more, types = ["<|user|>", "<|end|>", "<|endoftext|>", "<x>"], [CONTROL] * 3 + [USER_DEFINED]
    phi = tokenizer_of(sentencepiece(more=more, types=types, architecture="phi3", add_space_prefix=False))
    assert words_of(phi, "<|user|>\nhe<|end|>", add_special_tokens=False) == ["<|user|>", "he", "<|end|>"]
    assert words_of(phi, "<x>\nhe", add_special_tokens=False) == ["<x>", "he"]
    assert not phi.added_tokens_decoder[phi.convert_tokens_to_ids("<|endoftext|>")].rstrip


def test_templates_with_names_are_found_by_them():
    one = tokenizer_of(byte_level(chat_template_="plain"))
    assert one.chat_template == "plain"
    named = {"tokenizer.chat_template.tool_use": entry("tools"), "tokenizer.chat_templates": entry(["tool_use"])}
    file = byte_level(chat_template_="plain")
    file.metadata.update(named)
    tokenizer = tokenizer_of(file)
    assert tokenizer.get_chat_template() == "plain"
    assert tokenizer.get_chat_template("tool_use") == "tools"
    lone = byte_level()
    lone.metadata.update(named)
    with pytest.raises(ModelError, match=r"has chat templates for tool_use and no default"):
        tokenizer_of(lone)
    with pytest.raises(ModelError, match=r"names chat templates that it lacks .*: rag\)"):
        tokenizer_of(byte_level(chat_template_="plain", chat_templates_=["rag"]))
    with pytest.raises(ModelError, match=r"has two default chat templates"):
        tokenizer_of(byte_level(chat_template_="plain", chat_template__default_="other"))
    assert tokenizer_of(byte_level(chat_template_="plain", chat_template__default_="plain")).chat_template == "plain"


def test_the_originals_own_tokenizer_is_used_where_the_file_has_it():
    whole = tokenizer_of(byte_level(pre="qwen2"))
    written = whole.backend_tokenizer.to_str()
    tokenizer = tokenizer_of(byte_level(pre="gpt-2", huggingface__json_=written))
    assert tokenizer("e\u0301 12").input_ids == whole("e\u0301 12").input_ids
    other = json.loads(written)
    other["model"]["vocab"] |= {"he": 0, letters()[0]: 256}
    with pytest.raises(ModelError, match=r"has two tokenizers: token 0 is '.*' in tokenizer\.ggml\.tokens and 'he' in"):
        tokenizer_of(byte_level(huggingface__json_=json.dumps(other)))
    with pytest.raises(ModelError, match=r"tokenizer\.huggingface\.json of '.*' is no tokenizer"):
        tokenizer_of(byte_level(huggingface__json_="{}"))


def test_tokens_may_contain_zero_bytes_and_begin_with_spaces():
    vocabulary = tokenizer_of(byte_level(["a\0b", " h", " he"], merges=[" h e"])).get_vocab()
    assert [vocabulary[token] for token in ("a\0b", " h", " he")] == [257, 258, 259]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"more": ["he"], "types": [NORMAL]}, r"tokenizer\.ggml\.tokens of '.*' has 'he' twice, as 256 and 257"),
        ({"more": ["x y"], "types": [9]}, r"tokenizer\.ggml\.token_type of '.*' is 9 for token 257"),
        (
            {"merges": ["h z"]},
            r"tokenizer\.ggml\.merges of '.*' has 'h z', which does not merge two tokens into a third",
        ),
        ({"merges": ["he"]}, r"tokenizer\.ggml\.merges of '.*' has 'he'"),
        ({"merges": [" h e"]}, r"tokenizer\.ggml\.merges of '.*' has ' h e'"),
        ({"add_bos_token": 3}, r"tokenizer\.ggml\.add_bos_token of '.*' is 3; it must be true or false"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(keys, message):
    with pytest.raises(ModelError, match=message):
        tokenizer_of(byte_level(**keys))


def test_an_empty_order_of_merges_is_none():
    with pytest.raises(ModelError, match=r"has no merges of its tokens \(tokenizer\.ggml\.merges\)"):
        tokenizer_of(byte_level(merges=[]))


def test_a_vocabulary_without_an_order_of_merges_is_refused():
    file = byte_level()
    del file.metadata["tokenizer.ggml.merges"]
    with pytest.raises(ModelError, match=r"has no merges of its tokens \(tokenizer\.ggml\.merges\)"):
        tokenizer_of(file)
    with pytest.raises(ModelError, match=r"has no scores for its tokens \(tokenizer\.ggml\.scores\)"):
        tokenizer_of(sentencepiece(scores=None))


VALUES = st.one_of(
    st.booleans(), st.integers(0, 1 << 32), st.floats(), st.text(max_size=8), st.lists(st.integers(-1, 300), max_size=3)
)


@given(st.sampled_from(sorted({*USED, *WITHOUT_EFFECT, "tokenizer.chat_template.x", "tokenizer.y"})), VALUES)
@settings(max_examples=200, deadline=None)
def test_any_value_of_any_key_is_followed_or_refused(key, value):
    file = byte_level(["<s>"], bos_token_id=257)
    file.metadata[key] = entry(value)
    with contextlib.suppress(ModelError, MalformedHeaderError):
        check_metadata(file.metadata)
        assert isinstance(tokenizer_of(file).backend_tokenizer, Tokenizer)


def test_a_models_settings_leave_out_the_tokens_that_the_file_suppresses(write_tiny_gguf, tmp_path):
    def change(writer):
        writer.add_array("tokenizer.ggml.suppress_tokens", [3, 5])
        writer.add_eot_token_id(NOBODY)

    settings = load_model(write_tiny_gguf(tmp_path / "some.gguf", change), device="cpu").model.generation_config
    assert settings.suppress_tokens == [3, 5]
    assert NOBODY not in settings.eos_token_id


@pytest.mark.parametrize(("value", "ids"), [(3, [3]), ([3, 9999], None), ([True], None), (["he"], None)])
def test_tokens_to_suppress_are_ids_of_the_vocabulary(value, ids):
    file = byte_level(suppress_tokens=value)
    if ids is None:
        with pytest.raises(ModelError, match=r"tokenizer\.ggml\.suppress_tokens of '.*' has .*has 257 tokens"):
            suppressed_ids(file)
    else:
        assert suppressed_ids(file) == ids
