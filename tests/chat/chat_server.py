"""Starts chats as forks of one process, which has imported what a chat imports.

The imports take far longer than all that a chat does in a test. The process that forks has imported and no more: no
other thread runs in it, and it has computed nothing.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pty
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil

from tests.chat.own_terminal import take_terminal

CHECKOUT = Path(__file__).parents[2]
IMPORTED = (
    "hetero_kv.adapter.loaded_weights",
    "hetero_kv.chat.command",
    "hetero_kv.chat.context_commands",
    "hetero_kv.chat.session",
    "hetero_kv.chat.terminal",
    "hetero_kv.operators",
    "transformers.models.llama.modeling_llama",
)
_LARGEST_MESSAGE = 1 << 17
_BETWEEN_LOOKS_S = 0.02


class ChatServer:
    """The process that forks, as tests see it."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Its streams are made for a terminal, as a chat's are.
        self._master, slave = pty.openpty()
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, cwd=CHECKOUT, pass_fds=[theirs.fileno()], stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)
        theirs.close()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], terminal: int) -> ForkedChat:
        """Start `local_chat.py` with these arguments in a session and a terminal of its own."""
        pid = self.ask({"arguments": arguments, "environment": dict(environment)}, terminal)
        return ForkedChat(pid, self)

    def ask(self, request: Mapping[str, Any], *descriptors: int) -> Any:
        """The answer to a request; the descriptors go with it."""
        try:
            socket.send_fds(self._requests, [json.dumps(request).encode()], descriptors)
            answer = self._requests.recv(_LARGEST_MESSAGE)
        except ConnectionError:
            answer = b""
        assert answer, f"the process that forks has ended with {os.read(self._master, _LARGEST_MESSAGE)!r}"
        return json.loads(answer)

    def close(self) -> None:
        self._requests.close()
        self._process.wait()
        os.close(self._master)


class ForkedChat:
    """A chat's process, with those methods of `Popen` that tests call."""

    def __init__(self, pid: int, server: ChatServer) -> None:
        self.pid, self._server = pid, server
        self._status: int | None = None

    def poll(self) -> int | None:
        """The exit status, if there is one."""
        if self._status is None:
            # Only this takes the status of a process that has ended; until then its number is no other's.
            self._status = self._server.ask({"status_of": self.pid})
        return self._status

    def wait(self, timeout: float) -> int:
        """The exit status, as soon as there is one."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            assert time.monotonic() < deadline, "the chat goes on"
            time.sleep(_BETWEEN_LOOKS_S)
        return status

    def send_signal(self, number: int) -> None:
        if self._status is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve(requests: socket.socket) -> None:
    before = set(os.environ)
    for name in IMPORTED:
        importlib.import_module(name)
    # Kernels of attention are compiled when a chat calls them, not all that its model may ever call.
    importlib.import_module("hetero_kv.rules.preparing").Preparation._attention_steps = lambda _: []
    set_by_imports = {name: value for name, value in os.environ.items() if name not in before}
    # Forks need not go through what was imported.
    gc.freeze()
    assert psutil.Process().num_threads() == 1
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, _LARGEST_MESSAGE, 1)
        if not message:
            return
        request = json.loads(message)
        if "status_of" in request:
            pid, status = os.waitpid(request["status_of"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            (terminal,) = descriptors
            answer = os.fork()
            if answer == 0:
                requests.close()
                _chat(request["arguments"], set_by_imports | request["environment"], terminal)
            os.close(terminal)
        requests.send(json.dumps(answer).encode())


def _chat(arguments: Sequence[str], environment: Mapping[str, str], terminal: int) -> NoReturn:
    """Be `local_chat.py`, as if this process had started with it; it ends as that does."""
    os.setsid()
    for stream in range(3):
        os.dup2(terminal, stream)
    os.close(terminal)
    take_terminal()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["local_chat.py", *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")
    raise AssertionError("local_chat.py exits")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as own_end:
        _serve(own_end)
