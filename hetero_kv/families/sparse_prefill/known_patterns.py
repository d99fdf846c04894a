"""Stores the patterns found for a model's heads in a file of the user's, so that they are searched only once."""

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
from hetero_kv.families.sparse_prefill.minference import KINDS, MeasuredPattern, Pattern

#: Overrides the folder of pattern files.
ENVIRONMENT_VARIABLE = "HETERO_KV_PREFILL_PATTERNS"
_FORMAT = 2
# Numbers sampled from each tensor to identify a layer's weights.
_SAMPLES = 64
_LARGEST_FILE = 16 << 20

_logger = logging.getLogger(__name__)


def folder() -> Path:
    """The folder of pattern files: HETERO_KV_PREFILL_PATTERNS, or ~/.hetero_kv/prefill_patterns."""
    return Path(os.path.expanduser(os.environ.get(ENVIRONMENT_VARIABLE) or "~/.hetero_kv/prefill_patterns"))


def layer_key(layer: int, module: nn.Module, heads: int, settings: dict[str, Any]) -> str:
    """Identifies a layer's patterns: its number, a hash of its weights as stored, and the settings of the search."""
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
        model: a readable name of the model, from which the file's name is made.
    """

    def __init__(self, model: str) -> None:
        name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in model)
        self.path = folder() / f"{name}.json"

    def of_layer(self, key: str, heads: int) -> list[list[MeasuredPattern]] | None:
        """The patterns found for a layer of `heads` heads; None if there are none, or the file cannot be read."""
        found = self._read().get(key)
        return None if found is None else _tried(found, heads)

    def add(self, key: str, tried: Sequence[Sequence[MeasuredPattern]], tokens: int) -> None:
        """Store the patterns found for a layer in a context of `tokens` tokens. Logs a warning if that fails."""
        layers = self._read()
        is_first = not layers
        layers[key] = {"tokens": tokens, "heads": [[_row(each) for each in head] for head in tried]}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps({"format": _FORMAT, "layers": layers}) + "\n")
        except OSError as error:
            _logger.warning("the prefill patterns of this model cannot be saved, and will be searched again: %s", error)
            return
        if is_first:
            _logger.warning(
                "minference: patterns of this model's heads are found at %s tokens, and saved in %s; remove the file "
                "to search again", f"{tokens:,}", self.path,
            )  # fmt: skip

    def _read(self) -> dict[str, Any]:
        try:
            if self.path.stat().st_size > _LARGEST_FILE:
                raise ConfigError(f"it has more than {_LARGEST_FILE:,} bytes")
            content = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, ConfigError, RecursionError) as error:
            _logger.warning("%s is not a file of prefill patterns, and will be overwritten: %s", self.path, error)
            return {}
        layers = content.get("layers") if isinstance(content, dict) and content.get("format") == _FORMAT else None
        return layers if isinstance(layers, dict) else {}


def _row(tried: MeasuredPattern) -> list[str | int | float]:
    pattern = tried.pattern
    return [pattern.kind, pattern.first, pattern.rest, float(f"{tried.error:.6g}"), float(f"{tried.tokens:.6g}")]


def _tried(entry: object, heads: int) -> list[list[MeasuredPattern]] | None:
    """Parse an entry: each head's patterns. Returns None for an invalid entry."""
    rows = entry.get("heads") if isinstance(entry, dict) else None
    if not isinstance(rows, list) or len(rows) != heads:
        return None
    try:
        found = [[_tried_one(*row) for row in head] for head in rows]
    except (TypeError, ValueError):
        return None
    return found if all(found) else None


def _tried_one(kind: Any, first: Any, rest: Any, error: Any, tokens: Any) -> MeasuredPattern:
    """Parse one row. Raises TypeError or ValueError for an invalid one."""
    if kind not in KINDS or any(type(each) is not int or not 0 <= each < 1 << 31 for each in (first, rest)):
        raise ValueError("no pattern")
    if not all(type(each) in (int, float) and 0 <= each < math.inf for each in (error, tokens)):
        raise ValueError("no error and tokens")
    return MeasuredPattern(Pattern(kind, first, rest), error, tokens)
