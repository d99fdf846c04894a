"""Loads YAML safely, within limits, into mappings that record line numbers for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from hetero_kv.errors import ConfigError, shown

# Limits on a file of rules or settings; packaged files stay below a hundredth of them. PyYAML takes about a second for
# a file at all of these limits.
MOST_BYTES = 256 << 10
MOST_DEPTH = 32
MOST_VALUES = 10_000
MOST_DIGITS = 40

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
# Numbers that PyYAML, by YAML 1.1, reads as text (1e-3) or in base 8, although users expect YAML 1.2.
_EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]{1,3}$")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")
# Exceptions that PyYAML's constructors raise for a value that does not fit its explicit tag.
_FOREIGN = (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError)


class LocatedMapping(dict[Any, Any]):
    """A mapping of a YAML document.

    Attributes:
        line: the line it begins on, counted from 1.
        key_lines: key -> its line.
    """

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line
        self.key_lines: dict[Any, int] = {}


class _LocatedLoader(yaml.SafeLoader):
    """PyYAML's safe loader with limits; it refuses duplicate keys, and its mappings are `LocatedMapping`s."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._nodes = 0
        # Complete node -> the number of nodes it expands to, counting an alias's nodes each time.
        self._expanded: dict[yaml.Node | None, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """See PyYAML. Raises ComposerError beyond a limit, before anything larger is built."""
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if node not in self._expanded:
                raise yaml.composer.ComposerError(None, None, "an alias refers to a value that contains it", mark)
            self._count(self._expanded[node], mark)
            return node
        self._count(1, mark)
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"nested more than {MOST_DEPTH} levels deep", mark)
        before = self._nodes
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._expanded[node] = 1 + self._nodes - before
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """See PyYAML. Raises ConstructorError, with the place, for a value that does not fit its tag."""
        try:
            if node.tag in (_INT, _FLOAT) and isinstance(node, yaml.ScalarNode):
                _check_number(node)
            return super().construct_object(node, deep)
        except _FOREIGN as error:
            kind = node.tag.rpartition(":")[2]
            reason = f": {error}" if isinstance(error, ValueError) else ""
            problem = f"a value cannot be read as {kind}{reason}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def _count(self, nodes: int, mark: yaml.Mark) -> None:
        self._nodes += nodes
        if self._nodes > MOST_VALUES:
            raise yaml.composer.ComposerError(
                None, None, f"more than {MOST_VALUES:,} values, counting those of aliases each time", mark
            )


def _check_number(node: yaml.Node) -> None:
    """Raise ValueError for a number that is too long, or that PyYAML would read in base 8 or 60."""
    text = node.value
    if len(text) > MOST_DIGITS:
        raise ValueError(f"it has {len(text):,} characters, and a number may have {MOST_DIGITS}")
    if ":" in text:
        raise ValueError(f"{text} would be a number in base 60; write it as text in quotes, or in base 10")
    if node.tag == _INT and _LEADING_ZERO.fullmatch(text):
        raise ValueError(f"{text} would be a number in base 8; write it without the leading 0")


def _construct_mapping(loader: _LocatedLoader, node: Any) -> Iterator[LocatedMapping]:
    mapping = LocatedMapping(node.start_mark.line + 1)
    yield mapping
    if not isinstance(node, yaml.MappingNode):
        raise yaml.constructor.ConstructorError(None, None, f"expected a mapping, found a {node.id}", node.start_mark)
    for key_node, _ in node.value:
        # A merge key (`<<`) may duplicate keys of the mapping: that is its purpose.
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node)
        if key in mapping.key_lines:
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"the key {shown(key)} appears twice, first in line {mapping.key_lines[key]}; keep one of them",
                key_node.start_mark,
            )
        mapping.key_lines[key] = key_node.start_mark.line + 1
    mapping.update(loader.construct_mapping(node))


_LocatedLoader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
_LocatedLoader.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+.0123456789"))


def parse_yaml(text: str, source: str) -> Any:
    """The single document in `text`; `source` names it in errors.

    Raises:
        ConfigError: the text is not YAML, exceeds a limit on length, depth or number of values, contains a tag that
            only an unsafe loader supports, or has a duplicate key; it names source, line and column.
    """
    if len(text) > MOST_BYTES:
        raise _too_long(source)
    # Callers may change what they get.
    return deepcopy(_parsed(text, source))


# A command reads the settings file several times, and PyYAML takes 10 ms for its comments.
@lru_cache(maxsize=4)
def _parsed(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_LocatedLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = ": ".join(part for part in (error.context, error.problem) if part)
        if "'\\t'" in problem:
            problem += "; indent with spaces"
        raise ConfigError(f"{source}{place}: {problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML: {error}") from error
    except _FOREIGN as error:
        # For values that PyYAML constructs last, such as one that contains itself, it reports no place.
        raise ConfigError(f"{source}: a value cannot be read: {error}") from error


def _too_long(source: str) -> ConfigError:
    return ConfigError(f"{source}: longer than {MOST_BYTES >> 10} KiB, the limit for rules and settings; shorten it")


def read_yaml(path: Path, source: str | None = None) -> Any:
    """The single document in the file at `path`, which errors call `source` (default: the path).

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or is not YAML (see `parse_yaml`).
    """
    source = source or str(path)
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        text = content[:MOST_BYTES].decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    if len(content) > MOST_BYTES:
        raise _too_long(source)
    return parse_yaml(text, source)


def located(where: str, mapping: Mapping[Any, Any], key: Any = None) -> str:
    """`where`, with the line of `key`, or of `mapping` itself, if the mapping is from YAML."""
    if not isinstance(mapping, LocatedMapping):
        return where
    return f"{where}, line {mapping.key_lines.get(key, mapping.line)}"
