"""The console script `hetero-kv`: its commands, and the exit status of errors and interruptions.

A command is a module with `add_flags(parser)` and `run(flags) -> exit status`, and an entry of `COMMANDS`. The module
is imported only when the command is called. Where another program's command parses the words, `run` takes these.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple

from hetero_kv.errors import ConfigError, HeteroKVError, OutOfMemoryError, brief_error, is_out_of_memory
from hetero_kv.printing import console, discard_rest, make_printing_safe
from hetero_kv.settings.flags import FlagParser
from hetero_kv.settings.setting import nearest_spelling

#: The exit status when the reader of the output has closed it.
UNREAD = 1
USER_ERROR = 2
INTERRUPTED = 130
# System errors when the output's disk is full or its target is gone.
_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})


class Command(NamedTuple):
    """A command: its module, a one-line summary, and whether `run` takes the words unparsed, but for `--help`."""

    module: str
    summary: str
    takes_words: bool = False


COMMANDS: dict[str, Command] = {
    "chat": Command("hetero_kv.chat.command", "Ask a model about long texts: a chat in the terminal, or one answer."),
    "serve": Command(
        "hetero_kv.server.command", "Serve a model to programs that speak OpenAI's or Anthropic's API, and as a page."
    ),
    "eval": Command(
        "hetero_kv.commands.eval", "Compare methods: retrieval tasks, perplexity, fidelity, your own files."
    ),
    "models": Command("hetero_kv.commands.models", "The named models: list, fetch, remove."),
    "contexts": Command("hetero_kv.commands.contexts", "Saved contexts: list, show, remove, verify, prune."),
    "plan": Command("hetero_kv.commands.plan", "The memory of a context, the free memory, and the longest context."),
    "rules": Command("hetero_kv.commands.rules", "The operators and settings of a rules file, layer by layer."),
    "methods": Command("hetero_kv.commands.methods", "All operators, representatives and storage types."),
    "lm_eval": Command(
        "hetero_kv.commands.lm_eval", "Run tasks of EleutherAI's lm-evaluation-harness by any method.", takes_words=True
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `hetero-kv`.

    Returns the exit status: 0, 1 if the output's reader has gone, 2 for a user's mistake, 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if words else USER_ERROR
    if words[0] == "--version":
        print(f"hetero-kv {metadata.version('hetero-kv')}")
        return 0
    return run_command(words[0], words[1:], is_program=arguments is None)


def run_command(name: str, arguments: Sequence[str], prog: str | None = None, *, is_program: bool = False) -> int:
    """Run one command like `main`.

    prog: the program's name in the help. is_program: whether the process is the command's alone.
    """
    make_printing_safe()
    try:
        if name not in COMMANDS:
            known = f"; known: {', '.join(COMMANDS)}"
            raise ConfigError(f"hetero-kv has no command {name!r}{nearest_spelling(name, COMMANDS) or known}")
        command = COMMANDS[name]
        module = importlib.import_module(command.module)
        parser = FlagParser(prog or f"hetero-kv {name}", command.summary)
        module.add_flags(parser)
        is_passed_on = command.takes_words and list(arguments) not in (["-h"], ["--help"])
        parsed = arguments if is_passed_on else parser.parse(arguments)
        _require_instruction_set()
        if is_program and not command.takes_words:
            from hetero_kv.start_up.deferred_imports import defer_imports

            defer_imports()
        status: int = module.run(parsed)
        if sys.stdout is not None:
            # Flush here, so that a write error is handled below and not by the interpreter at exit.
            sys.stdout.flush()
        return status
    except HeteroKVError as error:
        print_error(error)
        return USER_ERROR
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print_error(
            OutOfMemoryError(
                f"memory ran out ({brief_error(error)}); take a smaller max_seq_len or model, or free some memory: "
                "`hetero-kv plan` shows what a context needs"
            )
        )
        return USER_ERROR
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        discard_rest(sys.stdout)
        return UNREAD
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        print_error(ConfigError(f"standard output cannot be written ({brief_error(error)}); write it elsewhere"))
        discard_rest(sys.stdout)
        return USER_ERROR


def _require_instruction_set() -> None:
    """Raise ConfigError, before a model is loaded, if HETERO_KV_ISA names instructions that this CPU lacks."""
    if not os.environ.get("HETERO_KV_ISA"):
        return
    from hetero_kv.cpu_ops import cpu_features

    try:
        cpu_features.isa()
    except ValueError as error:
        raise ConfigError(f"{error}; name one of these, or unset it") from error


def print_error(error: Exception) -> None:
    """Print an error for the user on standard error, in red on a terminal."""
    terminal = console(stderr=True)
    # A log file gets each error on one line.
    is_one_line = not terminal.is_terminal
    terminal.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=is_one_line)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        ("usage: hetero-kv COMMAND [flags]", "", *lines, "", "hetero-kv COMMAND --help lists the flags of a command")
    )


if __name__ == "__main__":
    sys.exit(main())
