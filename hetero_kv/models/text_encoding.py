"""Tokenizes prompts so that no user text can produce control tokens."""

from __future__ import annotations

import json
import re
import secrets
import unicodedata
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from hetero_kv.errors import HeteroKVError

#: No token of a vocabulary in use has more characters, except for white space. A text with more characters per token of
#: capacity cannot fit, so encoding it would waste time and memory.
CHARACTERS_OF_A_TOKEN = 128


class PromptPiece(NamedTuple):
    """A part of a prompt.

    Attributes:
        content: its text.
        is_template: whether it is from the model's chat template; only there do control tokens count as such.
    """

    content: str
    is_template: bool = False


class TextEncoder:
    """Tokenizes the pieces of a prompt; control tokens come from the template alone.

    Control tokens are all added tokens except words and white space: `<|im_end|>`, `</s>`, and also `<tool_call>`,
    whether the tokenizer marks them as special or not. If no text spells one, the tokenizer encodes the whole prompt.
    If one does, a copy of the tokenizer encodes it whose control tokens have secret random names. All else is then
    equal, including white space and prefixes at the seams.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._added = {token.content: number for number, token in added if token.content}
        self._control = {
            token.content: number for number, token in added if token.content and (token.special or _is_sign(token))
        }
        longest_first = sorted(self._control, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.control_ids = frozenset(self._control.values())

    def encode(self, pieces: Sequence[PromptPiece], *, add_special_tokens: bool = False) -> list[int]:
        """The tokens of the concatenated pieces.

        Args:
            add_special_tokens: whether to include those that the tokenizer puts around a text.

        Raises HeteroKVError for a text that is no Unicode, or that the tokenizer can only express by a control token.
        """
        text = "".join(piece.content for piece in pieces)
        for piece in pieces:
            _require_unicode(piece.content)
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens)
        if not self._tokenizer.is_fast:
            return self._encode_by_section(pieces, encoded["input_ids"], add_special_tokens)
        encoding = encoded.encodings[0]
        # The special tokens around a text have empty spans.
        places = [
            _without_space(text, span)
            for token, span in zip(encoding.ids, encoding.offsets, strict=True)
            if token in self.control_ids and span[0] < span[1]
        ]
        if places == [span for _, span in self._written(pieces)]:
            return encoding.ids
        return self._encode_renamed(pieces, add_special_tokens)

    def _written(self, pieces: Sequence[PromptPiece]) -> list[tuple[int, tuple[int, int]]]:
        """The template's control tokens, each with its span of characters in the whole text."""
        written: list[tuple[int, tuple[int, int]]] = []
        start = 0
        for piece in pieces:
            written += [
                (self._control[found[0]], (start + found.start(), start + found.end()))
                for found in (self._spelled.finditer(piece.content) if piece.is_template else ())
            ]
            start += len(piece.content)
        return written

    def _encode_renamed(self, pieces: Sequence[PromptPiece], add_special_tokens: bool) -> list[int]:
        renamed, names, numbers = self._renamed
        text = "".join(
            self._spelled.sub(lambda found: names[found[0]], piece.content) if piece.is_template else piece.content
            for piece in pieces
        )
        encoding = renamed.encode(text, add_special_tokens=False)
        self._require_written([numbers.get(token, token) for token in encoding.ids], pieces)
        encoding = renamed.post_process(encoding, None, add_special_tokens)
        return [numbers.get(token, token) for token in encoding.ids]

    @cached_property
    def _renamed(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """The tokenizer with renamed control tokens; the new names; its ids of added tokens -> the model's ids."""
        key = secrets.token_hex(16)
        names = {content: f"<|{key}{number:06}|>" for number, content in enumerate(self._control)}
        state = json.loads(self._tokenizer.backend_tokenizer.to_str())
        state["truncation"] = state["padding"] = None
        for token in state["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        # A vocabulary may list control tokens among its words, where merges or whole words would match them.
        model = state["model"]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(word, word): number for word, number in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(word, word), score] for word, score in model["vocab"]]
        if "merges" in model:
            continuing = len(model.get("continuing_subword_prefix") or "")
            model["merges"] = [
                [left, right]
                for left, right in model["merges"]
                if not names.keys() & {left, right, left + right[continuing:]}
            ]
        renamed = Tokenizer.from_str(json.dumps(state))
        numbers: dict[int, int] = {}
        for content, number in self._added.items():
            found = renamed.token_to_id(names.get(content, content))
            assert found is not None
            numbers[found] = number
        return renamed, names, numbers

    def _encode_by_section(
        self, pieces: Sequence[PromptPiece], whole: list[int], add_special_tokens: bool
    ) -> list[int]:
        """As `encode`, for a Python tokenizer, which encodes the texts between control tokens separately.

        whole: its encoding of the whole prompt, returned if no text spells a control token.
        """
        marked = "".join(
            self._spelled.sub("\0", piece.content) if piece.is_template else piece.content.replace("\0", "")
            for piece in pieces
        )
        if not self._spelled.search(marked):
            return whole
        controls = iter(self._written(pieces))
        text = "".join(piece.content for piece in pieces)
        tokens, end = [], 0
        for token, (start, stop) in controls:
            tokens += [*self._as_text(text[end:start]), token]
            end = stop
        tokens += self._as_text(text[end:])
        self._require_written(tokens, pieces)
        return self._tokenizer.build_inputs_with_special_tokens(tokens) if add_special_tokens else tokens

    def _as_text(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def _require_written(self, tokens: Sequence[int], pieces: Sequence[PromptPiece]) -> None:
        """Raise HeteroKVError if the tokens contain other control tokens than the template's.

        The unknown token is allowed, unless it is also a BOS, EOS or template token.
        """
        written = [token for token, _ in self._written(pieces)]
        tokenizer = self._tokenizer
        unknown = {tokenizer.unk_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id, *written}
        counted = self.control_ids - unknown
        found = [token for token in tokens if token in counted]
        if found == [token for token in written if token in counted]:
            return
        names = sorted({tokenizer.convert_ids_to_tokens(token) for token in found})
        raise HeteroKVError(
            f"the model's tokenizer can express a part of this text only by control tokens ({', '.join(names)}), with "
            "which a text could control the model; remove the parts that are not plain text"
        )


def _is_sign(token: Any) -> bool:
    """Whether an added token has characters besides letters, digits and white space, like `<tool_call>`."""
    return not all(char.isspace() or unicodedata.category(char)[0] in "LMNZ" for char in token.content)


def _without_space(text: str, span: tuple[int, int]) -> tuple[int, int]:
    """The span of a token without surrounding white space, which some tokens include."""
    start, stop = span
    found = text[start:stop]
    return start + len(found) - len(found.lstrip()), stop - (len(found) - len(found.rstrip()))


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = text[max(0, error.start - 20) : error.start]
        raise HeteroKVError(
            f"the text is not Unicode: character {error.start}, after {place!r}, is {text[error.start]!r}, a part of a "
            "character or a byte that is not UTF-8; give the text in UTF-8"
        ) from error
