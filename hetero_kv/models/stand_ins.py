"""Stand-ins for the texts of a conversation, which a chat template renders in their place."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable
from typing import NamedTuple

from hetero_kv.models.text_encoding import PromptPiece

# Characters that templates are known to change in a text: quotes, entities, line ends, letters of either case.
_SAMPLE = " 'Aé\"<&>\\\n{}| "
# White space that no template writes; it shows whether the template strips a text's white space.
_SPACE = "\u2003"
_DIGITS = 6
# Not hexadecimal digits, of which the other stand-ins consist.
_LETTERS = string.ascii_lowercase[6:]


def _as_json(ensure_ascii: bool) -> Callable[[str], str]:
    return lambda text: json.dumps(text, ensure_ascii=ensure_ascii)[1:-1]


def _twice(outer: Callable[[str], str], inner: Callable[[str], str]) -> Callable[[str], str]:
    return lambda text: outer(inner(text))


def _as_is(text: str) -> str:
    return text


_JSON = tuple(_as_json(ensure_ascii) for ensure_ascii in (False, True))
#: How templates write a text: as it is, within a JSON text, or within a JSON text in a JSON text.
_ALL_FORMS = (_as_is, *_JSON, *(_twice(outer, inner) for inner in _JSON for outer in _JSON))
_FORMS = {form(_SAMPLE): form for form in _ALL_FORMS}
_SPACES = "|".join({re.escape(form(_SPACE)): None for form in _FORMS.values()})


class Shown(NamedTuple):
    """A piece of a prompt, and the stand-in that it replaces.

    Attributes:
        piece: the text.
        stand_in: "" for the template's own text.
        is_python: whether the template writes the text as Python prints it within a list or mapping.
    """

    piece: PromptPiece
    stand_in: str = ""
    is_python: bool = False


class StandIns:
    """Random texts that replace those of a conversation while its template is rendered.

    Where a template writes a text by `tojson`, or prints the list or mapping that has it, the text is escaped likewise.
    Where it strips white space around a text, the text's is stripped too.

    Args:
        names: texts that may be compared or sorted, as the keys of a mapping are, each with the number of the mapping
            (0 for those that are compared across mappings). Each gets one stand-in, and these compare and sort as the
            texts do, regardless of case, then by code points.
        others: text in which the stand-ins must not occur: the template and its variables.
    """

    def __init__(self, names: Iterable[tuple[str, int]], others: str) -> None:
        self._key = secrets.token_hex(8)
        self._identifier_key = ""
        while not self._identifier_key or self._identifier_key in others.casefold():
            self._identifier_key = "".join(secrets.choice(_LETTERS) for _ in range(5))
        in_order = sorted(set(names), key=lambda name: (name[0].lower(), *name))
        self._texts = [text for text, _ in in_order]
        self._names = {name: self._numbered(number) for number, name in enumerate(in_order)}
        self._identifiers: dict[str, str] = {}
        samples = "|".join(map(re.escape, _FORMS))
        python = re.escape(repr(_SAMPLE)[1:-1])
        space = re.escape(repr(_SPACE)[1:-1])
        key = self._key
        self._found = re.compile(
            rf"(?P<before>{_SPACES})?{key}-(?P<number>\d{{{_DIGITS},}})(?P<sample>{samples})(?P=number)-{key}"
            rf"(?P<behind>{_SPACES})?"
            rf"|'{space}{key}-(?P<printed>\d{{{_DIGITS},}}){python}(?P=printed)-{key}{space}'"
            rf"|{self._identifier_key}(?P<identifier>\d{{4,}})"
        )

    def text(self, text: str) -> str:
        """A stand-in for a text alone. An empty text is its own: templates ask whether there is one."""
        if not text:
            return ""
        self._texts.append(text)
        return self._numbered(len(self._texts) - 1)

    def name(self, text: str, mapping: int = 0) -> str:
        """The stand-in of one of the names."""
        return self._names[text, mapping] if text else ""

    def identifier(self, text: str) -> str:
        """A stand-in of nine letters and digits, as some templates require of the ids of tool calls."""
        if text not in self._identifiers:
            self._identifiers[text] = f"{self._identifier_key}{len(self._identifiers):04}"
        return self._identifiers[text]

    def _numbered(self, number: int) -> str:
        digits = f"{number:0{_DIGITS}}"
        return f"{_SPACE}{self._key}-{digits}{_SAMPLE}{digits}-{self._key}{_SPACE}"

    def replaced(self, rendering: str) -> list[Shown] | None:
        """The pieces of a rendering, texts in the places of their stand-ins; the template's own first and last.

        Returns None where the template changes a stand-in.
        """
        identifiers = list(self._identifiers)
        shown: list[Shown] = []
        end = 0
        for match in self._found.finditer(rendering):
            shown.append(Shown(PromptPiece(rendering[end : match.start()], is_template=True)))
            end = match.end()
            if match["identifier"]:
                place = int(match["identifier"])
                if place >= len(identifiers):
                    return None
                shown.append(Shown(PromptPiece(identifiers[place]), match[0]))
                continue
            number = int(match["number"] or match["printed"])
            if number >= len(self._texts):
                return None
            text = self._texts[number]
            if match["printed"]:
                text = repr(text)
            else:
                text = text if match["before"] else text.lstrip()
                text = _FORMS[match["sample"]](text if match["behind"] else text.rstrip())
            shown.append(Shown(PromptPiece(text), self._numbered(number), bool(match["printed"])))
        shown.append(Shown(PromptPiece(rendering[end:], is_template=True)))
        keys = self._key, self._identifier_key
        if any(key in written.content.casefold() for written, _, _ in shown[::2] for key in keys):
            return None
        return shown
