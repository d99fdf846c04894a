"""Defines settings: dataclass fields with type, range, unit, aliases and meaning.

The checks of YAML files, the flags, the settings file and the documentation all derive from these fields, so a setting
is defined once. A class of settings is a frozen dataclass that inherits `Settings`:

    @dataclass(frozen=True)
    class WindowSettings(Settings):
        window: int = setting(4096, "tokens kept", unit="tokens", minimum=1)
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hetero_kv.errors import ConfigError, shown

Choices = Collection[str] | Callable[[], Iterable[str]]

LARGEST = 1 << 40
"""Maximum of a whole number whose setting has none: a trillion tokens exceed any machine's memory."""
LONGEST_LIST = 4096
_LONGEST_WORD = 200


class SettingError(ConfigError):
    """A setting with an invalid value: `key` is `value`, and `remedy` says what is valid."""

    def __init__(self, key: str, value: object, remedy: str) -> None:
        super().__init__(f"{key} is {shown(value)}; {remedy}")
        self.key, self.value, self.remedy = key, value, remedy


@dataclass(frozen=True)
class Constraints:
    """The declaration of a field; see `setting`."""

    doc: str
    unit: str | None
    choices: Choices | None
    minimum: float | None
    maximum: float | None
    multiple_of: int | None
    aliases: tuple[str, ...]
    formerly: tuple[str, ...]
    value_aliases: Mapping[str, str]
    names_method: str | None

    def allowed(self) -> tuple[str, ...]:
        """The allowed texts; () if any text is allowed."""
        return tuple(self.choices() if callable(self.choices) else self.choices or ())


def setting(
    default: Any,
    doc: str,
    *,
    unit: str | None = None,
    choices: Choices | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    multiple_of: int | None = None,
    aliases: Sequence[str] = (),
    formerly: Sequence[str] = (),
    value_aliases: Mapping[str, str] | None = None,
    names_method: str | None = None,
) -> Any:
    """A dataclass field that is a setting.

    Args:
        default: the default value; immutable.
        doc: its meaning, one line.
        unit: of a number, in the plural ("tokens").
        choices: the texts allowed, or a function that returns them, called when a value is checked, so that a
            registry may grow and is imported only when it is needed.
        minimum, maximum: inclusive, of a number.
        multiple_of: of a whole number.
        aliases: names that other programs use for the key.
        formerly: names that the key had, the oldest first. They still work (`former_names`); saved contexts and
            evaluation runs record the setting under the oldest.
        value_aliases: other names for values, as written -> as meant.
        names_method: for a value that distinguishes methods: its form in the method's name ("rank {}").
    """
    constraints = Constraints(
        doc,
        unit,
        choices,
        minimum,
        maximum,
        multiple_of,
        tuple(aliases),
        tuple(formerly),
        dict(value_aliases or {}),
        names_method,
    )
    return dataclasses.field(default=default, metadata={"constraints": constraints})


class Settings:
    """Base of the settings dataclasses: every instance has checked values.

    Texts with choices are accepted in any case, and stored as their definition spells them.

    Raises:
        SettingError: a value of the wrong type or out of range, or values that exclude each other.
    """

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for name, entry in entries_of(cls).items():
            object.__setattr__(self, name, entry.check(name, getattr(self, name)))
        self.validate()

    def validate(self) -> None:
        """Check settings against each other. Raises SettingError."""


@dataclass(frozen=True)
class Entry:
    """One setting of a class: its field name, declared type, default and constraints."""

    owner: type
    name: str
    annotation: Any
    default: Any
    constraints: Constraints

    def check(self, key: str, value: Any) -> Any:
        """`value` converted to its stored form. Raises SettingError, which calls the setting `key`."""
        meant = _same_text(value, self.constraints.value_aliases)
        value = self.constraints.value_aliases[meant] if meant is not None else value
        for alternative in _alternatives(self.annotation):
            if get_origin(alternative) is Literal:
                text = _same_text(value, get_args(alternative))
                if text is not None:
                    return text
            elif alternative is str and isinstance(value, str):
                if self.constraints.choices is None:
                    return value
                text = _same_text(value, self.constraints.allowed())
                if text is not None:
                    return text
            elif alternative is bool and isinstance(value, bool):
                return value
            elif alternative in (int, float) and _is_number(value, alternative) and self._in_range(value):
                return alternative(value)
            elif get_origin(alternative) is tuple and isinstance(value, (list, tuple)):
                if 0 < len(value) <= LONGEST_LIST and all(map(self._is_item, value)):
                    return tuple(value)
            elif hasattr(alternative, "parse"):
                parsed = alternative.parse(value) if isinstance(value, str) else value
                if isinstance(parsed, alternative):
                    return parsed
        raise SettingError(key, value, f"it must be {self.expected()}{self._hint(value)}")

    def _is_item(self, item: Any) -> bool:
        return _is_number(item, int) and self._in_range(item)

    def _in_range(self, number: float) -> bool:
        limits = self.constraints
        return (
            (limits.minimum is None or number >= limits.minimum)
            and number <= self._largest(number)
            and (limits.multiple_of is None or number % limits.multiple_of == 0)
        )

    def _largest(self, number: float) -> float:
        if self.constraints.maximum is not None:
            return self.constraints.maximum
        return LARGEST if isinstance(number, int) else math.inf

    def expected(self) -> str:
        """The valid values in words: "a whole number of at least 1, or auto"."""
        return ", or ".join(self._expected_of(alternative) for alternative in _alternatives(self.annotation))

    def _expected_of(self, alternative: Any) -> str:
        limits = self.constraints
        if get_origin(alternative) is Literal:
            return " or ".join(get_args(alternative))
        if alternative is bool:
            return "true or false"
        if get_origin(alternative) is tuple:
            return "a list of them, one per layer"
        if hasattr(alternative, "parse"):
            return alternative.expected
        if alternative is str:
            return "text" if limits.choices is None else " or ".join(limits.allowed())
        words = "a whole number" if alternative is int else "a number"
        if limits.multiple_of is not None:
            words += f" that is a multiple of {limits.multiple_of}"
        if limits.minimum is not None and limits.maximum is not None:
            return f"{words} from {limits.minimum} to {limits.maximum}"
        if limits.minimum is not None:
            return f"{words} of at least {limits.minimum}"
        return f"{words} of at most {limits.maximum}" if limits.maximum is not None else words

    def _hint(self, value: Any) -> str:
        if isinstance(value, (list, tuple)) and len(value) > LONGEST_LIST:
            return f" (this list has {len(value):,} items, and the limit is {LONGEST_LIST:,})"
        if self.constraints.maximum is None and any(
            isinstance(each, int) and each > LARGEST for each in _listed(value)
        ):
            return f" (and of at most {LARGEST:,})"
        if not isinstance(value, str):
            return ""
        for alternative in _alternatives(self.annotation):
            if alternative in (int, float):
                try:
                    number = alternative(value.replace("_", "").strip())
                except ValueError:
                    continue
                return f" (this is text: write {number} without quotes)" if self._in_range(number) else ""
        texts = [text for alternative in _alternatives(self.annotation) for text in self._texts(alternative)]
        return nearest_spelling(value, texts)

    def _texts(self, alternative: Any) -> tuple[str, ...]:
        if get_origin(alternative) is Literal:
            return get_args(alternative)
        return self.constraints.allowed() if alternative is str else ()


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _is_number(value: Any, kind: type) -> bool:
    # bool is an int to Python, never to a user; nan and inf cannot be compared with limits.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, int) or (kind is float and math.isfinite(value))


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _same_text(value: Any, texts: Iterable[str]) -> str | None:
    """The one of `texts` that equals `value` except for case; None if there is none."""
    if not isinstance(value, str):
        return None
    return next((text for text in texts if text.casefold() == value.strip().casefold()), None)


@functools.cache
def entries_of(cls: Any) -> dict[str, Entry]:
    """The settings of the dataclass `cls` by name, in the order of its fields."""
    hints = get_type_hints(cls)
    return {
        field.name: Entry(cls, field.name, hints[field.name], field.default, field.metadata["constraints"])
        for field in dataclasses.fields(cls)
        if "constraints" in field.metadata
    }


def entry_of(cls: type, key: str) -> Entry | None:
    """The setting of the dataclass `cls` whose name, alias or former name is `key`; None if there is none."""
    return _entries_by_key(cls).get(key)


@functools.cache
def _entries_by_key(cls: Any) -> dict[str, Entry]:
    entries = entries_of(cls).values()
    others = {key: each for each in entries for key in (*each.constraints.aliases, *each.constraints.formerly)}
    return others | entries_of(cls)


def nearest_spelling(word: object, spellings: Iterable[str], prefix: str = "; did you mean ") -> str:
    """`prefix` and the one of `spellings` nearest to `word`, or "" when none is near."""
    by_case = {spelling.casefold(): spelling for spelling in spellings}
    near = difflib.get_close_matches(str(word)[:_LONGEST_WORD].casefold(), by_case, n=1, cutoff=0.6)
    return f"{prefix}{by_case[near[0]]}?" if near else ""
