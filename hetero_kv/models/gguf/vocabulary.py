"""The vocabulary of a GGUF file: its tokens, their types, and the order of their merges."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from gguf import TokenType

from hetero_kv.models.errors import ModelError
from hetero_kv.models.gguf.contract import NO_TOKEN
from hetero_kv.models.gguf.file import GGUFFile
from hetero_kv.models.gguf.tokenizer_keys import CONTROL_TOKENS, NAMED_TOKENS

#: Tokens that end a turn or a text, by llama.cpp's list. They are control tokens, even if a converter calls them words.
ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<EOT>",
        "[EOT]",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    )
)
# llama.cpp's defaults for a SentencePiece vocabulary: key -> (id, the type that the token must have).
_SENTENCEPIECE_TOKENS = {
    "bos_token_id": (1, TokenType.CONTROL),
    "eos_token_id": (2, TokenType.CONTROL),
    "unknown_token_id": (0, TokenType.UNKNOWN),
}


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file.

    Attributes:
        tokens: the tokens' texts by id, without duplicates.
        types: the tokens' types in the file, [tokens] of `TokenType`.
        named: transformers' names of special tokens -> ids.
        control: ids of tokens that are matched before a text is split, and omitted from decoded text.
        user_defined: ids of tokens that are matched before a text is split, and shown in decoded text.
    """

    tokens: list[str]
    types: np.ndarray
    named: dict[str, int]
    control: frozenset[int]
    user_defined: frozenset[int]

    @classmethod
    def of(cls, file: GGUFFile, *, is_sentencepiece: bool) -> Vocabulary:
        """Read the vocabulary of a file.

        Raises:
            ModelError: the file has no vocabulary, two tokens with the same text, or an unknown type.
        """
        tokens = _texts(file)
        types = _types(file, len(tokens))
        keys = (*NAMED_TOKENS, *CONTROL_TOKENS)
        ids = {key: number for key in keys if (number := token_id(file, key)) is not None}
        if is_sentencepiece:
            for key, (usual, kind) in _SENTENCEPIECE_TOKENS.items():
                if f"tokenizer.ggml.{key}" not in file.metadata and usual < len(types) and types[usual] == kind:
                    ids[key] = usual
        # A named token can be a word: converters use `!` as the padding token. It remains a word.
        signs = {number for number in ids.values() if _is_sign(tokens[number], types[number])}
        control = signs | {number for number, token in enumerate(tokens) if token in ENDS}
        control |= _numbers_of(types, TokenType.CONTROL, TokenType.UNKNOWN)
        user_defined = _numbers_of(types, TokenType.USER_DEFINED)
        named = {name: ids[key] for key, name in NAMED_TOKENS.items() if key in ids and ids[key] in signs}
        return cls(tokens, types, named, frozenset(control), frozenset(user_defined - control))

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The ids by text."""
        return {token: number for number, token in enumerate(self.tokens)}

    def merges_by_score(self, file: GGUFFile, scores: tuple[float, ...]) -> list[tuple[str, str]]:
        """The merges of a SentencePiece vocabulary, in the order in which they apply.

        Merges into a word of higher score come first. At equal scores the lower id comes first: converters without
        scores write equal ones, and SentencePiece numbers words by descending score. Control, user-defined and unused
        tokens have no merges.

        Raises:
            ModelError: SentencePiece would merge a character that is no token.
        """
        numbers = self.numbers
        usable = {
            token
            for number, token in enumerate(self.tokens)
            if self.types[number] == TokenType.NORMAL and number not in self.control
        }
        order = sorted((numbers[token] for token in usable), key=lambda number: (-scores[number], number))
        merges = []
        for number in order:
            token = self.tokens[number]
            ends = ((token[0], token[1:]), (token[-1], token[:-1]))
            for character, rest in ends:
                if character not in numbers and (rest in usable or len(rest) == 1):
                    raise ModelError(
                        f"tokenizer.ggml.tokens of {str(file.path)!r} has {token!r} and not its character "
                        f"{character!r}, which cannot be merged here; convert the file again with all characters"
                    )
            for end in range(len(token) - 1, 0, -1):
                left = token[:end]
                if left in usable and (right := token[end:]) in usable:
                    merges.append((left, right))
        return merges

    def merges_of(self, file: GGUFFile) -> list[tuple[str, str]]:
        """The merges that the file lists, in its order; `require_merges` checks them."""
        halves = [merge.partition(" ")[::2] for merge in file.get("tokenizer.ggml.merges")]
        # The first token may begin with a space.
        return [(left, right) if left else _split_behind(right) for left, right in halves]

    def require_merges(self, file: GGUFFile, merges: list[tuple[str, str]]) -> None:
        """Raise ModelError unless each of the file's merges is of two tokens into a third."""
        numbers = self.numbers
        for left, right in merges:
            if not (left in numbers and right in numbers and left + right in numbers):
                merge = f"{left} {right}" if right else left
                raise ModelError(
                    f"tokenizer.ggml.merges of {str(file.path)!r} has {merge!r}, which does not merge two tokens into "
                    "a third; convert the file again"
                )


def _texts(file: GGUFFile) -> list[str]:
    try:
        tokens: list[str] = file.get("tokenizer.ggml.tokens") or []
    except UnicodeDecodeError as error:
        raise ModelError(
            f"tokenizer.ggml.tokens of {str(file.path)!r} has {error.object!r}, which is not UTF-8; convert the file "
            "again"
        ) from error
    if not tokens:
        raise ModelError(
            f"{str(file.path)!r} has no tokens (tokenizer.ggml.tokens); convert it again with its vocabulary, or give "
            "the directory or hub id of the tokenizer as the model and this file as gguf_path"
        )
    named = [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]
    if len(set(named)) < len(named):
        first: dict[str, int] = {}
        number, other = next((n, first[t]) for n, t in enumerate(named) if first.setdefault(t, n) != n)
        raise ModelError(
            f"tokenizer.ggml.tokens of {str(file.path)!r} has {named[number]!r} twice, as {other:,} and {number:,}; "
            "convert the file again"
        )
    return named


def _split_behind(merge: str) -> tuple[str, str]:
    """The two tokens of a merge that begins with a space, which is cut off."""
    left, _, right = merge.partition(" ")
    return f" {left}", right


def _is_sign(token: str, kind: int) -> bool:
    """Whether a token that the file names is a special token, not a word of a text."""
    return kind not in (TokenType.NORMAL, TokenType.BYTE) or (len(token) > 2 and token[0] + token[-1] in ("<>", "[]"))


def _types(file: GGUFFile, count: int) -> np.ndarray:
    known = [int(kind) for kind in TokenType]
    types = np.asarray(file.get("tokenizer.ggml.token_type") or (int(TokenType.NORMAL),) * count)
    unknown = np.flatnonzero(~np.isin(types, known))
    if unknown.size:
        raise ModelError(
            f"tokenizer.ggml.token_type of {str(file.path)!r} is {types[unknown[0]]} for token {unknown[0]:,}; types "
            f"are from {min(known)} to {max(known)}: convert the file again"
        )
    return types


def _numbers_of(types: np.ndarray, *kinds: TokenType) -> set[int]:
    """The numbers of the tokens of some types."""
    return set(np.flatnonzero(np.isin(types, kinds)).tolist())


def token_id(file: GGUFFile, key: str) -> int | None:
    """The token id `tokenizer.ggml.<key>`; None if the file has none.

    Raises:
        ModelError: the vocabulary has no token with this id.
    """
    number = file.get(f"tokenizer.ggml.{key}")
    if number is None or number in NO_TOKEN:
        return None
    _require_token(file, key, number)
    return int(number)


def suppressed_ids(file: GGUFFile) -> list[int]:
    """The ids of tokens that the model must never generate.

    Raises:
        ModelError: the vocabulary has no token with such an id.
    """
    found = file.get("tokenizer.ggml.suppress_tokens", ())
    numbers = found if isinstance(found, tuple | list) else (found,)
    for number in numbers:
        _require_token(file, "suppress_tokens", number)
    return list(numbers)


def _require_token(file: GGUFFile, key: str, number: object) -> None:
    count = len(file.metadata["tokenizer.ggml.tokens"].value)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < count:
        raise ModelError(
            f"tokenizer.ggml.{key} of {str(file.path)!r} has {number!r}, and the vocabulary has {count:,} tokens; "
            "convert the file again"
        )
