"""A text reader for streaming parsers, which are written as if the whole text were there."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping

#: A parser, which yields to wait for more text.
Reading = Generator[None, None, None]
# Decoders write no surrogates, so one represents a control token.
_FIRST_SURROGATE = 0xD800


class MalformedError(Exception):
    """The text does not have the format that the parser expects."""


class Reader:
    """The text that has arrived and is not yet read.

    Args:
        markers: texts of the tokenizer's control tokens. In the reader's text each is a single character that no other
            token produces.

    Attributes:
        is_over: whether no more text will arrive.
        taken: the text read since this was last emptied.
    """

    def __init__(self, markers: Mapping[str, int]) -> None:
        self._characters = {marker: chr(_FIRST_SURROGATE + number) for number, marker in enumerate(markers)}
        self._texts = {ord(character): marker for marker, character in self._characters.items()}
        self._buffer = ""
        self.is_over = False
        self.taken = ""

    def add(self, text: str, marker: str = "") -> None:
        """Append text, and the control token after it."""
        self._buffer += text + self._characters.get(marker, marker)

    def mark(self, text: str) -> str:
        """A marker as it appears in the text: its character if it is a control token, or else the marker itself."""
        return self._characters.get(text, text)

    def is_control(self, text: str) -> bool:
        """Whether a marker is a control token of the tokenizer."""
        return text in self._characters

    def plain(self, text: str) -> str:
        """A text that was read, with control tokens written as their texts."""
        return text.translate(self._texts)

    def take(self, length: int) -> str:
        """Read and return the next characters."""
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        self.taken += text
        return text

    @property
    def waiting(self) -> str:
        """The text that has arrived and is not read."""
        return self._buffer

    # -- parts of parsers

    def peek(self) -> Generator[None, None, str]:
        """The next character; "" at the end."""
        while not self._buffer and not self.is_over:
            yield
        return self._buffer[:1]

    def until(self, *ends: str, emit: Callable[[str], object]) -> Generator[None, None, str | None]:
        """Emit the text before the first of the ends as it becomes certain, then read that end.

        Returns the end; None if the answer ends before.
        """
        while True:
            places = [(place, -len(end), end) for end in ends if (place := self._buffer.find(end)) >= 0]
            # Of the ends that begin at one position, the longest; it may not have arrived completely.
            place, _, found = min(places, default=(len(self._buffer), 0, None))
            certain = place if self.is_over else min(place, len(self._buffer) - self._beginning(ends))
            if certain:
                emit(self.plain(self.take(certain)))
            if found is not None and certain == place:
                self.take(len(found))
                return found
            if self.is_over:
                return None
            yield

    def _beginning(self, ends: tuple[str, ...]) -> int:
        """How many of the last characters may be the beginning of one of the ends."""
        longest = max(map(len, ends), default=1) - 1
        for size in range(min(longest, len(self._buffer)), 0, -1):
            last = self._buffer[-size:]
            if any(len(end) > size and end.startswith(last) for end in ends):
                return size
        return 0

    def collected(self, *ends: str) -> Generator[None, None, tuple[str, str]]:
        """The text before the first of the ends, and that end.

        Raises MalformedError if the answer ends before.
        """
        parts: list[str] = []
        found = yield from self.until(*ends, emit=parts.append)
        if found is None:
            raise MalformedError
        return "".join(parts), found

    def accept(self, *texts: str) -> Generator[None, None, str]:
        """Read the longest of the texts that follows; "" if none does."""
        longest_first = sorted(texts, key=len, reverse=True)
        while True:
            for text in longest_first:
                if self._buffer.startswith(text):
                    self.take(len(text))
                    return text
                if text.startswith(self._buffer) and not self.is_over:
                    break
            else:
                return ""
            yield

    def expect(self, *texts: str) -> Generator[None, None, str]:
        """As `accept`. Raises MalformedError if none of the texts follows."""
        found = yield from self.accept(*texts)
        if not found:
            raise MalformedError
        return found

    def space(self) -> Generator[None, None, str]:
        """Read white space, if there is any."""
        space = ""
        while (yield from self.peek()) in (" ", "\t", "\r", "\n"):
            space += self.take(1)
        return space
