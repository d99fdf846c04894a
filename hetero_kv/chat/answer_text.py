"""An answer's thoughts and content, passed on as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hetero_kv.models.messages import END_OF_THOUGHT, THOUGHT
from hetero_kv.serving.answers import Content, Event, Reasoning


class AnswerText:
    """Collects an answer, and passes its pieces on.

    Args:
        on_text: called with each piece.
        on_thought: called with the pieces of thoughts, which `on_text` does not get then; None writes them into the
            text, between `<think>` and `</think>`.

    Attributes:
        text: all of it, thoughts between `<think>` and `</think>`.
        reasoning: the thoughts.
        content: the rest.
    """

    def __init__(
        self, on_text: Callable[[str], None] | None = None, on_thought: Callable[[str], None] | None = None
    ) -> None:
        self.text = self.reasoning = self.content = ""
        self._is_thought = False
        self._on_text, self._on_thought = on_text, on_thought

    def add(self, events: Iterable[Event]) -> None:
        """Append thoughts and content."""
        for event in events:
            if isinstance(event, Reasoning):
                self.reasoning += event.text
                self._write(event.text, is_thought=True)
            elif isinstance(event, Content):
                self.content += event.text
                self._write(event.text, is_thought=False)

    def _write(self, piece: str, *, is_thought: bool) -> None:
        sign = ""
        if is_thought != self._is_thought:
            sign = f"{THOUGHT}\n" if is_thought else f"\n{END_OF_THOUGHT}\n\n"
        self._is_thought = is_thought
        self.text += sign + piece
        if is_thought and self._on_thought is not None:
            self._on_thought(piece)
        elif self._on_text is not None:
            self._on_text(piece if self._on_thought is not None else sign + piece)
