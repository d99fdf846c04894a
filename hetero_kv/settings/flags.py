"""Command-line flags, spelled with dashes or underscores, and derived from settings classes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hetero_kv.errors import ConfigError
from hetero_kv.settings.description import SettingRow, describe, takes_any_text
from hetero_kv.settings.setting import nearest_spelling

# A value may begin with dashes too ("--- a diff ---"); a flag is one word.
_FLAG = re.compile(r"(--[A-Za-z][\w-]*)(=.*)?", re.DOTALL)
_LIST = re.compile(r"\[\s*\d{1,40}(?:\s*,\s*\d{1,40})*\s*\]|\d{1,40}(?:\s*,\s*\d{1,40})+")
_NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


class FlagParser(argparse.ArgumentParser):
    """A parser that raises ConfigError for the user's mistakes; only `--help` ends the program.

    Attributes:
        learn: called with the known flags when there are unknown ones; it may add flags, and returns whether it did.
        epilog_of_help: returns the epilog, called when the help is printed, for an epilog whose imports take seconds.
    """

    def __init__(self, prog: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog,
            usage=f"{prog} [flags]",
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
        )
        self.learn: Callable[[argparse.Namespace], bool] | None = None
        self.epilog_of_help: Callable[[], str] | None = None

    def format_help(self) -> str:
        """See argparse."""
        if self.epilog_of_help is not None:
            self.epilog = self.epilog_of_help()
        return super().format_help()

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The flags in `arguments`.

        Raises:
            ConfigError: an unknown flag (with the nearest spelling), a missing value, or a stray word.
        """
        words = _with_underscores(arguments)
        flags, unknown = self.parse_known_args(words)
        if unknown and self.learn is not None and self.learn(flags):
            flags, unknown = self.parse_known_args(words)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return flags

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"{word!r} belongs to no flag; put a text of several words into quotes"
        flag = word.partition("=")[0]
        known = [name for name, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
        return f"unknown flag {flag!r}{nearest_spelling(flag, known)}"

    def error(self, message: str) -> Any:
        """Raise ConfigError with `message`; argparse would print its usage and exit."""
        raise ConfigError(f"{message}{'' if message.endswith('?') else ';'} {self.prog} --help lists every flag")

    def add_settings(self, title: str, dest: str, cls: type) -> argparse._ArgumentGroup:
        """A group with a flag for every setting of `cls` and its aliases; `dest` collects those on the command line.

        Former names are flags too, which the help does not list.

        `dest` of the parsed namespace maps names, as spelled on the command line, to numbers, booleans, lists or texts.
        They are unchecked; `mapping.canonical` checks them.
        """
        group = self.add_argument_group(title)
        for row in describe(cls):
            unit = f", in {row.unit}" if row.unit else ""
            meaning = f"{row.doc} ({row.type}{unit}; default {row.default})"
            self.add_setting(group, dest, row, meaning, is_text=takes_any_text((cls,), row.name))
        return group

    def add_setting(
        self, group: argparse._ArgumentGroup, dest: str, row: SettingRow, meaning: str, *, is_text: bool
    ) -> None:
        """Add a flag for one setting, as `add_settings`; `is_text` keeps its value from being parsed as a number.

        A name that is a flag already is skipped.
        """
        if dest not in self._defaults:
            self.set_defaults(**{dest: _NO_SETTINGS})
        switch = isinstance(row.default, bool)
        for spellings, text in (
            ((row.name, *row.aliases), meaning.replace("%", "%%")),
            (row.formerly, argparse.SUPPRESS),
        ):
            names = [f"--{name}" for name in spellings if not self.has(f"--{name}")]
            if names:
                group.add_argument(
                    *names,
                    dest=dest,
                    action=_CollectSetting,
                    type=str if is_text else scalar,
                    nargs="?" if switch else None,
                    const=True if switch else None,
                    default=argparse.SUPPRESS,
                    metavar=(row.unit or row.name.rpartition("_")[2]).upper(),
                    help=text,
                )

    def has(self, flag: str) -> bool:
        """Whether `flag` is one of the parser's."""
        return flag in self._option_string_actions

    def words(self, values: Mapping[str, Any]) -> list[str]:
        """The words of a command line with these flags: name -> value, a list for a flag that is given several times.

        Raises ConfigError for a value that no flag has.
        """
        found = []
        for name, given in values.items():
            flag = f"--{name.replace('-', '_')}"
            action = self._option_string_actions.get(flag)
            is_switch = action is not None and action.nargs == 0
            for value in given if isinstance(given, list | tuple) else [given]:
                if not isinstance(value, str | int | float):
                    raise ConfigError(f"{name} is {value!r}; give a text, a number, true, false, or a list of them")
                if is_switch and isinstance(value, bool):
                    found += [flag] if value else []
                else:
                    found.append(f"{flag}={value}")
        return found


class _CollectSetting(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name = (option_string or self.option_strings[0]).lstrip("-")
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), name: values})


class _HelpFormatter(argparse.HelpFormatter):
    """Writes the value once, after all aliases: `--model, --model_path MODEL`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {self._format_args(action, action.dest.upper())}"


def _with_underscores(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--max-seq-len` spelled `--max_seq_len`."""
    spelled = []
    for word in arguments:
        flag = _FLAG.fullmatch(word)
        spelled.append(f"--{flag[1][2:].replace('-', '_')}{flag[2] or ''}" if flag else word)
    return spelled


def scalar(text: str) -> int | float | bool | str | list[int]:
    """A flag's value parsed as a number, boolean or list of whole numbers (1,2,3 or [1, 2, 3]), else the text."""
    if _LIST.fullmatch(text.strip()):
        return [int(number) for number in re.findall(r"\d+", text)]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.casefold(), text)


def add_loading_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the flags for choosing and loading a model; `default` names the default model in the help."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        "--model_path",
        metavar="MODEL",
        help="a directory in Hugging Face format, a hub id (owner/repo:Q4_K_M for a .gguf file there), a .gguf file, "
        f"or a named model (default: {default})",
    )
    model.add_argument(
        "--gguf_path",
        metavar="FILE",
        help="a .gguf file; with --model, the weights of the model whose configuration and tokenizer are there",
    )
    model.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N (default auto)")
    model.add_argument(
        "--dtype", default="auto", metavar="TYPE", help="auto, float32, bfloat16 or float16 (default auto)"
    )
    model.add_argument(
        "--trust_remote_code", action="store_true", help="run Python code that comes with the model; read it first"
    )
