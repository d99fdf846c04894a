"""The command `contexts`: lists, verifies and removes saved contexts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hetero_kv.contexts.index import StoredContext
from hetero_kv.contexts.listing import as_json, contexts_table, in_words
from hetero_kv.contexts.settings import ContextSettings
from hetero_kv.errors import ConfigError
from hetero_kv.printing import console, json_text, printable
from hetero_kv.rules.context_settings import context_settings
from hetero_kv.settings.flags import FlagParser
from hetero_kv.settings.setting import nearest_spelling

if TYPE_CHECKING:
    from hetero_kv.contexts.store import ContextStore

DAMAGED = 1


def add_flags(parser: FlagParser) -> None:
    """Add the command's words and flags to `parser`."""
    parser.usage = f"{parser.prog} list | show NAME … | remove NAME … | verify [NAME …] | prune [flags]"
    parser.epilog = (
        "list: all contexts. show: the content of contexts. remove: remove contexts; blocks that others need stay. "
        "verify: read everything, and name the damage; the exit status is 1 if there is any. prune: remove the least "
        "recently used contexts down to --context_cache_gb, and files that killed processes left."
    )
    parser.add_argument("action", metavar="ACTION", nargs="?", help="list, show, remove, verify or prune")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="contexts' names, or the first 8 characters of a file's"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_settings("contexts", "context", ContextSettings)


def run(flags: argparse.Namespace) -> int:
    """Carry out the action; returns the exit status.

    Raises HeteroKVError for an unknown action or name, and if the folder cannot be used.
    """
    if flags.action is None:
        raise ConfigError(f"contexts needs an action: {', '.join(_ACTIONS)}")
    if flags.action not in _ACTIONS:
        near = nearest_spelling(flags.action, _ACTIONS) or f"; known: {', '.join(_ACTIONS)}"
        raise ConfigError(f"contexts has no action {flags.action!r}{near}")
    settings = context_settings(ContextSettings, flags.context)
    act, takes_names, needs_names = _ACTIONS[flags.action]
    if flags.names and not takes_names:
        raise ConfigError(f"contexts {flags.action} takes no names; leave {flags.names[0]!r} out")
    if needs_names and not flags.names:
        raise ConfigError(f"contexts {flags.action} needs a name; hetero-kv contexts list shows them")
    # Imported here, because it imports torch, which reading flags does not need.
    from hetero_kv.contexts.folder import open_store

    with open_store(settings, makes=False) as store:
        named = [_found(store, name) for name in flags.names]
        return act(store, named, flags.json)


def _found(store: ContextStore, name: str) -> StoredContext:
    if len(name) >= 8:
        matching = [each for each in store.contexts() if each.name is None and each.file.startswith(name)]
        if len(matching) == 1:
            return matching[0]
    return store.named(name)


def _list(store: ContextStore, _: Sequence[StoredContext], as_object: bool) -> int:
    stored = store.contexts()
    if as_object:
        contexts = [as_json(each) for each in stored]
        print(json_text({"folder": store.where, "bytes": store.total_bytes(), "contexts": contexts}))
    elif stored:
        console().print(contexts_table(stored))
        _say(f"{store.total_bytes() / 1e6:,.1f} MB in {store.where}")
    else:
        _say(f"there are no contexts in {store.where}")
    return 0


def _show(store: ContextStore, named: Sequence[StoredContext], as_object: bool) -> int:
    described = [as_json(each) | store.details(each) for each in named]
    if as_object:
        print(json_text({"contexts": described}))
        return 0
    for each in described:
        for name, value in each.items():
            if value is not None:
                _say(f"{name}: {in_words(name, value)}")
        _say("")
    return 0


def _remove(store: ContextStore, named: Sequence[StoredContext], as_object: bool) -> int:
    freed = [store.remove(each) for each in named]
    if as_object:
        print(json_text({"removed": [each.name or each.file for each in named], "freed_bytes": sum(freed)}))
    else:
        _say(f"removed {len(named)} contexts, which frees {sum(freed) / 1e6:,.1f} MB")
    return 0


def _verify(store: ContextStore, named: Sequence[StoredContext], as_object: bool) -> int:
    found = {each.name or each.file: store.verify(each) for each in named or store.contexts()}
    if as_object:
        print(json_text({"damaged": {name: lines for name, lines in found.items() if lines}, "verified": len(found)}))
    else:
        for name, lines in found.items():
            _say(f"{name}: {'intact' if not lines else lines[0]}")
            for line in lines[1:]:
                _say(f"  {line}")
    return DAMAGED if any(found.values()) else 0


def _prune(store: ContextStore, _: Sequence[StoredContext], as_object: bool) -> int:
    gone, freed = store.prune()
    if as_object:
        print(json_text({"removed": [each.name or each.file for each in gone], "freed_bytes": freed}))
    else:
        _say(f"removed {len(gone)} contexts, which frees {freed / 1e6:,.1f} MB")
    return 0


def _say(text: str) -> None:
    console().print(printable(text), markup=False, highlight=False, soft_wrap=True)


_ACTIONS: dict[str, tuple[Callable[[ContextStore, Sequence[StoredContext], bool], int], bool, bool]] = {
    "list": (_list, False, False),
    "show": (_show, True, True),
    "remove": (_remove, True, True),
    "verify": (_verify, True, False),
    "prune": (_prune, False, False),
}
"""Action -> the function that carries it out, whether it takes names, whether it needs one."""
