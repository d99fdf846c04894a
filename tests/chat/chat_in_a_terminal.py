"""The chat in a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
PROMPT = ">>> "
CTRL_C, CTRL_D = "\x03", "\x04"
PATIENCE_S = 120
# So wide that no line of a test is wrapped.
ROWS, COLUMNS = 50, 240
# A line is drawn once more from its beginning when it is sent, and whenever else the editor sees fit.
REDRAWN = re.compile(r"(?:\r|\x1b\[\d*[AD])+(?:\x1b\[0m\x1b\[J)?\x1b\[[0-9;]*m>>> ")
SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class ChatInATerminal:
    """`local_chat.py` in a pseudo-terminal; its output is read without colours and cursor movements.

    Attributes:
        drawn: what was shown last, with them.
    """

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (ROWS, COLUMNS))
        words = [
            sys.executable,
            "local_chat.py",
            "--model",
            folder,
            "--mode",
            "normal",
            "--dtype",
            "float32",
            *arguments,
        ]
        # A new session makes this the controlling terminal, so that Ctrl-C reaches the process.
        self.process = subprocess.Popen(
            list(map(str, words)),
            cwd=CHECKOUT,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm-256color"},
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self.raw = self.unread = self.drawn = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, expected: str) -> str:
        """What is shown up to and with `expected`."""
        deadline = time.monotonic() + PATIENCE_S
        while expected not in self.unread:
            ready, _, _ = select.select([self.master], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"waited for {expected!r}, and there is only {self.unread!r}"
            try:
                self.raw += os.read(self.master, 65536).decode(errors="replace")
            except OSError:
                raise AssertionError(f"waited for {expected!r}, the chat ended with {self.unread!r}") from None
            # The whole output again, because a sequence may arrive in two parts.
            self.unread = SEQUENCE.sub("", REDRAWN.sub("", self.raw))
        shown, _, self.unread = self.unread.partition(expected)
        self.drawn = self.raw
        self.raw = self.unread
        return shown + expected

    def say(self, text: str) -> str:
        """What the chat answers to a line, up to the next prompt."""
        self.type(f"{text}\n")
        return self.until(PROMPT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.hang_up()

    def hang_up(self) -> None:
        """Take the terminal away."""
        if self.master is not None:
            os.close(self.master)
        self.master = None


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # What a shell starts in the background ignores Ctrl-C, and so does all that it starts.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
