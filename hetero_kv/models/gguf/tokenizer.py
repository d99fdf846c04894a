"""Builds the tokenizer that a GGUF file describes.

The kinds of vocabulary are llama.cpp's (`tokenizer.ggml.model`): `gpt2` is byte-level BPE; `llama` is SentencePiece's
BPE, which merges by scores; `gemma4` is BPE over characters with merges. Others are refused: encoders use them, or the
package `tokenizers` cannot express them, as those of RWKV and PLaMo 2.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.file import GGUFFile
from hetero_kv.models.gguf.opening import TokenizerParts
from hetero_kv.models.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from hetero_kv.models.gguf.tokenizer_keys import CHAT_TEMPLATE, unknown_keys
from hetero_kv.models.gguf.vocabulary import Vocabulary

SENTENCEPIECE, BYTE_LEVEL, CHARACTERS = "llama", "gpt2", "gemma4"
#: SentencePiece's character for a space.
SPACE = "\u2581"
# GPT-2's letters for the bytes that never occur in UTF-8.
_LETTERS_OF_NO_TEXT = frozenset(map(chr, (0xC0, 0xC1, *range(0xF5, 0x100))))
#: SentencePiece's tokens for the bytes of characters that are in no other.
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_OTHERWISE = (
    "give the directory or hub id of the tokenizer in Hugging Face format as the model and this file as gguf_path"
)


class _SharedBackend:
    """A backend that transformers uses without a copy; copying takes as long as building it."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: dict[int, Any]) -> Tokenizer:
        return self._backend


def fast_tokenizer(parts: TokenizerParts) -> PreTrainedTokenizerFast:
    """The tokenizer of these parts."""
    return PreTrainedTokenizerFast(tokenizer_object=_SharedBackend(parts.backend), **parts.settings)


def tokenizer_parts(file: GGUFFile) -> TokenizerParts:
    """The parts of the tokenizer that a file describes.

    Raises:
        ModelError: the file has no tokenizer, or one with an unknown or unsupported property.
    """
    kind = file.get("tokenizer.ggml.model")
    _require_supported(file, kind)
    pre = _pre_tokenizer(file, kind)
    vocabulary = Vocabulary.of(file, is_sentencepiece=kind == SENTENCEPIECE)
    written = file.get("tokenizer.huggingface.json")
    backend = _backend(file, vocabulary, pre) if written is None else _written(file, vocabulary, written)
    settings = {
        "chat_template": _chat_template(file),
        # Keep the model's spaces.
        "clean_up_tokenization_spaces": False,
        # As in transformers' classes.
        "padding_side": "right" if kind == BYTE_LEVEL else "left",
        "add_bos_token": _adds(file, vocabulary, "bos", default=pre is None or pre.add_bos),
        "add_eos_token": _adds(file, vocabulary, "eos", default=False),
        **{name: vocabulary.tokens[number] for name, number in vocabulary.named.items()},
    }
    return TokenizerParts(backend, settings)


def _require_supported(file: GGUFFile, kind: str | None) -> None:
    if kind not in (SENTENCEPIECE, BYTE_LEVEL, CHARACTERS):
        raise ModelError(
            f"{str(file.path)!r} has a vocabulary of the kind {kind!r} (tokenizer.ggml.model); {BYTE_LEVEL}, "
            f"{SENTENCEPIECE} and {CHARACTERS} are read: {_OTHERWISE}"
        )
    if unknown := unknown_keys(file.metadata):
        raise ModelError(
            f"{str(file.path)!r} has {', '.join(unknown)} for its tokenizer, which this version does not know; "
            f"{_OTHERWISE}"
        )
    unfollowed = [
        key
        for key in ("remove_extra_whitespaces", "normalizer.lowercase", "normalizer.strip_accents")
        if _flag(file, key, False)
    ]
    if file.get("tokenizer.ggml.precompiled_charsmap"):
        unfollowed.append("precompiled_charsmap")
    if kind != SENTENCEPIECE and _flag(file, "add_space_prefix", False):
        unfollowed.append("add_space_prefix")
    if unfollowed:
        raise ModelError(
            f"{str(file.path)!r} changes texts before it splits them (tokenizer.ggml.{unfollowed[0]}), which this "
            f"version does not support for a vocabulary of the kind {kind}; {_OTHERWISE}"
        )


def _adds(file: GGUFFile, vocabulary: Vocabulary, end: str, *, default: bool) -> bool:
    """Whether every text gets a BOS token (`end` is "bos"), or an EOS token ("eos")."""
    named = f"{end}_token" in vocabulary.named
    flag = _flag(file, f"add_{end}_token", default and named)
    if flag and not named:
        raise ModelError(
            f"{str(file.path)!r} adds a token to every text (tokenizer.ggml.add_{end}_token) and does not name it "
            f"(tokenizer.ggml.{end}_token_id); convert it again"
        )
    # Early files of Gemma 4 say false, and its tokenizer adds BOS to every text: llama.cpp overrules them too.
    return flag or (end == "bos" and named and file.get("tokenizer.ggml.model") == CHARACTERS)


def _flag(file: GGUFFile, name: str, default: bool) -> bool:
    value = file.get(f"tokenizer.ggml.{name}", default)
    if value not in (0, 1):
        raise ModelError(
            f"tokenizer.ggml.{name} of {str(file.path)!r} is {value!r}; it must be true or false: convert it again"
        )
    return bool(value)


def _pre_tokenizer(file: GGUFFile, kind: str | None) -> PreTokenizer | None:
    """The vocabulary's pre-tokenizer; None if it has none, as SentencePiece's."""
    if kind == SENTENCEPIECE:
        return None
    name = CHARACTERS if kind == CHARACTERS else file.get("tokenizer.ggml.pre")
    if name is None:
        raise ModelError(
            f"{str(file.path)!r} does not name its pre-tokenizer (tokenizer.ggml.pre), so words and numbers would be "
            f"split differently than in training; convert it again, or {_OTHERWISE}"
        )
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise ModelError(
            f"tokenizer.ggml.pre of {str(file.path)!r} is {name!r}, which this version does not know; {_OTHERWISE}"
        )
    return PRE_TOKENIZERS[name]


def _backend(file: GGUFFile, vocabulary: Vocabulary, pre: PreTokenizer | None) -> Tokenizer:
    if file.get("tokenizer.ggml.merges"):
        merges = vocabulary.merges_of(file)
    elif pre is None:
        merges = vocabulary.merges_by_score(file, _scores(file))
    else:
        raise ModelError(
            f"{str(file.path)!r} has no merges of its tokens (tokenizer.ggml.merges); convert it again, or {_OTHERWISE}"
        )
    if pre is not None and pre.in_bytes:
        backend = Tokenizer(_bpe(file, vocabulary, merges, ignore_merges=pre.ignore_merges))
        if pre.composes:
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = _splitting(pre)
        backend.decoder = decoders.Sequence([*_as_text(vocabulary), decoders.ByteLevel()])
    else:
        adds_space = pre is None and _flag(file, "add_space_prefix", True)
        unknown = vocabulary.named.get("unk_token")
        if unknown is None and not set(vocabulary.tokens) >= _BYTE_TOKENS:
            raise ModelError(
                f"{str(file.path)!r} has neither an unknown token nor a token for each byte, and text would lose "
                "characters without a word; convert it again"
            )
        backend = Tokenizer(
            _bpe(
                file,
                vocabulary,
                merges,
                unk_token=None if unknown is None else vocabulary.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        spaces: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if adds_space else []
        backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
        ending = [decoders.Strip(" ", 1, 0)] if adds_space else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ending]
        )
    _add(backend, file, vocabulary)
    return backend


def _bpe(file: GGUFFile, vocabulary: Vocabulary, merges: list[tuple[str, str]], **settings: Any) -> models.BPE:
    try:
        return models.BPE(vocabulary.numbers, merges, **settings)
    except Exception:  # the package raises no narrower class
        vocabulary.require_merges(file, merges)
        raise


def _splitting(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in pre.splits]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _as_text(vocabulary: Vocabulary) -> list[decoders.Decoder]:
    """Decoders for added tokens that look like bytes of a byte-level vocabulary, such as `À` in DeepSeek's."""
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [
        decoders.Replace(token, in_bytes.pre_tokenize_str(token)[0][0])
        for token in _texts(vocabulary, vocabulary.user_defined)
        if token in _LETTERS_OF_NO_TEXT
    ]


def _scores(file: GGUFFile) -> tuple[float, ...]:
    scores: tuple[float, ...] | None = file.get("tokenizer.ggml.scores")
    if scores is None:
        raise ModelError(
            f"{str(file.path)!r} has no scores for its tokens (tokenizer.ggml.scores), by which they are merged; "
            f"convert it again, or {_OTHERWISE}"
        )
    return scores


def _add(backend: Tokenizer, file: GGUFFile, vocabulary: Vocabulary) -> None:
    # Phi-3's tokenizer strips white space after its added tokens, which no key of a file states.
    takes_space = file.architecture == "phi3" and file.get("tokenizer.ggml.model") == SENTENCEPIECE
    as_others = {"<unk>", "<s>", "<|endoftext|>"}

    def added(ids: Iterable[int]) -> list[AddedToken]:
        return [
            AddedToken(token, normalized=False, rstrip=takes_space and token not in as_others)
            for token in _texts(vocabulary, ids)
        ]

    backend.add_special_tokens(added(vocabulary.control))
    backend.add_tokens(added(vocabulary.user_defined))


def _texts(vocabulary: Vocabulary, ids: Iterable[int]) -> list[str]:
    return [vocabulary.tokens[number] for number in sorted(ids)]


def _written(file: GGUFFile, vocabulary: Vocabulary, written: str) -> Tokenizer:
    """The original tokenizer that the file contains. Raises ModelError if it has other tokens than the file."""
    try:
        json.loads(written)
        backend = Tokenizer.from_str(written)
    except Exception as error:  # the package raises no narrower class
        raise ModelError(
            f"tokenizer.huggingface.json of {str(file.path)!r} is no tokenizer: {error}; convert the file again"
        ) from error
    for number, kind in enumerate(vocabulary.types):
        if kind == TokenType.NORMAL and backend.id_to_token(number) != vocabulary.tokens[number]:
            raise ModelError(
                f"{str(file.path)!r} has two tokenizers: token {number:,} is {vocabulary.tokens[number]!r} in "
                f"tokenizer.ggml.tokens and {backend.id_to_token(number)!r} in tokenizer.huggingface.json; convert it "
                "again"
            )
    return backend


def _chat_template(file: GGUFFile) -> Any:
    """The chat template, or the templates by name; None if the file has none."""
    templates: dict[str, Any] = {}
    for key in file.metadata:
        if match := CHAT_TEMPLATE.fullmatch(key):
            name, template = match[1] or "default", file.get(key)
            if templates.setdefault(name, template) != template:
                raise ModelError(
                    f"{str(file.path)!r} has two default chat templates (tokenizer.chat_template and "
                    "tokenizer.chat_template.default); convert it again"
                )
    for name, template in templates.items():
        if not isinstance(template, str):
            raise ModelError(f"the chat template {name!r} of {str(file.path)!r} is not text; convert the file again")
    listed = file.get("tokenizer.chat_templates", [])
    missing = sorted(set(listed) - templates.keys()) if isinstance(listed, list) else [repr(listed)]
    if missing:
        raise ModelError(
            f"{str(file.path)!r} names chat templates that it lacks (tokenizer.chat_templates: "
            f"{', '.join(missing)}); convert it again"
        )
    if templates and "default" not in templates:
        raise ModelError(
            f"{str(file.path)!r} has chat templates for {', '.join(sorted(templates))} and no default "
            "(tokenizer.chat_template); convert it again"
        )
    return templates if len(templates) > 1 else templates.get("default")
