"""Keeps typed text unseen and unlost while the program works; Ctrl-C leaves no ^C in the output."""

from __future__ import annotations

import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Mark pastes during this time as pastes.
_MARK_PASTES, _MARK_NO_PASTES = "\x1b[?2004h", "\x1b[?2004l"
_INPUT, _LOCAL, _CHARACTERS = 0, 3, 6


@contextmanager
def keep_typeahead() -> Iterator[None]:
    """Within this context typed text waits in the terminal for the next line; Ctrl-C still sends its signal.

    Nothing changes unless standard input and output are terminals.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet = [*before[:_CHARACTERS], [*before[_CHARACTERS]]]
    # A line editor expects Enter as CR; unfinished lines wait too.
    quiet[_INPUT] &= ~termios.ICRNL
    quiet[_LOCAL] = (quiet[_LOCAL] & ~(termios.ECHO | termios.ICANON)) | termios.ISIG | termios.NOFLSH
    quiet[_CHARACTERS][termios.VMIN], quiet[_CHARACTERS][termios.VTIME] = 1, 0
    _set(quiet, _MARK_PASTES)
    try:
        yield
    finally:
        # The terminal may have closed.
        with suppress(OSError, termios.error):
            _set(before, _MARK_NO_PASTES)


def _set(modes: list, mark: str) -> None:
    termios.tcsetattr(sys.stdin, termios.TCSANOW, modes)
    sys.stdout.write(mark)
    sys.stdout.flush()
