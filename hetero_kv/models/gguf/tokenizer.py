"""The tokenizer of a GGUF file, from everything that the file says of it.

Kinds of vocabulary are llama.cpp's (`tokenizer.ggml.model`): `gpt2` is byte-level BPE, `llama` SentencePiece's BPE,
which merges by scores, and `gemma4` BPE over characters with merges. Others are refused: encoders have them, or, as
RWKV's and PLaMo 2's, the package `tokenizers` has none like them.
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
from hetero_kv.models.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from hetero_kv.models.gguf.tokenizer_keys import CHAT_TEMPLATE, unknown_keys
from hetero_kv.models.gguf.vocabulary import Vocabulary

SENTENCEPIECE, BYTE_LEVEL, CHARACTERS = "llama", "gpt2", "gemma4"
#: How SentencePiece writes a space.
SPACE = "\u2581"
# The letters by which GPT-2 spells the bytes that UTF-8 never has.
_LETTERS_OF_NO_TEXT = frozenset(map(chr, (0xC0, 0xC1, *range(0xF5, 0x100))))
_OTHERWISE = (
    "give the directory or hub id of the tokenizer in Hugging Face format as the model and this file as gguf_path"
)


class _Given:
    """A backend for transformers to take as it is: it copies what it gets, which takes as long as building it."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: dict[int, Any]) -> Tokenizer:
        return self._backend


def tokenizer_of(file: GGUFFile) -> PreTrainedTokenizerFast:
    """The tokenizer that a file describes.

    Raises:
        ModelError: the file has none, or says something of it that is not known or cannot be followed.
    """
    kind = file.get("tokenizer.ggml.model")
    _refuse_what_is_not_followed(file, kind)
    pre = _pre_tokenizer(file, kind)
    vocabulary = Vocabulary.of(file, is_sentencepiece=kind == SENTENCEPIECE)
    written = file.get("tokenizer.huggingface.json")
    backend = _backend(file, vocabulary, pre) if written is None else _written(file, vocabulary, written)
    return PreTrainedTokenizerFast(
        tokenizer_object=_Given(backend),
        chat_template=_chat_template(file),
        # Text that a model wrote is shown as it is.
        clean_up_tokenization_spaces=False,
        # As transformers' own classes have it.
        padding_side="right" if kind == BYTE_LEVEL else "left",
        add_bos_token=_adds(file, vocabulary, "bos", default=pre is None or pre.add_bos),
        add_eos_token=_adds(file, vocabulary, "eos", default=False),
        **{name: vocabulary.tokens[number] for name, number in vocabulary.named.items()},
    )


def _refuse_what_is_not_followed(file: GGUFFile, kind: str | None) -> None:
    if kind not in (SENTENCEPIECE, BYTE_LEVEL, CHARACTERS):
        raise ModelError(
            f"{str(file.path)!r} has a vocabulary of the kind {kind!r} (tokenizer.ggml.model); {BYTE_LEVEL}, "
            f"{SENTENCEPIECE} and {CHARACTERS} are read: {_OTHERWISE}"
        )
    if unknown := unknown_keys(file.metadata):
        raise ModelError(
            f"{str(file.path)!r} says {', '.join(unknown)} of its tokenizer, which is not known here; {_OTHERWISE}"
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
            f"{str(file.path)!r} changes texts before it splits them (tokenizer.ggml.{unfollowed[0]}), which is not "
            f"done here for a vocabulary of the kind {kind}; {_OTHERWISE}"
        )


def _adds(file: GGUFFile, vocabulary: Vocabulary, end: str, *, default: bool) -> bool:
    """Whether every text gets the token that begins it (`end` is bos) or ends it (eos)."""
    named = f"{end}_token" in vocabulary.named
    if _flag(file, f"add_{end}_token", default and named) and not named:
        raise ModelError(
            f"{str(file.path)!r} adds a token to every text (tokenizer.ggml.add_{end}_token) and does not say which "
            f"(tokenizer.ggml.{end}_token_id); convert it again"
        )
    return _flag(file, f"add_{end}_token", default and named)


def _flag(file: GGUFFile, name: str, default: bool) -> bool:
    value = file.get(f"tokenizer.ggml.{name}", default)
    if value not in (0, 1):
        raise ModelError(f"tokenizer.ggml.{name} of {str(file.path)!r} is {value!r}; true and false are possible")
    return bool(value)


def _pre_tokenizer(file: GGUFFile, kind: str | None) -> PreTokenizer | None:
    """How the vocabulary splits; None where it does not, as SentencePiece's."""
    if kind == SENTENCEPIECE:
        return None
    name = CHARACTERS if kind == CHARACTERS else file.get("tokenizer.ggml.pre")
    if name is None:
        raise ModelError(
            f"{str(file.path)!r} does not say how its vocabulary splits texts (tokenizer.ggml.pre), so that words and "
            f"numbers would be cut otherwise than the model has learned; convert it again, or {_OTHERWISE}"
        )
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise ModelError(f"tokenizer.ggml.pre of {str(file.path)!r} is {name!r}, which is not known here; {_OTHERWISE}")
    return PRE_TOKENIZERS[name]


def _backend(file: GGUFFile, vocabulary: Vocabulary, pre: PreTokenizer | None) -> Tokenizer:
    if "tokenizer.ggml.merges" in file.metadata:
        merges = vocabulary.merges_of(file)
    elif pre is None:
        merges = vocabulary.merges_by_score(_scores(file))
    else:
        raise ModelError(
            f"{str(file.path)!r} does not say what its tokens are merged of (tokenizer.ggml.merges); convert it again, "
            f"or {_OTHERWISE}"
        )
    if pre is not None and pre.in_bytes:
        backend = Tokenizer(models.BPE(vocabulary.numbers, merges, ignore_merges=pre.ignore_merges))
        if pre.composes:
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = _splitting(pre)
        backend.decoder = decoders.Sequence([*_as_text(vocabulary), decoders.ByteLevel()])
    else:
        adds_space = pre is None and _flag(file, "add_space_prefix", True)
        unknown = vocabulary.named.get("unk_token")
        backend = Tokenizer(
            models.BPE(
                vocabulary.numbers,
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


def _splitting(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in pre.splits]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _as_text(vocabulary: Vocabulary) -> list[decoders.Decoder]:
    """What keeps letters that a byte-level vocabulary has added, as DeepSeek's has `À`, from being read as bytes."""
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
            f"{str(file.path)!r} does not say in which order its tokens are merged (tokenizer.ggml.scores); convert it "
            f"again, or {_OTHERWISE}"
        )
    return scores


def _add(backend: Tokenizer, file: GGUFFile, vocabulary: Vocabulary) -> None:
    # Phi-3's own tokenizer takes the white space behind its control tokens with them, which no key says.
    takes_space = file.architecture == "phi3" and file.get("tokenizer.ggml.model") == SENTENCEPIECE
    as_others = {"<unk>", "<s>", "<|endoftext|>"}
    backend.add_special_tokens(
        [
            AddedToken(token, normalized=False, rstrip=takes_space and token not in as_others)
            for token in _texts(vocabulary, vocabulary.control)
        ]
    )
    backend.add_tokens([AddedToken(token, normalized=False) for token in _texts(vocabulary, vocabulary.user_defined)])


def _texts(vocabulary: Vocabulary, ids: Iterable[int]) -> list[str]:
    return [vocabulary.tokens[number] for number in sorted(ids)]


def _written(file: GGUFFile, vocabulary: Vocabulary, written: str) -> Tokenizer:
    """The original's own tokenizer, where the file has it, if it is that of the file's tokens."""
    try:
        json.loads(written)
        backend = Tokenizer.from_str(written)
    except Exception as error:  # the package raises nothing else
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
    """The template of a conversation, or the templates by name; None where the file has none."""
    templates = {
        match[1] or "default": file.get(key) for key in file.metadata if (match := CHAT_TEMPLATE.fullmatch(key))
    }
    for name, template in templates.items():
        if not isinstance(template, str):
            raise ModelError(f"the chat template {name!r} of {str(file.path)!r} is no text; convert the file again")
    listed = file.get("tokenizer.chat_templates", [])
    missing = sorted(set(listed) - templates.keys()) if isinstance(listed, list) else [repr(listed)]
    if missing:
        raise ModelError(
            f"{str(file.path)!r} names chat templates that it does not have (tokenizer.chat_templates: "
            f"{', '.join(missing)}); convert it again"
        )
    if templates and "default" not in templates:
        raise ModelError(
            f"{str(file.path)!r} has chat templates for {', '.join(sorted(templates))} and none for everything else "
            "(tokenizer.chat_template); convert it again"
        )
    return templates if len(templates) > 1 else templates.get("default")
