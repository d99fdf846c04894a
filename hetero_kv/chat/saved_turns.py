"""What a conversation writes down of itself beside its cache, and how it comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetero_kv.chat.answer import Turn
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.errors import ContextError


def notes_of(turns: Sequence[Turn], system: str | None) -> dict[str, Any]:
    """Sizes of the turns, and the system message."""
    return {"turns": [[turn.question, turn.answer] for turn in turns], "system": system}


def turns_of(notes: dict[str, Any], tokens: int) -> tuple[Turn, ...]:
    """The turns of so many tokens; where they are not known, as of a cache that was no conversation's, one."""
    said = notes.get("turns")
    turns = []
    for pair in said if isinstance(said, list) else []:
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
    """The cache of a conversation that can be saved. Raises ContextError for one without rules, or without turns."""
    if not isinstance(cache, HeteroCache):
        raise ContextError("the model has no rules in it (--mode normal), so that nothing of it is saved; take rules")
    if not tokens:
        raise ContextError("nothing has been asked, so that there is nothing to save; ask first")
    return cache
