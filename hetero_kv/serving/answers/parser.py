"""Parses the pieces of an answer into thoughts, content and tool calls while they stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from hetero_kv.errors import HeteroKVError
from hetero_kv.models.templates import TemplateError, template_source
from hetero_kv.models.tool_definitions import Tools, read_tools
from hetero_kv.serving.answers.answer_format import THOUGHTS, AnswerFormat, format_of
from hetero_kv.serving.answers.call_grammar import JsonValue, lark_grammar
from hetero_kv.serving.answers.events import Event, joined
from hetero_kv.serving.answers.reader import Reader
from hetero_kv.serving.answers.writing import EventWriter

# The number of a prompt's last tokens that may contain the marker of an open thought.
_TOKENS_OF_MARKER = 16
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

ToolChoice = Literal["none", "auto", "required"] | Mapping[str, Any]


class _Piece(Protocol):
    @property
    def text(self) -> str: ...
    @property
    def marker(self) -> str: ...


class AnswerForm:
    """The format in which a model writes thoughts and tool calls.

    Args:
        tokenizer: a transformers tokenizer, whose chat template shows the format.
        name: the format of its tool calls, one of `format_names()`; None for the one that the template shows. If it
            shows none, a JSON object {"name": …, "parameters": …} that is the whole answer is a call.

    Attributes:
        name: the form of its tool calls.

    Raises HeteroKVError for an unknown name.
    """

    def __init__(self, tokenizer: Any, name: str | None = None) -> None:
        template = ""
        if tokenizer.chat_template:
            try:
                template = template_source(tokenizer, has_tools=True)
            except TemplateError:
                template = ""
        self._tokenizer = tokenizer
        self._format: type[AnswerFormat] = format_of(template, name)
        self._thought = next((pair for pair in THOUGHTS if pair[1] in template), THOUGHTS[-1])
        self._added: dict[str, int] = tokenizer.get_added_vocab()

    @property
    def name(self) -> str:
        """The form of its tool calls."""
        return self._format.name

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with the marker that begins a thought, so that the answer starts inside the thought."""
        end = self._tokenizer.decode(list(prompt[-_TOKENS_OF_MARKER:]), skip_special_tokens=False)
        return bool(end.rstrip().endswith(self._thought[0]))

    def parser(self, prompt: Sequence[int], tools: Tools | None = None) -> AnswerParser:
        """A parser for the answer to a prompt.

        Args:
            prompt: the prompt's tokens.
            tools: the functions that the model may call, in OpenAI's format; if there are none, or `tool_choice` is
                "none", nothing is a call.
        """
        schemas = {each["name"]: each.get("parameters") or _NO_PARAMETERS for each in read_tools(tools)}
        markers = (*self._thought, *self._format.all_markers(bool(schemas)))
        known = {marker: self._added[marker] for marker in markers if marker in self._added}
        return AnswerParser(self._format, known, schemas, self._thought, self.opens_thought(prompt))

    def call_grammar(
        self,
        prompt: Sequence[int],
        tools: Tools,
        tool_choice: ToolChoice = "required",
        *,
        is_parallel: bool = True,
        instead: Mapping[str, Any] | bool | None = None,
    ) -> str | None:
        """A grammar in llguidance's dialect of Lark that forces the answer to call a tool; None if it need not.

        The grammar writes control tokens by their ids. If the prompt opens a thought, the thought comes before the
        call.

        Args:
            prompt: the prompt's tokens.
            tools: in OpenAI's format.
            tool_choice: "none", "auto", "required", or {"type": "function", "function": {"name": …}}.
            is_parallel: whether several calls are allowed.
            instead: the schema of a JSON value that is an answer too; None if there must be a call.

        Raises HeteroKVError for an invalid choice, an unknown tool, or no tools at all.
        """
        schemas = {each["name"]: each.get("parameters") or _NO_PARAMETERS for each in read_tools(tools)}
        name = chosen_tool(tool_choice, list(schemas))
        if tool_choice in ("none", "auto"):
            return None
        names = list(schemas) if name is None else [name]
        form = self._format
        return lark_grammar(
            [form.call_parts(each, schemas[each]) for each in names],
            self._added,
            before=form.before,
            between=form.between if is_parallel else None,
            after=form.after,
            thought_end=self._thought[1] if self.opens_thought(prompt) else None,
            instead=None if instead is None else [JsonValue(instead)],
        )

    def value_grammar(self, prompt: Sequence[int], schema: Mapping[str, Any] | bool) -> str:
        """A grammar, as of `call_grammar`, for a JSON value that a schema allows, after an open thought."""
        end = self._thought[1] if self.opens_thought(prompt) else None
        return lark_grammar([[JsonValue(schema)]], self._added, thought_end=end)


def chosen_tool(tool_choice: ToolChoice, names: Sequence[str]) -> str | None:
    """The one tool that a `tool_choice` of OpenAI's API names; None if it names none.

    Raises HeteroKVError for an invalid choice, an unknown tool, or "required" without tools.
    """
    if tool_choice in ("none", "auto"):
        return None
    if tool_choice == "required":
        if not names:
            raise HeteroKVError("tool_choice is 'required', and there are no tools; give tools")
        return None
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise HeteroKVError(
            f"tool_choice is {tool_choice!r}; give 'none', 'auto', 'required', or "
            '{"type": "function", "function": {"name": …}}'
        )
    if name not in names:
        raise HeteroKVError(f"tool_choice names the tool {name!r}; there are {', '.join(names) or 'no tools'}")
    return name


class AnswerParser:
    """Reads one answer.

    With a marker, a call of a tool that the request lacks is still a call: a client answers it with an error that the
    model understands, while people would see markup. Without a marker it is content. Text after a marker that is no
    call is content, as the model wrote it. A call that turns out malformed after it has begun ends as invalid, and the
    text that follows is content.

    Attributes:
        markers: ids of control tokens and their texts; pass them to `Engine.generate`, which keeps them out of the
            text.
    """

    def __init__(
        self, form: type[AnswerFormat], markers: Mapping[str, int], tools: Mapping[str, Mapping[str, Any]],
        thought: tuple[str, str], opens_thought: bool,
    ) -> None:  # fmt: skip
        self.markers: dict[int, str] = {number: text for text, number in markers.items()}
        self._reader = Reader(markers)
        self._writer = EventWriter(self._reader, tools)
        self._reading = form(self._reader, self._writer, tools, thought, opens_thought).read()
        self._length = 0
        self._is_over = False

    def add(self, piece: _Piece) -> list[Event]:
        """Add a piece of the answer. Returns the events that became certain."""
        self._length += len(piece.text)
        self._reader.add(piece.text, piece.marker)
        return self._go_on()

    def end(self, text: str | None = None) -> list[Event]:
        """End the answer. Returns the remaining events.

        Args:
            text: the whole text of the answer, `Completion.text`; the pieces may lack its end.
        """
        if text is not None:
            self._reader.add(text[self._length :])
        self._reader.is_over = True
        return self._go_on()

    def _go_on(self) -> list[Event]:
        if not self._is_over:
            self._is_over = next(self._reading, self) is self
            if self._is_over:
                self._writer.close()
        events, self._writer.events = joined(self._writer.events), []
        return events
