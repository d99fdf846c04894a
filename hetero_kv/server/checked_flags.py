"""The flags of `hetero-kv serve`, checked before anything heavy is imported."""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Collection
from typing import NamedTuple

from hetero_kv.contexts.settings import ADDRESS_FLAGS, is_address
from hetero_kv.errors import ConfigError
from hetero_kv.rules.context_settings import context_settings
from hetero_kv.rules.precedence import COMMAND_LINE
from hetero_kv.rules.recipes import DEFAULT_RECIPE
from hetero_kv.server.cluster.settings import ClusterSettings
from hetero_kv.server.keys import Keys, keys_in
from hetero_kv.server.settings import ServedContextSettings, ServerSettings
from hetero_kv.serving.sampling_settings import SamplingSettings
from hetero_kv.serving.speculation.ways import require_way_or_model
from hetero_kv.settings.mapping import settings_from_mapping


class CheckedFlags(NamedTuple):
    """Settings and keys. `cluster` is None for a server in one process."""

    settings: ServerSettings
    defaults: SamplingSettings
    contexts: ServedContextSettings
    keys: Keys
    cluster: ClusterSettings | None


def checked(flags: argparse.Namespace, *, listens: bool = True) -> CheckedFlags:
    """The settings and keys of the flags; `flags.rules` gets its default.

    listens: whether the server listens at `--host`; otherwise its address is unknown.

    Raises ConfigError for an invalid value, and for a server without keys that others can reach, unless a flag allows
    that.
    """
    settings = settings_from_mapping(ServerSettings, flags.server, where=COMMAND_LINE)
    require_way_or_model(settings.speculation)
    defaults = settings_from_mapping(SamplingSettings, flags.sampling, where=COMMAND_LINE)
    cluster = settings_from_mapping(ClusterSettings, flags.cluster_settings, where=COMMAND_LINE)
    if flags.cluster_settings and not flags.cluster:
        name = next(iter(flags.cluster_settings))
        raise ConfigError(f"--{name} is for a cluster; give --cluster too, or omit it")
    keys = Keys([*flags.api_key, *(keys_in(flags.api_key_file) if flags.api_key_file else [])])
    if not (keys or settings.insecure or (listens and _is_loopback(settings.host))):
        place = f"--host {settings.host} can" if listens else "the address of Ray Serve's proxies may"
        raise ConfigError(
            f"{place} be reached from other machines, and there is no --api_key; give one, or --insecure if everybody "
            "there may use the server"
        )
    contexts = context_settings(ServedContextSettings, flags.contexts)
    if cluster.prefill_replicas and contexts.context_cache == "off":
        raise ConfigError("--prefill_replicas hands prompts over in the context folder; leave out --context_cache off")
    if cluster.prefill_replicas and is_address(contexts.context_folder):
        raise ConfigError(
            f"--prefill_replicas hands prompts over in --context_folder, which is {contexts.context_folder}; give a "
            "folder that all machines have, because an address gets what is saved some time later"
        )
    _require_effect(flags.contexts, contexts)
    flags.rules = flags.rules or [DEFAULT_RECIPE]
    return CheckedFlags(settings, defaults, contexts, keys, cluster if flags.cluster else None)


def _require_effect(given: Collection[str], contexts: ServedContextSettings) -> None:
    """Refuse flags of contexts that have no effect under the settings in force."""
    for name in given:
        if contexts.context_cache == "off" and name != "context_cache":
            raise ConfigError(f"--{name} has no effect where context_cache is off; leave one out")
        if name in ADDRESS_FLAGS and not is_address(contexts.context_folder):
            raise ConfigError(
                f"--{name} has no effect on a folder of this machine; leave it out, or name an address with "
                "--context_folder"
            )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
