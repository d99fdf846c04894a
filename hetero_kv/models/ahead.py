"""Begins to open a model while the process still imports what computes with it."""

from __future__ import annotations

import os
from pathlib import Path

from hetero_kv.models.fetching import places
from hetero_kv.models.gguf.opening import begin_opening
from hetero_kv.models.named import DEFAULT_MODEL, NAMED_MODELS


def begin(name_or_path: str | os.PathLike[str] | None, gguf_path: str | os.PathLike[str] | None = None) -> None:
    """Begin to read what was kept of the file of a model, if that is on this machine and has the tokenizer too.

    The arguments are those of `load_model`; without both it is the default model.
    """
    if name_or_path is not None and gguf_path is not None:
        return
    name = os.fspath(name_or_path or gguf_path or DEFAULT_MODEL)
    path = places(NAMED_MODELS[name])[0] if name in NAMED_MODELS else Path(name).expanduser()
    if path.suffix.lower() == ".gguf" and path.is_file():
        begin_opening(path)
