"""What a process does first that is to run in a terminal."""

from __future__ import annotations

import fcntl
import signal
import termios


def take_terminal() -> None:
    """Make standard input's terminal this session's, so that Ctrl-C reaches the process."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # What a shell starts in the background ignores Ctrl-C, and so does all that it starts.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
