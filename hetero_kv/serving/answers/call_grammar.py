"""Grammars for llguidance that force a model to call one of its tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Marker:
    """A control token if the tokenizer has it, or else its text."""

    text: str


@dataclass(frozen=True)
class JsonValue:
    """A JSON value that a schema allows."""

    schema: Mapping[str, Any] | bool


@dataclass(frozen=True)
class FreeText:
    """Any text, up to and including an end."""

    end: str | Marker


@dataclass(frozen=True)
class Maybe:
    """Optional parts."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class OneOf:
    """One of several texts."""

    texts: tuple[str, ...]


Part = str | Marker | JsonValue | FreeText | Maybe | OneOf


def typed_parts(
    schema: Mapping[str, Any], opened: Callable[[str], Sequence[Part]], closed: str | Marker, after: str = ""
) -> list[Part]:
    """An object's values one by one, in the order of its schema: texts as they are, others as JSON.

    Args:
        schema: the object's.
        opened: the parts before the value of a key.
        closed: the text that ends a value.
        after: the parts after that text.
    """
    parts: list[Part] = []
    last = (after,) if after else ()
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for key, value in (schema.get("properties") or {}).items():
        is_text = isinstance(value, Mapping) and value.get("type") == "string" and "enum" not in value
        texts = value.get("enum") if isinstance(value, Mapping) and value.get("type") == "string" else None
        within: tuple[Part, ...] = (
            JsonValue({**value, **definitions} if isinstance(value, Mapping) else {}),
            closed,
            *last,
        )
        if texts:
            within = (OneOf(tuple(map(str, texts))), closed, *last)
        elif is_text:
            within = (FreeText(closed), *last)
        one = (*opened(key), *within)
        parts += one if key in (schema.get("required") or ()) else [Maybe(one)]
    return parts


def lark_grammar(
    calls: Sequence[Sequence[Part]], markers: Mapping[str, int], *, before: Sequence[Part] = (),
    between: Sequence[Part] | None = None, after: Sequence[Part] = (), thought_end: str | None = None,
    instead: Sequence[Part] | None = None,
) -> str:  # fmt: skip
    """A grammar in llguidance's dialect of Lark for one of the calls, or several.

    Args:
        calls: the parts of each call.
        markers: texts of the tokenizer's control tokens -> their ids.
        before, after: the parts before and after all calls.
        between: the parts between two calls; None for a single call.
        thought_end: the text that ends a thought before the calls; None without a thought.
        instead: the parts of an answer without calls; None if it must have one.
    """
    written = _Grammar(markers)
    call = " | ".join(f"call_{number}" for number in range(len(calls)))
    more = f" ({written.parts(between)} call)*" if between is not None else ""
    thought = "" if thought_end is None else f"{written.part(FreeText(Marker(thought_end)))} /[\\n]*/ "
    other = "" if instead is None else f" | {written.parts(instead)}"
    rules = [
        f"start: {thought}(calls{other})",
        f"calls: {written.parts(before)} call{more} {written.parts(after)}".rstrip(),
        f"call: {call}",
    ]
    rules += [f"call_{number}: {written.parts(parts)}" for number, parts in enumerate(calls)]
    return "\n".join([*rules, *written.rules, ""])


class _Grammar:
    """Collects the grammar rules of parts."""

    def __init__(self, markers: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._markers = markers

    def parts(self, parts: Sequence[Part]) -> str:
        return " ".join(self.part(part) for part in parts)

    def part(self, part: Part) -> str:
        if isinstance(part, Marker):
            number = self._markers.get(part.text)
            return self.part(part.text) if number is None else f"<[{number}]>"
        if isinstance(part, str):
            return json.dumps(part, ensure_ascii=False)
        if isinstance(part, JsonValue):
            return self._rule("json", f"%json {json.dumps(part.schema)}")
        if isinstance(part, FreeText):
            if isinstance(part.end, Marker):
                if part.end.text in self._markers:
                    return f"/(?s:.*)/ {self.part(part.end)}"
                return self.part(FreeText(part.end.text))
            return self._rule("text", "/(?s:.*)/", f"[suffix={json.dumps(part.end, ensure_ascii=False)}]")
        if isinstance(part, OneOf):
            return f"({' | '.join(map(self.part, part.texts))})"
        return f"({self.parts(part.parts)})?"

    def _rule(self, kind: str, body: str, attributes: str = "") -> str:
        name = f"{kind}_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name
