"""What was found of patterns of a model's heads, in a file of the user's: tried once, and read from then on."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetero_kv.durable_file import write_atomically
from hetero_kv.errors import ConfigError
from hetero_kv.families.sparse_prefill.minference import KINDS, Pattern, Tried

#: Where files of patterns lie.
ENVIRONMENT_VARIABLE = "HETERO_KV_PREFILL_PATTERNS"
_FORMAT = 2
# Numbers of each tensor that a layer's weights are known by.
_SAMPLES = 64
_LARGEST_FILE = 16 << 20

_logger = logging.getLogger(__name__)


def folder() -> Path:
    """Where files of patterns lie: HETERO_KV_PREFILL_PATTERNS, or ~/.hetero_kv/prefill_patterns."""
    return Path(os.path.expanduser(os.environ.get(ENVIRONMENT_VARIABLE) or "~/.hetero_kv/prefill_patterns"))


def layer_key(layer: int, module: nn.Module, heads: int, settings: dict[str, Any]) -> str:
    """What a layer's patterns are known by: its number, its weights as they are kept, and what is tried."""
    seen = hashlib.sha256(json.dumps([layer, heads, settings], sort_keys=True).encode())
    packed = ((name, each) for name, each in module.named_buffers() if each.dtype is torch.uint8)
    for name, tensor in sorted([*module.named_parameters(), *packed]):
        seen.update(f"{name.replace('wrapped.', '')} {tensor.dtype} {list(tensor.shape)}\n".encode())
        if tensor.numel():
            flat = tensor.detach().flatten()
            sampled = flat[:: max(1, len(flat) // _SAMPLES)].cpu().contiguous()
            seen.update(sampled.view(torch.uint8).numpy().tobytes())
    return f"layer {layer} {seen.hexdigest()[:32]}"


class KnownPatterns:
    """The patterns of a model's layers.

    Args:
        model: how people know it; its file has that name.
    """

    def __init__(self, model: str) -> None:
        name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in model)
        self.path = folder() / f"{name}.json"

    def of_layer(self, key: str, heads: int) -> list[list[Tried]] | None:
        """What was found for a layer of so many heads; None where nothing was, or it cannot be read."""
        found = self._read().get(key)
        return None if found is None else _tried(found, heads)

    def add(self, key: str, tried: Sequence[Sequence[Tried]], tokens: int) -> None:
        """Keep what was found for a layer behind a context of so many tokens. What cannot be written is warned of."""
        layers = self._read()
        is_first = not layers
        layers[key] = {"tokens": tokens, "heads": [[_row(each) for each in head] for head in tried]}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps({"format": _FORMAT, "layers": layers}) + "\n")
        except OSError as error:
            _logger.warning("the prefill patterns of this model are searched again next time: %s", error)
            return
        if is_first:
            _logger.warning(
                "minference: patterns of this model's heads are found at %s tokens, and kept in %s; remove the file to "
                "have them found anew", f"{tokens:,}", self.path,
            )  # fmt: skip

    def _read(self) -> dict[str, Any]:
        try:
            if self.path.stat().st_size > _LARGEST_FILE:
                raise ConfigError(f"it has more than {_LARGEST_FILE:,} bytes")
            said = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, ConfigError, RecursionError) as error:
            _logger.warning("%s is no file of prefill patterns, and is written anew: %s", self.path, error)
            return {}
        layers = said.get("layers") if isinstance(said, dict) and said.get("format") == _FORMAT else None
        return layers if isinstance(layers, dict) else {}


def _row(tried: Tried) -> list[str | int | float]:
    pattern = tried.pattern
    return [pattern.kind, pattern.first, pattern.rest, float(f"{tried.error:.6g}"), float(f"{tried.tokens:.6g}")]


def _tried(said: object, heads: int) -> list[list[Tried]] | None:
    """What an entry says of each head; None where it is none."""
    rows = said.get("heads") if isinstance(said, dict) else None
    if not isinstance(rows, list) or len(rows) != heads:
        return None
    try:
        found = [[_tried_one(*row) for row in head] for head in rows]
    except (TypeError, ValueError):
        return None
    return found if all(found) else None


def _tried_one(kind: Any, first: Any, rest: Any, error: Any, tokens: Any) -> Tried:
    """What a row says; TypeError or ValueError where it says no pattern."""
    if kind not in KINDS or any(type(each) is not int or not 0 <= each < 1 << 31 for each in (first, rest)):
        raise ValueError("no pattern")
    if not all(type(each) in (int, float) and 0 <= each < math.inf for each in (error, tokens)):
        raise ValueError("no error and tokens")
    return Tried(Pattern(kind, first, rest), error, tokens)
