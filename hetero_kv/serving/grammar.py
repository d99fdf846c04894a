"""Grammars for answers: JSON schemas, Lark grammars and regular expressions as masks over the next token.

llguidance compiles them and computes the masks. It is an extra: pip install 'hetero-kv[server]'.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from hetero_kv.errors import ConfigError, HeteroKVError, shortened

#: The longest grammar or schema, characters.
LONGEST = 1 << 20
# llguidance tokenizes a text that a grammar forces, and takes what spells a control token for that token, which the
# grammar then does not allow. Without it, every token that continues such a text is allowed.
_UNFORCED = '\n%llguidance {"no_forcing": true}\n'


class GrammarText(NamedTuple):
    """A grammar as it is written.

    Attributes:
        name: what errors call it.
        compiler: the function of LLMatcher that reads it.
        text: the grammar.
    """

    name: str
    compiler: str
    text: str


class GrammarMask:
    """The tokens that a grammar allows next in one answer (`SamplingParams.mask`).

    Args:
        matcher: an LLMatcher before the answer's first token.
        vocab_size: number of logits.
        grammar: the compiled grammar, from which another process can create the same mask.
    """

    def __init__(self, matcher: Any, vocab_size: int, grammar: GrammarText) -> None:
        self._matcher, self.grammar = matcher, grammar
        self._bits = np.zeros(-(-vocab_size // 32), np.int32)

    def apply(self, logits: torch.Tensor) -> None:
        """See `TokenMask`. Raises HeteroKVError if the grammar became too complex to continue."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._require_sound()
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little", count=len(logits))
        logits.masked_fill_(torch.from_numpy(allowed == 0), -torch.inf)

    def accept(self, token: int) -> None:
        """See `TokenMask`. Raises HeteroKVError for a token that the grammar does not allow."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._require_sound()

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            raise HeteroKVError(f"the grammar cannot be followed: {shortened(self._matcher.get_error(), 500)}")


class Grammars:
    """Compiles grammars for the tokens of one model. Any thread may use it.

    Args:
        tokenizer: a transformers tokenizer.
        vocab_size: number of the model's logits.
        ends: ids of tokens that end an answer; they are allowed where the grammar allows an end.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: Iterable[int]) -> None:
        self._source, self._vocab_size, self._ends = tokenizer, vocab_size, sorted(set(ends))
        self._making = threading.Lock()

    def schema(self, schema: Mapping[str, Any] | bool) -> GrammarMask:
        """JSON values that a JSON schema allows.

        Raises ConfigError if it cannot be compiled, naming the part at fault.
        """
        return self.mask(GrammarText("json_schema", "grammar_from_json_schema", json.dumps(schema)))

    def json_object(self) -> GrammarMask:
        """Any JSON object."""
        return self.schema({"type": "object"})

    def lark(self, grammar: str) -> GrammarMask:
        """Texts of a grammar in llguidance's form of Lark. Raises ConfigError if it cannot be compiled."""
        return self.mask(GrammarText("the grammar", "grammar_from_lark", grammar))

    def regex(self, expression: str) -> GrammarMask:
        """Texts that a regular expression matches as a whole. Raises ConfigError if it cannot be compiled."""
        return self.mask(GrammarText("the regular expression", "grammar_from_regex", expression))

    def mask(self, written: GrammarText) -> GrammarMask:
        """The mask of a grammar for a new answer. Raises ConfigError if it cannot be compiled."""
        from llguidance import LLMatcher

        name, compiler, text = written
        if len(text) > LONGEST:
            raise ConfigError(f"{name} has {len(text):,} characters; give at most {LONGEST:,}")
        try:
            grammar = getattr(LLMatcher, compiler)(text)
            unforced = LLMatcher.grammar_from_lark(_lark(compiler, grammar, text) + _UNFORCED)
            fault = LLMatcher.validate_grammar(unforced, self._tokenizer)
            matcher = None if fault else LLMatcher(self._tokenizer, unforced, log_level=0)
            # Places in errors are those of the text as it was written.
            fault = fault and (LLMatcher.validate_grammar(grammar, self._tokenizer) or fault)
            fault = fault or (matcher.get_error() if matcher is not None and matcher.is_error() else "")
        except (ValueError, TypeError, RecursionError) as error:
            fault = str(error)
        if fault:
            raise ConfigError(f"{name} cannot be compiled: {shortened(fault, 500)}; give another one")
        return GrammarMask(matcher, self._vocab_size, written)

    @property
    def _tokenizer(self) -> Any:
        # One at a time, because making it takes a second.
        with self._making:
            return self._compiled_tokenizer

    @cached_property
    def _compiled_tokenizer(self) -> Any:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ConfigError(
                "grammars and JSON schemas need llguidance; pip install 'hetero-kv[server]', or use neither"
            ) from error
        if not self._source.is_fast:
            raise ConfigError("grammars and JSON schemas need a fast tokenizer, and this model has a slow one")
        compiled = from_tokenizer(self._source, self._vocab_size, self._ends or None)
        # llguidance tokenizes text that a grammar forces by itself; some tokenizers write a space before such a text.
        if compiled.decode_bytes(compiled.tokenize_str("o")) != b"o":
            raise ConfigError(
                "grammars and JSON schemas need a tokenizer that adds nothing to a text, and this model's writes a "
                "space before it; use neither"
            )
        return compiled


def _lark(compiler: str, grammar: str, text: str) -> str:
    """A grammar in llguidance's form of Lark; `grammar` is what the compiler made of `text`."""
    match compiler:
        case "grammar_from_json_schema":
            return f"start: %json {text}"
        case "grammar_from_regex":
            # The library has escaped it.
            return str(json.loads(grammar)["grammars"][0]["lark_grammar"])
    return text
