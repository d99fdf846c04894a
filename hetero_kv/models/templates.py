"""Renders chat templates of foreign models under limits.

A template can run forever or fill the memory in one expression (`"a" * 10**9`), and its own process could not stop it
from every thread. A separate process, `template_renderer.py`, therefore renders it. It starts in a tenth of a second,
on first use or by `start_renderer`, and ends with this process.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetero_kv.models.errors import ModelError

#: Limit on processor time. Templates take milliseconds.
SECONDS = 2
# Memory beyond the interpreter's and Jinja's, bytes: a constant, and a factor for copies of the conversation.
_MEMORY, _MEMORY_PER_BYTE = 128 << 20, 64
# Limit on the output, characters: a constant, and a factor for repetitions of the conversation.
_LONGEST, _LONGEST_PER_CHARACTER = 1 << 20, 4
_PROGRAM = Path(__file__).with_name("template_renderer.py")


class TemplateError(ModelError):
    """A chat template that cannot render a conversation; `reason` is the message of the template or of Jinja."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class TemplateLimitError(TemplateError):
    """A chat template that exceeds the limit on time, memory or output."""


def start_renderer() -> None:
    """Start the process that renders templates, so that its first use does not wait for it."""
    _RENDERER.start()


def template_source(tokenizer: Any, *, has_tools: bool = False) -> str:
    """The tokenizer's chat template; of several, the one named "tool_use" where there are tools, or else "default".

    Raises TemplateError if there is none for conversations.
    """
    try:
        return str(tokenizer.get_chat_template(tools=[]) if has_tools else tokenizer.get_chat_template())
    except ValueError as error:  # several, and none is the one for conversations
        raise TemplateError(f"the model has no chat template for conversations: {error}", str(error)) from error


def template_variables(template: str) -> frozenset[str]:
    """The names of the variables that a chat template reads.

    Raises as `rendered_chat`.
    """
    return frozenset(json.loads(_answered({"template": template, "variables": None})))


def rendered_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
) -> str:
    """The text of a conversation, by the tokenizer's chat template.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        messages: the conversation's messages, each with `role` and `content`.
        add_generation_prompt: whether the text ends with the start of an answer.
        variables: variables of the template besides the standard ones.
        tools: the functions that the model may call, as the template has them; None for none.
        template: one of the tokenizer's templates; None for the one that `template_source` gives.

    Raises:
        TemplateLimitError: the template exceeds a limit.
        TemplateError: the template is faulty, or refuses the conversation.
    """
    if template is None:
        template = template_source(tokenizer, has_tools=tools is not None)
    context = {
        **(variables or {}),
        **tokenizer.special_tokens_map,
        "messages": [dict(message) for message in messages],
        "tools": None if tools is None else [dict(tool) for tool in tools],
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    return _answered({"template": template, "variables": context})


def _answered(question: Mapping[str, Any]) -> str:
    """The renderer's text for a template and its variables."""
    request = json.dumps(question, default=str)
    limits = {
        "seconds": SECONDS,
        "memory": _MEMORY + _MEMORY_PER_BYTE * len(request),
        "longest": _LONGEST + _LONGEST_PER_CHARACTER * len(request),
    }
    answer = _RENDERER.ask(f"{request[:-1]}, {json.dumps(limits)[1:]}")
    if "limit" in answer:
        raise TemplateLimitError(
            f"the model's chat template was stopped: {answer['limit']}; give a model with a sound template"
        )
    if "error" in answer:
        raise TemplateError(
            f"the model's chat template cannot render this conversation: {answer['error']}; leave out the part that it "
            "refuses, such as a system message, or give a model with a sound template",
            answer["error"],
        )
    return answer["text"]


class _Renderer:
    """The rendering process, started on first use; it renders one conversation at a time."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.lock = threading.Lock()

    def forget(self) -> None:
        """In a forked child, drop the process, which belongs to the parent."""
        if self.process is not None:
            # Marks it as ended, so that this process does not wait for it.
            self.process.returncode = 0
            self._close_pipes(self.process)
        self.__init__()  # type: ignore[misc]

    def start(self) -> None:
        with self.lock:
            self._running()

    def ask(self, request: str) -> dict[str, str]:
        with self.lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(request + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            except BaseException:  # Ctrl-C: the next request would read this one's answer
                self.end()
                raise
            if answer:
                return dict(json.loads(answer))
            ended = process.wait()
            self.end()
        if ended in (-signal.SIGXCPU, -signal.SIGKILL):
            return {"limit": f"it takes more than {SECONDS} s"}
        return {"error": f"the process that renders it ended with {ended}"}

    def end(self) -> None:
        """Kill the process, and close its pipes."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self._close_pipes(self.process)
        self.process = None

    @staticmethod
    def _close_pipes(process: subprocess.Popen[str]) -> None:
        for pipe in (process.stdin, process.stdout):
            # Unsent input is discarded.
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def _running(self) -> subprocess.Popen[str]:
        if self.process is None or self.process.poll() is not None:
            self.end()
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-X", "utf8", str(_PROGRAM)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8",
                # Ctrl-C in a terminal reaches all processes of the session.
                start_new_session=True,
            )  # fmt: skip
        return self.process


_RENDERER = _Renderer()
atexit.register(_RENDERER.end)
# A forked child inherits the pipes of the parent's renderer, and needs its own.
os.register_at_fork(after_in_child=_RENDERER.forget)
