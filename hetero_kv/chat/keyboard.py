"""The keyboard while the program works: nothing typed is shown or lost, and Ctrl-C leaves no ^C in the text."""

from __future__ import annotations

import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# What is pasted meanwhile is marked as such.
_MARK_PASTES, _MARK_NO_PASTES = "\x1b[?2004h", "\x1b[?2004l"
_INPUT, _LOCAL, _CHARACTERS = 0, 3, 6


@contextmanager
def kept_for_later() -> Iterator[None]:
    """Within this context, what is typed waits in the terminal for the next line; Ctrl-C is a signal as ever.

    Nothing changes where standard input or output is no terminal.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet = [*before[:_CHARACTERS], [*before[_CHARACTERS]]]
    # Enter is what an editor of lines expects; a line that is not finished waits too.
    quiet[_INPUT] &= ~termios.ICRNL
    quiet[_LOCAL] = (quiet[_LOCAL] & ~(termios.ECHO | termios.ICANON)) | termios.ISIG | termios.NOFLSH
    quiet[_CHARACTERS][termios.VMIN], quiet[_CHARACTERS][termios.VTIME] = 1, 0
    _set(quiet, _MARK_PASTES)
    try:
        yield
    finally:
        # The terminal may be gone.
        with suppress(OSError, termios.error):
            _set(before, _MARK_NO_PASTES)


def _set(modes: list, mark: str) -> None:
    termios.tcsetattr(sys.stdin, termios.TCSANOW, modes)
    sys.stdout.write(mark)
    sys.stdout.flush()
