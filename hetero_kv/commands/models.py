"""The command `models`: the named models, and how much of each is on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from rich.filesize import decimal
from rich.markup import escape

from hetero_kv.cache_home import cache_home
from hetero_kv.errors import ConfigError
from hetero_kv.models.fetching import fetch, fetched_bytes, remove
from hetero_kv.models.hub_files import HUB_FILE, hub_gguf
from hetero_kv.models.named import DEFAULT_MODEL, NAMED_MODELS, NamedModel, unknown_name
from hetero_kv.models.packed_folder import clear_packed, packed_home, packed_sizes
from hetero_kv.models.progress import progress_line
from hetero_kv.printing import console, json_text
from hetero_kv.settings.flags import FlagParser
from hetero_kv.settings.setting import nearest_spelling


def add_flags(parser: FlagParser) -> None:
    """Add the command's flags to `parser`."""
    parser.usage = f"{parser.prog} [list | fetch NAME | remove NAME | clear] [flags]"
    parser.epilog = (
        "Models are in HETERO_KV_HOME, or ~/.cache/hetero_kv. A model is also fetched on first use. fetch also takes a "
        "GGUF file of a hub repository (owner/repo:Q4_K_M), which the hub's own cache keeps. clear removes the packed "
        "weights that are kept for later starts (packed_cache_gb)."
    )
    parser.add_argument("action", nargs="?", default="list", help="list (the default), fetch, remove or clear")
    parser.add_argument("name", nargs="?", help="the model to fetch or remove")
    parser.add_argument("--json", action="store_true", help="list: print one JSON object")


def run(flags: argparse.Namespace) -> int:
    """List, fetch, remove or clear; returns the exit status.

    Raises:
        ConfigError: an unknown action, a superfluous name, or a missing one.
        ModelError: an unknown model, or one that cannot be fetched or removed.
    """
    if flags.action in ("list", "clear"):
        if flags.name is not None:
            raise ConfigError(f"models {flags.action} takes no name; leave {flags.name!r} out")
        if flags.action == "list":
            _list(as_json=flags.json)
        else:
            console().print(f"freed {decimal(clear_packed())}", highlight=False)
        return 0
    if flags.action not in _ACTIONS:
        near = nearest_spelling(flags.action, ("list", "clear", *_ACTIONS))
        near = near or "; it must be list, fetch, remove or clear"
        raise ConfigError(f"models has no action {flags.action!r}{near}")
    if flags.name is None:
        raise ConfigError(f"models {flags.action} needs a name; give one of {', '.join(NAMED_MODELS)}")
    if flags.action == "fetch" and HUB_FILE.fullmatch(flags.name):
        console().print(str(hub_gguf(flags.name, None)), markup=False, highlight=False, soft_wrap=True)
        return 0
    if flags.name not in NAMED_MODELS:
        raise unknown_name(flags.name, named=True)
    console().print(_ACTIONS[flags.action](NAMED_MODELS[flags.name]), markup=False, highlight=False, soft_wrap=True)
    return 0


def _fetch(model: NamedModel) -> str:
    with progress_line(model.name) as report:
        return "\n".join(str(path) for path in fetch(model, report))


def _remove(model: NamedModel) -> str:
    return f"freed {decimal(remove(model))}"


_ACTIONS: dict[str, Callable[[NamedModel], str]] = {"fetch": _fetch, "remove": _remove}


def _list(*, as_json: bool) -> None:
    there = {name: fetched_bytes(model) for name, model in NAMED_MODELS.items()}
    packed = sum(packed_sizes().values())
    if as_json:
        models = {
            name: {
                "description": model.description,
                "licence": model.licence,
                "context_length": model.context_length,
                "bytes": model.size,
                "fetched_bytes": there[name],
                "is_default": name == DEFAULT_MODEL,
            }
            for name, model in NAMED_MODELS.items()
        }
        print(json_text({"folder": str(cache_home() / "models"), "models": models, "packed_bytes": packed}))
        return
    terminal = console()
    for name, model in NAMED_MODELS.items():
        state = "here" if there[name] == model.size else f"{decimal(there[name])} here" if there[name] else "not here"
        default = ", the default" if name == DEFAULT_MODEL else ""
        terminal.print(f"[bold]{escape(name)}[/bold]  {decimal(model.size)}, {state}{default}", highlight=False)
        about = f"  {model.description}\n  {model.context_length:,} tokens of context, {model.licence}"
        terminal.print(about, style="dim", markup=False, highlight=False, soft_wrap=True)
    terminal.print(f"in {cache_home() / 'models'}", markup=False, highlight=False, soft_wrap=True)
    if packed:
        about = f"packed weights for later starts: {decimal(packed)} in {packed_home()}"
        terminal.print(about, markup=False, highlight=False, soft_wrap=True)
