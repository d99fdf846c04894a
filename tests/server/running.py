"""A server of a tiny model, in a thread of the tests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from hetero_kv import Engine
from hetero_kv.models.loading import LoadedModel
from hetero_kv.server.app import application
from hetero_kv.server.host import Host
from hetero_kv.server.keys import Keys
from hetero_kv.server.limits import Gate
from hetero_kv.server.served import ServedModel, ServedModels
from hetero_kv.server.settings import ServerSettings
from tests.support.small_recipes import injected, small_recipe
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizers import byte_level

CAPACITY = 800


def tiny_loaded(recipe: str = "dense", name: str = "tiny") -> LoadedModel:
    """A tiny model under a recipe, with a byte-level tokenizer and a chat template."""
    tokenizer = byte_level(add_prefix_space=False)
    model = tiny_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=CAPACITY)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    injected(model, small_recipe(recipe, max_seq_len=CAPACITY))
    return LoadedModel(model, tokenizer, name, CAPACITY)


def tiny_served(recipe: str = "dense", name: str = "tiny", **settings) -> ServedModel:
    """Such a model, and an engine with a thread."""
    return served_of(tiny_loaded(recipe, name), recipe, **settings)


def served_of(loaded: LoadedModel, recipe: str, **settings) -> ServedModel:
    """A loaded model under its recipe, and an engine with a thread."""
    # Guesses must not follow the machine's speed.
    engine = Engine(loaded, **{"max_seq_len": CAPACITY, "max_batch": 4, "speculation": "off", **settings})
    return ServedModel(loaded.name, recipe, loaded.tokenizer, CAPACITY, engine, Gate(4, 8, 30.0))


def host_of(*served: ServedModel, folder: Path, keys: tuple[str, ...] = (), **settings) -> Host:
    """What the routes share; `settings` are the server's."""
    return Host.of(ServedModels(served), ServerSettings(**settings), folder=folder, keys=Keys(keys))


@contextmanager
def running(host: Host, **arguments) -> Iterator[str]:
    """The address of a server that runs within this context: "http://127.0.0.1:…"."""
    with running_on_loop(host, **arguments) as (address, _):
        yield address


@contextmanager
def running_on_loop(host: Host, **arguments) -> Iterator[tuple[str, asyncio.AbstractEventLoop]]:
    """The address of a server that runs within this context, and its event loop."""
    config = uvicorn.Config(
        application(host, **arguments), port=0, log_config=None, access_log=False, timeout_graceful_shutdown=1
    )
    server, loops = uvicorn.Server(config), list[asyncio.AbstractEventLoop]()

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", loops[0]
    finally:
        server.should_exit = True
        thread.join(10)
