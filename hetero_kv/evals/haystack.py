"""The text that needles are hidden in, sentence by sentence, and the insertion of needles."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.checked_lines import parsed
from hetero_kv.evals.text_files import text_of

#: RULER's noise, repeated endlessly.
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

# RULER splits with nltk's punkt, whose model is a download; a needle only needs a place between two sentences.
# A sentence ends with its punctuation, and a closing quote or bracket, before white space. Titles and single initials
# end no sentence.
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9])")
_ABBREVIATION = re.compile(r"(?:^|[\s(])(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|[A-Z])\.$")


def sentences_of(text: str) -> list[str]:
    """The sentences of an English text, with each run of white space in them as a single space."""
    sentences: list[str] = []
    unfinished = ""
    start = 0
    for end in [*(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]:
        unfinished = f"{unfinished} {' '.join(text[start:end].split())}".strip()
        start = end
        if unfinished and not _ABBREVIATION.search(unfinished):
            sentences.append(unfinished)
            unfinished = ""
    return [*sentences, unfinished] if unfinished else sentences


class Haystack:
    """An endless text: it repeats from the beginning when its end is reached.

    Args:
        text: at least one sentence.
        name: its source, for reports.
        whole_sentences: whether `take` counts sentences; else it counts words and cuts the last sentence at the count,
            so that prompts of long sentences still hit their length.

    Attributes:
        text: the unchanged text.
        separator: the text between two sentences.

    Raises:
        HeteroKVError: a text without a sentence.
    """

    separator = " "

    def __init__(self, text: str, name: str, whole_sentences: bool = False) -> None:
        if not text.strip():
            raise HeteroKVError(f"haystack {name}: it holds no text; give a text file, or JSON with a 'text' field")
        self.name = name
        self.whole_sentences = whole_sentences
        self.text = text

    @classmethod
    def noise(cls) -> Haystack:
        """RULER's noise: the same five sentences again and again."""
        return cls(NOISE, name="noise", whole_sentences=True)

    @classmethod
    def from_file(cls, path: str | Path) -> Haystack:
        """The text of a file, or of all `.txt` files of a directory, in order of their names.

        A file is plain text, JSON with a `text` field, or JSON lines with one each; also as `.gz`.

        Raises:
            HeteroKVError: a file that cannot be read, or JSON without a text.
        """
        path = Path(path)
        if path.is_dir():
            parts = [text_of(file, "haystack") for file in sorted(path.glob("*.txt"))]
            if not parts:
                raise HeteroKVError(f"haystack {path}: the directory holds no .txt file")
            return cls("\n\n".join(parts), name=path.name)
        text = text_of(path, "haystack")
        suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
        if suffix in (".json", ".jsonl"):
            text = _text_field(text, path, lines=suffix == ".jsonl")
        return cls(text, name=path.name)

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """The text's sentences, in order."""
        return tuple(sentences_of(self.text))

    @cached_property
    def _units_before(self) -> list[int]:
        """The number of `take`'s units before each sentence, and in the whole text."""
        return [0, *accumulate(1 if self.whole_sentences else len(s.split()) for s in self.sentences)]

    def take(self, count: int) -> list[str]:
        """Sentences with `count` words, or `count` whole sentences, from the beginning."""
        repeats, rest = divmod(count, self._units_before[-1])
        whole = bisect_right(self._units_before, rest) - 1
        words_left = rest - self._units_before[whole]
        # End with a full stop, so that the following text starts a new sentence.
        cut = [" ".join(self.sentences[whole].split()[:words_left]).rstrip(",;:.") + "."] if words_left else []
        return [*(self.sentences * repeats), *self.sentences[:whole], *cut]


def position_at(sentences: Sequence[str], depth: float) -> int:
    """The index of the sentence before which `depth` per cent of the text lie; `len(sentences)` is the end.

    Depth counts characters, so that one long sentence does not shift it.

    Raises:
        HeteroKVError: a depth outside 0..100.
    """
    if not 0 <= depth <= 100:
        raise HeteroKVError(f"depth {depth:g}: it is per cent of the context; give 0 to 100")
    starts = [0, *accumulate(len(sentence) + 1 for sentence in sentences)]
    target = depth / 100 * starts[-1]
    after = bisect_left(starts, target)
    return after if after == 0 or starts[after] - target < target - starts[after - 1] else after - 1


def insert(sentences: Sequence[str], needles: Sequence[str], positions: Sequence[int]) -> list[str]:
    """The sentences with `needles[i]` before sentence `positions[i]`; needles at one position keep their order."""
    placed: list[str] = []
    done = 0
    for index in sorted(range(len(needles)), key=lambda i: positions[i]):
        placed += sentences[done : positions[index]]
        placed.append(needles[index])
        done = positions[index]
    return [*placed, *sentences[done:]]


def _text_field(text: str, path: Path, lines: bool) -> str:
    try:
        records = [parsed(line) for line in text.splitlines() if line.strip()] if lines else [parsed(text)]
    except ValueError as error:
        raise HeteroKVError(f"haystack {path}: not JSON: {error}") from error
    for record in records:
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise HeteroKVError(f"haystack {path}: JSON without a 'text' field of type string")
    return "\n\n".join(record["text"] for record in records)
