"""Starts a server: loads its models, makes an engine for each recipe, and listens until a signal comes."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from hetero_kv.errors import ConfigError
from hetero_kv.loading import load_model, with_rules
from hetero_kv.models import DEFAULT_MODEL, LoadedModel
from hetero_kv.models.chat_template import thinking_variable
from hetero_kv.models.fetching import cache_home
from hetero_kv.planning.plan import beyond_training
from hetero_kv.rules.named_config import named_config
from hetero_kv.rules.setting_flags import settings_of
from hetero_kv.rules.settings_file import read_settings_file
from hetero_kv.rules.trust import trusted_modules
from hetero_kv.server.app import application
from hetero_kv.server.host import Host
from hetero_kv.server.keys import Keys
from hetero_kv.server.limits import Gate
from hetero_kv.server.served import ServedModel, ServedModels
from hetero_kv.server.settings import ServedContextSettings, ServerSettings
from hetero_kv.serving.engine import Engine
from hetero_kv.serving.sampling_settings import SamplingSettings
from hetero_kv.start_up import collection_deferred

_logger = logging.getLogger(__name__)
#: The largest head of a request, bytes.
_MOST_HEADERS = 64 * 1024


def serve(
    flags: argparse.Namespace, settings: ServerSettings, defaults: SamplingSettings, contexts: ServedContextSettings,
    keys: Keys,
) -> int:  # fmt: skip
    """Serve until SIGINT or SIGTERM; returns the exit status.

    Raises HeteroKVError for a mistake in the flags, a port in use, a model that cannot be loaded, or too little memory.
    """
    _log_to_standard_error()
    # Bound before the model is loaded: a port in use shows at once.
    listener = _listener(settings)
    try:
        with ExitStack() as engines:
            with collection_deferred():
                served = _served(flags, settings, contexts, engines)
            if defaults.thinks is not None:
                # Models without the switch are refused now, not told with every answer.
                for each in served:
                    thinking_variable(each.tokenizer)
            models = ServedModels(served, _aliases(flags.alias, served[0]))
            folder = (
                cache_home() / "files" if settings.file_folder == "auto" else Path(settings.file_folder).expanduser()
            )
            host = Host.of(models, settings, folder=folder, defaults=defaults, keys=keys)
            config = uvicorn.Config(
                application(host, origins=flags.allow_origin),
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=_MOST_HEADERS,
                http="h11",
                ws="none",
                timeout_keep_alive=30,
                # Answers end by themselves before.
                timeout_graceful_shutdown=round(settings.shutdown_s) + 10,
            )
            _announce(listener, models)
            _Server(config, host.stop_answers, settings.shutdown_s).run(sockets=[listener])
    finally:
        listener.close()
    return 0


class _Server(uvicorn.Server):
    """A server that a signal ends in order: answers get some time, and then the caller goes on.

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
        loop.call_soon_threadsafe(loop.call_later, seconds, self._stop)


def _log_to_standard_error() -> None:
    """A line for every request, and for what goes wrong."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    ours = logging.getLogger("hetero_kv")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False


def _listener(settings: ServerSettings) -> socket.socket:
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


def _served(
    flags: argparse.Namespace, settings: ServerSettings, contexts: ServedContextSettings, engines: ExitStack
) -> list[ServedModel]:
    """The model under every recipe of the flags, and the further models, with engines that `engines` closes."""
    model, gguf_path = flags.model or DEFAULT_MODEL, flags.gguf_path
    if flags.model is None and gguf_path is not None:
        model, gguf_path = gguf_path, None
    rules = {"trust_rules": trusted_modules(flags), "settings_file": read_settings_file(), **settings_of(flags)}
    loading = {"dtype": flags.dtype, "device": flags.device, "trust_remote_code": flags.trust_remote_code}

    def serve(loaded: LoadedModel, recipe: str) -> ServedModel:
        engine = engines.enter_context(Engine(loaded, **_engine_arguments(settings, contexts)))
        if warning := beyond_training(engine.max_seq_len, loaded.context_length):
            _logger.warning("%s: max_seq_len: %s", loaded.name, warning)
        gate = Gate(settings.max_batch, settings.queue_length, settings.queue_s)
        name = named_config(recipe, rules["trust_rules"]).name
        return ServedModel(loaded.name, name, loaded.tokenizer, loaded.context_length, engine, gate)

    first = load_model(model, gguf_path=gguf_path, config=flags.rules[0], **loading, **rules)
    served = [serve(first, flags.rules[0])]
    # The weights are not in memory a second time.
    served += [serve(with_rules(first, recipe, **rules), recipe) for recipe in flags.rules[1:]]
    for word in flags.also:
        name, _, recipe = word.partition("=")
        recipe = recipe or flags.rules[0]
        served.append(serve(load_model(name, config=recipe, **loading, **rules), recipe))
    return served


def _engine_arguments(settings: ServerSettings, contexts: ServedContextSettings) -> dict[str, Any]:
    """The arguments of engines that follow from the settings."""
    folder = cache_home() / "contexts" if contexts.context_folder == "auto" else contexts.context_folder
    return {
        "max_batch": settings.max_batch,
        "kept_prefixes": settings.kept_prefixes,
        "longest_gap_s": settings.longest_gap_s,
        "speculation": settings.speculation,
        "context_folder": None if contexts.context_cache == "off" else folder,
        "context_cache_gb": None if contexts.context_cache_gb == "all" else contexts.context_cache_gb,
        "context_local_gb": None if contexts.context_local_gb == "all" else contexts.context_local_gb,
        "context_wait_s": contexts.context_wait_s,
        "contexts_per_tenant": None if settings.contexts_per_key == "all" else settings.contexts_per_key,
    }


def _aliases(words: Sequence[str], first: ServedModel) -> Mapping[str, str]:
    """Other name -> name, from `--alias`."""
    aliases = {}
    for word in words:
        name, equals, target = word.partition("=")
        aliases[name] = target if equals else first.id
    return aliases


def _announce(listener: socket.socket, models: ServedModels) -> None:
    """Say where the server is, on standard error."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    names = ", ".join(f"{each.id} ({each.engine.max_seq_len:,} tokens)" for each in models.all)
    print(f"serving {names}\nOpenAI's API: http://{shown}:{port}/v1 · page: http://{shown}:{port}/", file=sys.stderr)
    sys.stderr.flush()
