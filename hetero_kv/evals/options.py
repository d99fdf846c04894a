"""The options of a run other than its tasks and models."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hetero_kv.errors import ConfigError
from hetero_kv.evals.text_files import require_kept

DEFAULT_LENGTHS = (4096,)
DEFAULT_DEPTHS = (0.0, 25.0, 50.0, 75.0, 100.0)

_LENGTH = re.compile(r"(\d+(?:\.\d+)?)([km]?)", re.IGNORECASE)
# A comma outside brackets: no closing bracket follows before an opening one.
_BETWEEN_ITEMS = re.compile(r",(?![^(\[]*[)\]])")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_T = TypeVar("_T")


@dataclass(frozen=True)
class RunOptions:
    """The choice of a run's samples.

    Attributes:
        lengths: prompt lengths, tokens.
        depths: where answers are hidden, per cent of the context.
        samples: samples per length and depth.
        seed: the same seed gives the same samples.
        limit: the most samples of each task and data file; None for all.
        haystack: a text file that needles are hidden in; None for RULER's noise sentences.
        data: public data files, as published.
        prompt_files: the user's texts, for perplexity and fidelity.
        max_new_tokens: length of fidelity's continuations.
        prefill_tokens: how many tokens of a text perplexity prefills before it feeds the rest; None for 1,024, or
            half of a text that is shorter than 2,048.
        stride: how many tokens perplexity feeds at once.

    Raises:
        ConfigError: a value out of range.
    """

    lengths: tuple[int, ...] = DEFAULT_LENGTHS
    depths: tuple[float, ...] = DEFAULT_DEPTHS
    samples: int = 1
    seed: int = 0
    limit: int | None = None
    haystack: Path | None = None
    data: tuple[Path, ...] = ()
    prompt_files: tuple[Path, ...] = ()
    max_new_tokens: int = 64
    prefill_tokens: int | None = None
    stride: int = 1

    def __post_init__(self) -> None:
        for name in ("samples", "limit", "max_new_tokens", "stride"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be a whole number of at least 1")
        if self.prefill_tokens is not None and self.prefill_tokens < 2:
            raise ConfigError(f"prefill_tokens is {self.prefill_tokens}; it must be a whole number of at least 2")
        for length in self.lengths:
            if length < 1:
                raise ConfigError(f"lengths has {length}; a length is a number of tokens of at least 1")
        for depth in self.depths:
            if not 0 <= depth <= 100:
                raise ConfigError(f"depths has {depth:g}; a depth is per cent of the context, 0 to 100")
        for name in ("lengths", "depths"):
            if repeated := _repeated(getattr(self, name)):
                raise ConfigError(f"{name} has {repeated[0]:g} twice; keep one of them")
        for name, paths in (("haystack", (self.haystack,)), ("data", self.data), ("prompt_file", self.prompt_files)):
            for path in paths:
                if path is not None and not path.exists():
                    raise ConfigError(f"{name}: there is no file {str(path)!r}; give the path of one that exists")
                if path is not None:
                    require_kept(path, name)

    def described(self) -> dict[str, Any]:
        """The options as plain data, with a hash of each file's content, so that a changed file makes another run."""
        return {
            "lengths": list(self.lengths),
            "depths": list(self.depths),
            "samples": self.samples,
            "seed": self.seed,
            "limit": self.limit,
            "haystack": None if self.haystack is None else described_file(self.haystack),
            "data": [described_file(path) for path in self.data],
            "prompt_files": [described_file(path) for path in self.prompt_files],
            "max_new_tokens": self.max_new_tokens,
            "prefill_tokens": self.prefill_tokens,
            "stride": self.stride,
        }


def parse_length(text: str) -> int:
    """Tokens: `4096`, `4k` (4,096), `1.5K`, `1m` (1,048,576). Raises ConfigError for anything else."""
    found = _LENGTH.fullmatch(text.strip())
    tokens = float(found[1]) * _UNITS[found[2].lower()] if found else 0
    if tokens < 1 or tokens != int(tokens):
        raise ConfigError(f"lengths has {text!r}; a length is a number of tokens such as 4096, 4k (4,096) or 1m")
    return int(tokens)


def parse_depth(text: str) -> float:
    """Per cent of the context: `0` to `100`. Raises ConfigError for anything else."""
    try:
        depth = float(text)
    except ValueError:
        depth = -1.0
    if not 0 <= depth <= 100:
        raise ConfigError(f"depths has {text!r}; a depth is per cent of the context, 0 to 100")
    return depth


def parse_list(text: str, parse: Callable[[str], _T], flag: str) -> tuple[_T, ...]:
    """The items of a comma-separated list; commas within brackets separate no items.

    Raises ConfigError for an empty item.
    """
    items = [item.strip() for item in _BETWEEN_ITEMS.split(text)]
    if not all(items):
        raise ConfigError(f"{flag} is {text!r}; write one or more values with commas between them")
    return tuple(parse(item) for item in items)


def _repeated(values: Sequence[_T]) -> list[_T]:
    return [value for index, value in enumerate(values) if value in values[:index]]


def described_file(path: Path) -> dict[str, str]:
    """A file's name and a hash of its content; for a directory, of the content of its `.txt` files."""
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.txt")) if path.is_dir() else [path]:
        with open(file, "rb") as stream:
            while piece := stream.read(1 << 20):
                digest.update(piece)
    return {"name": path.name, "sha256": digest.hexdigest()}
