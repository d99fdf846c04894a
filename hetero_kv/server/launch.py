"""Starts a server: loads its models, creates an engine for each recipe, and listens until a signal comes."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import uvicorn

from hetero_kv.errors import ConfigError
from hetero_kv.server.app import application
from hetero_kv.server.plan import ServerPlan
from hetero_kv.server.settings import ServerSettings
from hetero_kv.start_up.collection import collection_deferred

_logger = logging.getLogger(__name__)
#: The largest head of a request, bytes.
_MOST_HEADERS = 64 * 1024


def serve(plan: ServerPlan) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit status.

    Raises HeteroKVError for a mistake in the flags, a port in use, a model that cannot be loaded, or too little memory.
    """
    log_to_standard_error()
    settings = plan.settings
    # Bound before the model is loaded, so that a port in use is an error at once.
    listener = bound(settings)
    try:
        with ExitStack() as engines:
            with collection_deferred():
                served = plan.models.load(settings, plan.contexts, engines)
            host = plan.host(served)
            config = uvicorn.Config(
                application(host, origins=plan.origins),
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=_MOST_HEADERS,
                http="h11",
                ws="none",
                timeout_keep_alive=30,
                # Answers have ended before.
                timeout_graceful_shutdown=round(settings.shutdown_s) + 10,
            )
            announce(listener.getsockname(), host.models.lengths)
            _Server(config, host.stop_answers, settings.shutdown_s).run(sockets=[listener])
    finally:
        listener.close()
    return 0


class _Server(uvicorn.Server):
    """A server that ends gracefully at a signal: answers get some time, then the caller continues.

    Args:
        stop: ends all answers.
        seconds: the time that they get.
    """

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None], seconds: float) -> None:
        super().__init__(config)
        self._stop, self._seconds = stop, seconds
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See uvicorn, which would raise the signal again, so that engines would not be closed."""
        self._loop = asyncio.get_running_loop()
        before = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn. A second Ctrl-C ends the answers at once."""
        loop, seconds = self._loop, 0.0 if self.should_exit else self._seconds
        assert loop is not None
        super().handle_exit(sig, frame)
        # Uvicorn would not even wait for the answers' last events.
        self.force_exit = False
        loop.call_soon_threadsafe(_logger.info, "%s", _stopping(seconds))
        loop.call_soon_threadsafe(loop.call_later, seconds, self._stop)


def _stopping(seconds: float) -> str:
    if not seconds:
        return "stopping: answers under way end now"
    return f"stopping: answers under way have {seconds:g} s to end; a second signal ends them at once"


def log_to_standard_error() -> None:
    """Log a line for every request and every error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    ours = logging.getLogger("hetero_kv")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False


def bound(settings: ServerSettings) -> socket.socket:
    """A socket that listens at the server's address. Raises ConfigError if it cannot."""
    try:
        family, *_, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Two servers that load at the same time would both be bound. Clients that connect now wait for the model.
        listener.listen()
    except OSError as error:
        raise ConfigError(
            f"the server cannot listen at {settings.host}:{settings.port} ({error.strerror}); give another --port "
            "(0 takes a free one) or --host"
        ) from error
    return listener


def announce(address: tuple[Any, ...], lengths: Mapping[str, int]) -> None:
    """Print the server's address, and the longest requests of its models, to standard error."""
    host, port = address[:2]
    shown = f"[{host}]" if ":" in host else host
    names = ", ".join(f"{name} ({tokens:,} tokens)" for name, tokens in lengths.items())
    print(f"serving {names}\nOpenAI's API: http://{shown}:{port}/v1 · page: http://{shown}:{port}/", file=sys.stderr)
    sys.stderr.flush()
