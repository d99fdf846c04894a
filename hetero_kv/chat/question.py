"""A question: texts from files or a pipe, and what is asked about them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetero_kv.chat.documents import Document, document_in, piped_text
from hetero_kv.chat.options import ChatOptions
from hetero_kv.errors import ConfigError
from hetero_kv.models.turns import about

# Characters of a question where it is only named.
_SHORT = 60


@dataclass(frozen=True)
class Question:
    """What is sent to the model; either part may be missing.

    Attributes:
        documents: what stands before it.
        prompt: what is asked about them.
    """

    documents: tuple[Document, ...] = ()
    prompt: str | None = None

    def with_prompt(self, prompt: str) -> Question:
        """The same documents with this question; "" for the documents alone."""
        return replace(self, prompt=prompt or None)

    @property
    def document(self) -> str | None:
        """The documents as one text, each with its name above it where there are several; None where there is none."""
        if len(self.documents) > 1:
            return "\n\n".join(f"File: {each.name}\n\n{each.text.strip()}" for each in self.documents)
        return self.documents[0].text if self.documents else None

    @property
    def text(self) -> str:
        """The documents, a blank line, the question."""
        if self.document is None or self.prompt is None:
            return (self.document or "").rstrip("\n") + (self.prompt or "")
        return about(self.document, self.prompt)

    @property
    def in_short(self) -> str:
        """The documents' names and the question's first words, on one line."""
        words = " ".join((self.prompt or "")[: 4 * _SHORT].split())
        names = ", ".join(document.name for document in self.documents)
        said = f"{words[: _SHORT - 1]}…" if len(words) > _SHORT else words
        return " · ".join(part for part in (names, said) if part)


def question_of(options: ChatOptions, *, interactive: bool) -> Question:
    """The question that the flags ask. Without a terminal and without a prompt it is read from standard input.

    Raises:
        ConfigError: a prompt file that cannot be read (`document_in`); or there is no question at all.
    """
    if options.prompt is not None and not options.prompt.strip():
        raise ConfigError("--prompt is empty; give a question")
    documents = tuple(document_in(path, "--prompt_file") for path in options.prompt_file)
    question = Question(documents, options.prompt)
    if interactive or question.text:
        return question
    piped = piped_text()
    if not piped.strip():
        raise ConfigError(
            "there is no question and no terminal to ask for one; give --prompt or --prompt_file, or pipe one in"
        )
    return Question(prompt=piped.strip())
