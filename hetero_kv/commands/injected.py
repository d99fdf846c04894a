"""The common part of `plan` and `rules`: a model without weights, with the rules injected."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from hetero_kv.models import DEFAULT_MODEL
from hetero_kv.rules.named_config import named_config
from hetero_kv.rules.recipes import display
from hetero_kv.rules.setting_flags import settings_of
from hetero_kv.rules.settings_file import read_settings_file
from hetero_kv.rules.trust import trusted_modules
from hetero_kv.settings.flags import FlagParser

if TYPE_CHECKING:
    from hetero_kv.rules.injection import Injection


class InjectedModel(NamedTuple):
    """A model on the meta device with rules injected.

    Attributes:
        rules: the file's name in messages.
        stored: see `WeightlessModel`.
    """

    name: str
    rules: str
    injection: Injection
    stored: Mapping[str, str] | None


def add_model_flags(parser: FlagParser, default: str) -> argparse._ArgumentGroup:
    """Add the flags that choose the model; `default` says in the help what happens without them."""
    group = parser.add_argument_group("model (its weights are not loaded)")
    group.add_argument(
        "--model",
        "--model_path",
        metavar="MODEL",
        help="a directory in Hugging Face format, a config.json, a hub id (owner/repo:Q4_K_M for a .gguf file there), "
        f"a .gguf file, or a named model (default: {default})",
    )
    group.add_argument(
        "--gguf_path",
        metavar="FILE",
        help="a .gguf file; with --model, the file with the weights, while --model has the configuration",
    )
    group.add_argument(
        "--trust_remote_code", action="store_true", help="run Python code that comes with the model; read it first"
    )
    return group


def injected_model(flags: argparse.Namespace) -> InjectedModel:
    """The model of `flags.model`, with the rules of `flags.rules` and the settings of both these and other flags.

    Raises:
        HeteroKVError: a mistake in the flags, the settings file or the rules, a model that cannot be found, or rules
            that do not fit it.
    """
    from hetero_kv.models.weightless import weightless_model
    from hetero_kv.rules.injecting import inject

    config = named_config(flags.rules, trusted_modules(flags))
    config = replace(config, settings=config.command_line(settings_of(flags)))
    name, gguf_path = flags.model or flags.gguf_path or DEFAULT_MODEL, flags.gguf_path if flags.model else None
    weightless = weightless_model(name, gguf_path=gguf_path, trust_remote_code=flags.trust_remote_code)
    injection = inject(weightless.model, config, settings_file=read_settings_file())
    return InjectedModel(
        weightless.name, display(config.rules.path) if config.rules.path else "rules", injection, weightless.stored
    )
