"""The command `serve`: answers programs that speak OpenAI's or Anthropic's API, and a page for people."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetero_kv.errors import ConfigError
from hetero_kv.rules.recipes import DEFAULT_RECIPE
from hetero_kv.rules.setting_flags import add_setting_flags
from hetero_kv.server.cluster.settings import ClusterSettings
from hetero_kv.server.settings import ServedContextSettings, ServerSettings
from hetero_kv.serving.sampling_settings import SamplingSettings
from hetero_kv.settings.flags import FlagParser, add_loading_flags
from hetero_kv.start_up.collection import collection_deferred

_MISSING = "the server needs FastAPI and others; pip install 'hetero-kv[server]', or `make serve` in the repository"
_MISSING_RAY = "a cluster needs Ray Serve; pip install 'hetero-kv[cluster]', or `make cluster` in the repository"


def add_flags(parser: FlagParser) -> None:
    """Add the command's flags to `parser`."""
    parser.epilog = (
        "Flags may be spelled with dashes or underscores. Sampling flags are the defaults of requests. "
        "Stop the server with Ctrl-C: answers under way get --shutdown_s to end. docs/server.md has set-ups for tools."
    )
    add_loading_flags(parser, default="a small one, fetched on first use")
    method = parser.add_argument_group("method")
    method.add_argument(
        "--config",
        "--optimize_config_path",
        dest="rules",
        action="append",
        default=[],
        metavar="FILE",
        help="rules file, or a recipe's name, optionally with settings: quest:block_size=32; several may be given, and "
        f"requests choose by MODEL:RECIPE (default {DEFAULT_RECIPE})",
    )
    names = parser.add_argument_group("names")
    names.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="MODEL",
        help="a further model, as --model takes it, under the first recipe, or MODEL=RECIPE; may be repeated. It must "
        "fit into memory beside the others",
    )
    names.add_argument(
        "--alias",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name of the first model, or NAME=MODEL:RECIPE; * stands for all unknown names; may be repeated",
    )
    access = parser.add_settings("server", "server", ServerSettings)
    access.add_argument(
        "--api_key",
        action="append",
        default=[],
        metavar="KEY",
        help="a key that requests need, or NAME:KEY; may be repeated",
    )
    access.add_argument("--api_key_file", type=Path, metavar="FILE", help="a file with such keys, one on a line")
    access.add_argument(
        "--allow_origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="an origin (https://example.org) whose pages may use the server, * for all; may be repeated",
    )
    cluster = parser.add_settings("cluster", "cluster_settings", ClusterSettings)
    cluster.add_argument(
        "--cluster",
        action="store_true",
        help="answer by several processes on Ray Serve, here or on the machines of a running Ray cluster "
        "(RAY_ADDRESS); docs/cluster.md",
    )
    parser.add_settings("contexts", "contexts", ServedContextSettings)
    parser.add_settings("sampling", "sampling", SamplingSettings)
    add_setting_flags(parser, lambda flags: flags.rules or [DEFAULT_RECIPE])


def run(flags: argparse.Namespace) -> int:
    """Serve until a signal ends it; returns the exit status.

    Raises:
        HeteroKVError: a mistake in the flags, a model that cannot be loaded, or too little memory for it.
    """
    from hetero_kv.planning.read_ahead import read_ahead
    from hetero_kv.server.checked_flags import checked

    found = checked(flags)
    try:
        with collection_deferred():
            if found.cluster is None:
                read_ahead(flags.model, flags.gguf_path)
            from hetero_kv.server.launch import serve
            from hetero_kv.server.plan import ServerPlan
    except ImportError as error:
        raise ConfigError(f"{_MISSING} ({error})") from error
    plan = ServerPlan.of(flags, found)
    if found.cluster is None:
        return serve(plan)
    try:
        from hetero_kv.server.cluster.launch import serve_cluster
    except ImportError as error:
        raise ConfigError(f"{_MISSING_RAY} ({error})") from error
    return serve_cluster(plan, found.cluster)
