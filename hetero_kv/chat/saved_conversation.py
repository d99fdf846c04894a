"""A conversation that outlasts the process: saved, loaded, and begun from what is stored of its first prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hetero_kv.chat.answer import Turn
from hetero_kv.chat.saved_turns import notes_of, require_savable, system_of, turns_of
from hetero_kv.contexts.index import StoredContext
from hetero_kv.contexts.prefix_cache import PrefixCache
from hetero_kv.contexts.saving import load_context, save_context
from hetero_kv.contexts.store import ContextStore
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.errors import ContextError
from hetero_kv.engine.undo import way_back
from hetero_kv.errors import HeteroKVError
from hetero_kv.models.turns import TurnTokens


@dataclass(frozen=True)
class Said:
    """What a conversation has come to; the next turn replaces it as a whole.

    Attributes:
        tokens: of all turns.
        go_back: takes the cache to where it holds them, the last one excepted, whatever it holds beyond.
        turns: their sizes.
        earlier: what it had come to before each of the last turns, none of which has any itself.
    """

    tokens: list[int]
    go_back: Callable[[], None]
    turns: tuple[Turn, ...] = ()
    earlier: tuple[Said, ...] = ()


class SavedConversation:
    """What a conversation has of files; its attributes are the conversation's."""

    model: PreTrainedModel
    tokenizer: Any
    cache: Cache
    system: str | None
    _turns: TurnTokens
    _thinks: bool | None
    _said: Said
    _is_answering: bool
    _prefix_cache: PrefixCache | None
    _room: dict[str, Any]

    def _require_idle(self, what: str) -> None:
        if self._is_answering:
            raise HeteroKVError(
                f"an answer is being generated; {what} the conversation before or after, not in between"
            )

    def save(self, path: str | Path) -> None:
        """Write the conversation into a file, from which `load` goes on in another process (HeteroCache.save).

        Raises ContextError where nothing has been asked, or it cannot be written.
        """
        cache, tokens = self._savable()
        save_context(path, cache, [tokens], notes_of(self._said.turns, self.system))

    def save_in(self, store: ContextStore, name: str | None = None) -> StoredContext:
        """As `save`, in a folder of contexts that share what they have in common."""
        cache, tokens = self._savable()
        return store.save(cache, tokens, name, notes_of(self._said.turns, self.system))

    def _savable(self) -> tuple[HeteroCache, list[int]]:
        self._require_idle("save")
        cache = require_savable(self.cache, self._said.tokens)
        self._said.go_back()
        return cache, self._said.tokens

    def load(self, path: str | Path) -> None:
        """Go on from a saved conversation, in place of this one, exactly as it would have gone on.

        Raises as `HeteroCache.load`; this conversation is as it was then.
        """
        self._require_idle("load")
        loaded = load_context(path, self.model, tokenizer=self.tokenizer, **self._room)
        if len(loaded.tokens) != 1:
            raise ContextError(f"{path} holds no conversation: it has the tokens of {len(loaded.tokens)} rows")
        system, tokens = system_of(loaded.notes), loaded.tokens[0]
        turns = TurnTokens(self.tokenizer, system, self._thinks)
        # One token at most is not stored yet: an answer's last.
        tokens = tokens[: loaded.cache.get_seq_length() + 1]
        self._turns, self.system, self.cache = turns, system, loaded.cache
        self._said = Said(tokens, way_back(loaded.cache), turns_of(loaded.notes, len(tokens)))

    def load_from(self, store: ContextStore, name: str) -> None:
        """As `load`, the context of this name in a folder."""
        stored = store.named(name)
        self.load(store.path(stored))
        store.use(stored)

    def _begin_from_stored(self, prompt: list[int]) -> None:
        """Let the cache of a conversation that begins hold what is stored of its first prompt's beginning."""
        if self._prefix_cache is None or self._said.tokens or not isinstance(self.cache, HeteroCache):
            return
        begun = self._prefix_cache.begun(self.cache, prompt, tokenizer=self.tokenizer, **self._room)
        if begun is not None:
            self.cache = begun
            self._said = Said([], begun.reset)

    def _keep(self) -> None:
        if self._prefix_cache is not None and self._said.tokens and isinstance(self.cache, HeteroCache):
            notes = notes_of(self._said.turns, self.system)
            self._prefix_cache.keep(self.cache, self._said.tokens, notes)
