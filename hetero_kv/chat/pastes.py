"""Folds each long paste on the input line to one character, shown as "[pasted 2,000 lines]"."""

from __future__ import annotations

import re
from bisect import bisect_right

from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.layout.utils import explode_text_fragments

from hetero_kv.printing import marked

# A private-use plane of Unicode; a paste that contains such characters is folded whole.
_FIRST, _LAST = 0x100000, 0x10FFFD
_FOLDED = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")
#: A paste with more lines or characters is folded.
MOST_LINES, MOST_CHARACTERS = 8, 1000


class Pastes:
    """The folded texts of the input line and its history."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def folded(self, text: str) -> str:
        """A character that represents the text; a short text itself."""
        is_short = text.count("\n") < MOST_LINES and len(text) <= MOST_CHARACTERS and not _FOLDED.search(text)
        if is_short or _FIRST + len(self._texts) > _LAST:
            return text
        self._texts.append(text)
        return chr(_FIRST + len(self._texts) - 1)

    def unfolded(self, line: str) -> str:
        """The line with each folding character replaced by its text."""
        return _FOLDED.sub(lambda found: self._text(found[0]) or found[0], line)

    def label(self, character: str) -> str | None:
        """The label of a folded text; None for any other character."""
        text = self._text(character)
        if text is None:
            return None
        lines = text.rstrip("\n").count("\n") + 1
        return f"[pasted {lines:,} lines]" if lines > 1 else f"[pasted {len(text):,} characters]"

    def _text(self, character: str) -> str | None:
        number = ord(character) - _FIRST
        return self._texts[number] if 0 <= number < len(self._texts) else None


class ShownLine(Processor):
    """Shows labels for folded texts, and U+FFFD for characters that would control the terminal."""

    def __init__(self, pastes: Pastes) -> None:
        self._pastes = pastes

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        """The displayed line, and the mapping between its positions and the text's."""
        shown: StyleAndTextTuples = []
        places = [0]
        for style, character, *_ in explode_text_fragments(transformation_input.fragments):
            label = self._pastes.label(character)
            shown.append((style, marked(character)) if label is None else ("class:paste", label))
            places.append(places[-1] + len(label or character))

        def source_to_display(place: int) -> int:
            return places[place] if place < len(places) else places[-1] + place - len(places) + 1

        def display_to_source(place: int) -> int:
            return bisect_right(places, place) - 1

        return Transformation(shown, source_to_display, display_to_source)
