"""Begins to open a model while the process still imports what computes with it."""

from __future__ import annotations

import os
from pathlib import Path

from hetero_kv.models.fetching import places
from hetero_kv.models.gguf.opening import begin_opening
from hetero_kv.models.named import DEFAULT_MODEL, NAMED_MODELS
from hetero_kv.models.packed_ahead import PACKED_AHEAD


def begin(
    name_or_path: str | os.PathLike[str] | None,
    gguf_path: str | os.PathLike[str] | None = None,
    *,
    most_bytes: int = 0,
) -> None:
    """Begin to read what was kept of the file of a model, if that is on this machine and has the tokenizer too.

    Args:
        name_or_path, gguf_path: as `load_model` takes them; without both it is the default model.
        most_bytes: of packed weights that are read as well; 0 for none.
    """
    if name_or_path is not None and gguf_path is not None:
        return
    name = os.fspath(name_or_path or gguf_path or DEFAULT_MODEL)
    path = places(NAMED_MODELS[name])[0] if name in NAMED_MODELS else Path(name).expanduser()
    if path.suffix.lower() == ".gguf" and path.is_file():
        PACKED_AHEAD.expect(most_bytes)
        begin_opening(path)
