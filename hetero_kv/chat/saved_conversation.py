"""Saves and loads a conversation, and lets a new one begin from the stored prefix of its first prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hetero_kv.chat.answer import Turn
from hetero_kv.contexts.index import StoredContext
from hetero_kv.contexts.prefix_cache import PrefixCache
from hetero_kv.contexts.saving import load_context, save_context
from hetero_kv.contexts.store import ContextStore
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.errors import ContextError
from hetero_kv.engine.rollback import rollback_point
from hetero_kv.errors import HeteroKVError
from hetero_kv.models.turns import TurnTokens

_WITH_RULES = "inject rules, or start the chat without --mode normal"


@dataclass(frozen=True)
class ConversationState:
    """A conversation's state; each turn replaces it as a whole.

    Attributes:
        tokens: the tokens of all turns.
        go_back: rolls the cache back to these tokens, without the last one, from any later state.
        turns: the turns' sizes.
        earlier: the states before the last turns; these have no earlier states themselves.
    """

    tokens: list[int]
    go_back: Callable[[], None]
    turns: tuple[Turn, ...] = ()
    earlier: tuple[ConversationState, ...] = ()


class SavedConversation:
    """The part of a conversation that saves and loads; its attributes are the conversation's."""

    model: PreTrainedModel
    tokenizer: Any
    cache: Cache
    system: str | None
    _turns: TurnTokens
    _thinks: bool | None
    _state: ConversationState
    _is_answering: bool
    _prefix_cache: PrefixCache | None
    _capacity: dict[str, Any]

    def _require_idle(self, what: str) -> None:
        if self._is_answering:
            raise HeteroKVError(f"an answer is being generated; {what} the conversation before or after that")

    def save(self, path: str | Path) -> None:
        """Write the conversation to a file, from which another process continues with `load` (HeteroCache.save).

        Raises ContextError if there is no turn yet, or the file cannot be written.
        """
        cache, tokens = self._savable()
        save_context(path, cache, [tokens], notes_of(self._state.turns, self.system))

    def save_in(self, store: ContextStore, name: str | None = None) -> StoredContext:
        """Like `save`, in a folder of contexts that share their common prefixes."""
        cache, tokens = self._savable()
        return store.save(cache, tokens, name, notes_of(self._state.turns, self.system))

    def _savable(self) -> tuple[HeteroCache, list[int]]:
        self._require_idle("save")
        cache = require_savable(self.cache, self._state.tokens)
        self._state.go_back()
        return cache, self._state.tokens

    def load(self, path: str | Path) -> None:
        """Replace this conversation by a saved one, which continues exactly as it would have.

        Raises the errors of `HeteroCache.load`, and ContextError if the model has no rules; this conversation is
        unchanged then.
        """
        self._require_idle("load")
        if not isinstance(self.cache, HeteroCache):
            raise ContextError(f"the model has no rules, so it cannot continue a saved context; {_WITH_RULES}")
        loaded = load_context(path, self.model, tokenizer=self.tokenizer, **self._capacity)
        if len(loaded.tokens) != 1:
            raise ContextError(
                f"{path} is not a conversation: it has the tokens of {len(loaded.tokens)} rows; load it with "
                "HeteroCache.load"
            )
        system, tokens = system_of(loaded.notes), loaded.tokens[0]
        turns = TurnTokens(self.tokenizer, system, self._thinks)
        # At most one token is not stored yet: the last one of an answer.
        tokens = tokens[: loaded.cache.get_seq_length() + 1]
        self._turns, self.system, self.cache = turns, system, loaded.cache
        self._state = ConversationState(tokens, rollback_point(loaded.cache), turns_of(loaded.notes, len(tokens)))

    def load_from(self, store: ContextStore, name: str) -> None:
        """Like `load`, for the context of this name in a folder."""
        stored = store.named(name)
        self.load(store.path(stored))
        store.use(stored)

    def _begin_from_stored(self, prompt: list[int]) -> None:
        """Let a new conversation start with the stored prefix of its first prompt in its cache."""
        if self._prefix_cache is None or self._state.tokens or not isinstance(self.cache, HeteroCache):
            return
        begun = self._prefix_cache.with_stored_prefix(self.cache, prompt, tokenizer=self.tokenizer, **self._capacity)
        if begun is not None:
            self.cache = begun
            self._state = ConversationState([], begun.reset)

    def _keep(self) -> None:
        if self._prefix_cache is not None and self._state.tokens and isinstance(self.cache, HeteroCache):
            notes = notes_of(self._state.turns, self.system)
            self._prefix_cache.keep(self.cache, self._state.tokens, notes)


def notes_of(turns: Sequence[Turn], system: str | None) -> dict[str, Any]:
    """The sizes of the turns, and the system message, as plain data."""
    return {"turns": [[turn.question, turn.answer] for turn in turns], "system": system}


def turns_of(notes: dict[str, Any], tokens: int) -> tuple[Turn, ...]:
    """The turns in `notes`; if they do not match the number of `tokens`, as for a saved bare cache, a single turn."""
    sizes = notes.get("turns")
    turns = []
    for pair in sizes if isinstance(sizes, list) else []:
        match pair:
            case [int() as question, int() as answer] if question >= 0 and answer >= 0:
                turns.append(Turn(question, answer))
    known = sum(turn.question + turn.answer for turn in turns)
    return tuple(turns) if known == tokens else (Turn(tokens, 0),)


def system_of(notes: dict[str, Any]) -> str | None:
    """The system message; None for the chat template's own."""
    system = notes.get("system")
    return system if isinstance(system, str) else None


def require_savable(cache: object, tokens: Sequence[int]) -> HeteroCache:
    """The cache, checked. Raises ContextError if its model has no rules, or no turn is stored."""
    if not isinstance(cache, HeteroCache):
        raise ContextError(f"the model has no rules, so its context cannot be saved; {_WITH_RULES}")
    if not tokens:
        raise ContextError("the conversation is empty, so there is nothing to save; ask a question first")
    return cache
