"""The notes that a conversation saves next to its cache: turns and system message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetero_kv.chat.answer import Turn
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.errors import ContextError


def notes_of(turns: Sequence[Turn], system: str | None) -> dict[str, Any]:
    """The sizes of the turns, and the system message, as plain data."""
    return {"turns": [[turn.question, turn.answer] for turn in turns], "system": system}


def turns_of(notes: dict[str, Any], tokens: int) -> tuple[Turn, ...]:
    """The turns in `notes`; if they do not match the number of `tokens`, as for a saved bare cache, a single turn."""
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
    """The cache, checked. Raises ContextError if its model has no rules, or no turn is stored."""
    if not isinstance(cache, HeteroCache):
        raise ContextError("the model has no rules in it (--mode normal), so that nothing of it is saved; take rules")
    if not tokens:
        raise ContextError("nothing has been asked, so that there is nothing to save; ask first")
    return cache
