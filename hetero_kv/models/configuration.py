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

from hetero_kv.models.boundary import as_model_error
from hetero_kv.models.config_contract import require_possible_config
from hetero_kv.models.gguf.architectures import architecture_of
from hetero_kv.models.gguf.config_from_file import adapt, configuration_of
from hetero_kv.models.gguf.file import GGUFFile
from hetero_kv.models.gguf.merged_tensors import separated
from hetero_kv.models.gguf.opening import Opening
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
    """The result of `model_config`, and the header of the GGUF file with the weights; None without such a file."""
    location = locate(name_or_path, gguf_path, progress)
    with open_gguf(location) as gguf, loading_errors(location):
        return config_of(location, gguf, trust_remote_code), gguf


def origin_of(location: Location) -> dict[str, Any]:
    """The arguments that tell transformers where configuration and tokenizer are."""
    if location.pretrained is not None:
        return {"pretrained_model_name_or_path": location.pretrained, "local_files_only": location.offline}
    assert location.gguf is not None
    return {"pretrained_model_name_or_path": str(location.gguf.parent), "gguf_file": location.gguf.name}


def config_of(location: Location, gguf: GGUFFile | None, trust_remote_code: bool) -> Any:
    """The configuration at a location.

    gguf: the file with the weights, from `open_gguf`; None without such a file.

    Raises:
        ModelError: the configuration is impossible, or contradicts the file.
    """
    if location.pretrained is not None:
        require_possible_config(location.pretrained, local_files_only=location.offline)
    if gguf is not None and location.pretrained is None:
        return configuration_of(gguf)
    config = AutoConfig.from_pretrained(**origin_of(location), trust_remote_code=trust_remote_code)
    if gguf is not None:
        adapt(config, gguf)
    return config


def loading_errors(location: Location) -> AbstractContextManager[None]:
    """Within this context, exceptions of transformers become ModelErrors that name the location."""
    return as_model_error(location.name, f"cannot be loaded from {str(location.gguf or location.pretrained)!r}")


@contextmanager
def open_gguf(location: Location, opening: Opening | None = None) -> Iterator[GGUFFile | None]:
    """The GGUF file of `location`, or None; within this context transformers logs nothing below an error.

    opening: what was kept of the file.
    """
    with ExitStack() as stack:
        fetching_from_hub = location.pretrained is not None and not Path(location.pretrained).expanduser().is_dir()
        stack.enter_context(nullcontext() if fetching_from_hub else _quiet())
        if location.gguf is None:
            yield None
            return
        file = GGUFFile.read(location.gguf) if opening is None else opening.file
        yield separated(file, architecture_of(file))


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
