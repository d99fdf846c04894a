"""A question: texts from files or a pipe, and a prompt about them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetero_kv.chat.options import ChatOptions
from hetero_kv.documents.reading import Document, document_in, piped_text
from hetero_kv.errors import ConfigError
from hetero_kv.models.turns import about

# The most characters of a prompt in a short form.
_SHORT = 60


@dataclass(frozen=True)
class ChatQuestion:
    """A message to the model; either part may be missing.

    Attributes:
        documents: the texts before the prompt.
        prompt: the user's question about them.
    """

    documents: tuple[Document, ...] = ()
    prompt: str | None = None

    def with_prompt(self, prompt: str) -> ChatQuestion:
        """The same documents with this prompt; "" for the documents alone."""
        return replace(self, prompt=prompt or None)

    @property
    def document(self) -> str | None:
        """The documents as one text, with each name above its text if there are several; None without documents."""
        if len(self.documents) > 1:
            return "\n\n".join(f"File: {each.name}\n\n{each.text.strip()}" for each in self.documents)
        return self.documents[0].text if self.documents else None

    @property
    def text(self) -> str:
        """The documents, a blank line, the prompt."""
        if self.document is None or self.prompt is None:
            return (self.document or "").rstrip("\n") + (self.prompt or "")
        return about(self.document, self.prompt)

    @property
    def in_short(self) -> str:
        """The documents' names and the prompt's first words, on one line."""
        words = " ".join((self.prompt or "")[: 4 * _SHORT].split())
        names = ", ".join(document.name for document in self.documents)
        prompt = f"{words[: _SHORT - 1]}…" if len(words) > _SHORT else words
        return " · ".join(part for part in (names, prompt) if part)


def question_of(options: ChatOptions, *, interactive: bool) -> ChatQuestion:
    """The question of the flags. Without a terminal and without a prompt, standard input is the prompt.

    Raises:
        ConfigError: a prompt file that cannot be read (`document_in`), or no question at all.
    """
    if options.prompt is not None and not options.prompt.strip():
        raise ConfigError("--prompt is empty; give a question")
    documents = tuple(document_in(path, "--prompt_file") for path in options.prompt_file)
    question = ChatQuestion(documents, options.prompt)
    if interactive or question.text:
        return question
    piped = piped_text()
    if not piped.strip():
        raise ConfigError(
            "there is no question, and no terminal to enter one; give --prompt or --prompt_file, or pipe one in"
        )
    return ChatQuestion(prompt=piped.strip())
