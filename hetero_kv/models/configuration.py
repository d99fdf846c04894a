"""A model's configuration, from a directory, the hub or a GGUF file, without its weights."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig

from hetero_kv.models.boundary import refusals
from hetero_kv.models.config_contract import require_possible_config
from hetero_kv.models.gguf.file import GGUFFile
from hetero_kv.models.gguf.settings import adapt, configuration_of
from hetero_kv.models.locating import Location, locate
from hetero_kv.models.named import DEFAULT_MODEL
from hetero_kv.models.progress import ProgressReport


def model_config(
    name_or_path: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    gguf_path: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    progress: ProgressReport | None = None,
) -> Any:
    """The transformers configuration of a model, without its weights; the arguments are those of `load_model`.

    Raises:
        ModelError: the model cannot be found or fetched, or its configuration cannot be read.
    """
    config, _ = config_and_header(
        name_or_path, gguf_path=gguf_path, trust_remote_code=trust_remote_code, progress=progress
    )
    return config


def config_and_header(
    name_or_path: str | os.PathLike[str],
    *,
    gguf_path: str | os.PathLike[str] | None,
    trust_remote_code: bool,
    progress: ProgressReport | None = None,
) -> tuple[Any, GGUFFile | None]:
    """What `model_config` gives, and the header of the GGUF file that the weights are in; None where there is none."""
    location = locate(name_or_path, gguf_path, progress)
    with reading(location) as gguf, refusing(location):
        return config_of(location, gguf, trust_remote_code), gguf


def origin_of(location: Location) -> dict[str, Any]:
    """The arguments that tell transformers where configuration and tokenizer are."""
    if location.pretrained is not None:
        return {"pretrained_model_name_or_path": location.pretrained, "local_files_only": location.offline}
    assert location.gguf is not None
    return {"pretrained_model_name_or_path": str(location.gguf.parent), "gguf_file": location.gguf.name}


def config_of(location: Location, gguf: GGUFFile | None, trust_remote_code: bool) -> Any:
    """The configuration at a location; gguf: the file of the weights, within `reading`, where they are in one.

    Raises:
        ModelError: it is not possible, or does not say what the file's weights need.
    """
    if location.pretrained is not None:
        require_possible_config(location.pretrained, local_files_only=location.offline)
    if gguf is not None and location.pretrained is None:
        return configuration_of(gguf)
    config = AutoConfig.from_pretrained(**origin_of(location), trust_remote_code=trust_remote_code)
    if gguf is not None:
        adapt(config, gguf)
    return config


def refusing(location: Location) -> AbstractContextManager[None]:
    """Within this context what transformers raises of a location is a ModelError that names it."""
    return refusals(location.name, f"cannot be loaded from {str(location.gguf or location.pretrained)!r}")


@contextmanager
def reading(location: Location) -> Iterator[GGUFFile | None]:
    """The GGUF file of `location`, or None; transformers keeps quiet meanwhile."""
    with ExitStack() as stack:
        fetching_from_hub = location.pretrained is not None and not Path(location.pretrained).expanduser().is_dir()
        stack.enter_context(nullcontext() if fetching_from_hub else _quiet())
        if location.gguf is None:
            yield None
            return
        yield GGUFFile.read(location.gguf)


@contextmanager
def _quiet() -> Iterator[None]:
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
