"""YAML, loaded safely, whose mappings remember the lines they came from, so that an error can point at them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from hetero_kv.errors import ConfigError


class LocatedMapping(dict[Any, Any]):
    """A mapping of a YAML document.

    Attributes:
        line: the line it begins on, counted from 1.
        key_lines: key -> the line that key stands on.
    """

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line
        self.key_lines: dict[Any, int] = {}


class _LocatedLoader(yaml.SafeLoader):
    """PyYAML's safe loader; a key that is given twice is an error, and mappings are `LocatedMapping`s."""


def _construct_mapping(loader: _LocatedLoader, node: yaml.MappingNode) -> Iterator[LocatedMapping]:
    mapping = LocatedMapping(node.start_mark.line + 1)
    yield mapping
    for key_node, _ in node.value:
        # A merge key (`<<`) may bring in keys that the mapping has too: that is what it is for.
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node)
        if key in mapping.key_lines:
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"the key {key!r} is given twice, first in line {mapping.key_lines[key]}; keep one of them",
                key_node.start_mark,
            )
        mapping.key_lines[key] = key_node.start_mark.line + 1
    mapping.update(loader.construct_mapping(node))


_LocatedLoader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def parse_yaml(text: str, source: str) -> Any:
    """The one document in `text`; `source` names it in errors.

    Raises:
        ConfigError: the text is not YAML, holds a tag that only an unsafe loader would follow, or gives a key twice;
            it names source, line and column.
    """
    try:
        return yaml.load(text, Loader=_LocatedLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = ": ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{source}{place}: {problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML: {error}") from error
    except (ValueError, RecursionError) as error:
        # Impossible dates and numbers, and nesting without end, leave PyYAML without a place.
        raise ConfigError(f"{source}: a value cannot be read: {error}") from error


def read_yaml(path: Path, source: str | None = None) -> Any:
    """The one document in the file at `path`, which errors call `source` (default: the path as given).

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or is not YAML (see `parse_yaml`).
    """
    source = source or str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    return parse_yaml(text, source)


def located(where: str, mapping: Mapping[Any, Any], key: Any = None) -> str:
    """`where`, with the line of `key` in `mapping`, or of the mapping itself, when it was read from YAML."""
    if not isinstance(mapping, LocatedMapping):
        return where
    return f"{where}, line {mapping.key_lines.get(key, mapping.line)}"
