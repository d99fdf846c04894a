"""The chat in a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

from tests.chat.chat_server import CHECKOUT, ChatServer, ForkedChat
from tests.chat.own_terminal import take_terminal

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

    Args:
        folder: the model's.
        arguments: more of the command line.
        server: starts the chat by a fork; without it a new interpreter runs it.

    Attributes:
        drawn: what was shown last, with them.
    """

    def __init__(self, folder: Path, *arguments: object, server: ChatServer | None = None) -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (ROWS, COLUMNS))
        words = [str(word) for word in ("--model", folder, "--mode", "normal", "--dtype", "float32", *arguments)]
        environment = os.environ | {"TERM": "xterm-256color"}
        self.process: subprocess.Popen[bytes] | ForkedChat
        if server is not None:
            self.process = server.start(words, environment, slave)
        else:
            # A new session makes this the controlling terminal.
            self.process = subprocess.Popen(
                [sys.executable, "local_chat.py", *words],
                cwd=CHECKOUT,
                stdin=slave,
                stdout=slave,
                stderr=slave,
                start_new_session=True,
                env=environment,
                preexec_fn=take_terminal,
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
        self.process.wait(PATIENCE_S)
        self.hang_up()

    def hang_up(self) -> None:
        """Take the terminal away."""
        if self.master is not None:
            os.close(self.master)
        self.master = None
