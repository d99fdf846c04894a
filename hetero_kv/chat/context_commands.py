"""Saving and loading the conversation in a chat, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero_kv.chat.display import loaded_in_short
from hetero_kv.contexts.listing import contexts_table
from hetero_kv.errors import HeteroKVError

if TYPE_CHECKING:
    from hetero_kv.chat.session import ChatSession
    from hetero_kv.chat.terminal import Terminal


def save(terminal: Terminal, name: str) -> None:
    """Save the conversation under a name."""
    terminal.note(saved(terminal.session, _required(name, "/save")))


def load(terminal: Terminal, name: str) -> None:
    """Replace the conversation by the saved one of this name."""
    talk = terminal.session.conversation
    with terminal.session.contexts() as store:
        talk.load_from(store, _required(name, "/load"))
    terminal.forget()
    terminal.note(loaded_in_short(name, talk))
    terminal.note_waiting()


def show(terminal: Terminal, _: str) -> None:
    """List the saved contexts."""
    with terminal.session.contexts() as store:
        stored = store.contexts()
        if not stored:
            terminal.note(f"there are no contexts in {store.where}; save one: /save NAME")
            return
        terminal.console.print(contexts_table(stored))


def saved(session: ChatSession, name: str) -> str:
    """Save a session's conversation under a name; returns a message, also about a context that it replaces."""
    with session.contexts() as store:
        before = next((each for each in store.contexts() if each.name == name), None)
        stored = session.conversation.save_in(store, name)
    replaced = "" if before is None else f"; it replaces one of {before.tokens:,} tokens with this name"
    return f"saved {name}: {stored.tokens:,} tokens, {stored.bytes / 1e6:,.1f} MB on disk{replaced}"


def _required(name: str, command: str) -> str:
    if not name:
        raise HeteroKVError(f"{command} needs a name: {command} NAME")
    return name
