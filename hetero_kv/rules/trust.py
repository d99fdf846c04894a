"""The user modules whose operators rules may name, from the flag and the settings file."""

from __future__ import annotations

import argparse

from hetero_kv.rules.precedence import COMMAND_LINE
from hetero_kv.rules.settings_file import read_trusted_modules
from hetero_kv.rules.trusted_names import TRUST_RULES, trusted_names


def add_trust_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names modules; it may repeat, and takes comma-separated names."""
    parser.add_argument(
        f"--{TRUST_RULES}",
        action="append",
        default=[],
        metavar="MODULE[,MODULE…]",
        help="let rules name operators of these modules, whose Python code then runs; read it first",
    )


def trusted_modules(flags: argparse.Namespace) -> tuple[str, ...]:
    """The modules that the flag and the settings file name.

    Raises:
        ConfigError: a word that is no module name, or a mistake in the settings file.
    """
    words = [word for value in flags.trust_rules for word in value.split(",")]
    return tuple(dict.fromkeys((*trusted_names(words, COMMAND_LINE), *read_trusted_modules())))
