"""Chat templates of foreign models, rendered under limits.

A template can run for ever or fill the memory in one expression (`"a" * 10**9`), and nothing in its own process could
stop it from every thread. So a process of its own renders it, `template_renderer.py`: it starts in a tenth of a second
when it is first needed, and lasts as long as this one.
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

#: Of processor time. Templates take milliseconds.
SECONDS = 2
# Beside what the interpreter and Jinja take: for the template, and how many times a conversation may lie in memory.
_MEMORY, _MEMORY_PER_BYTE = 128 << 20, 64
# What a template may add to a conversation, and how often it may repeat it.
_LONGEST, _LONGEST_PER_CHARACTER = 1 << 20, 4
_PROGRAM = Path(__file__).with_name("template_renderer.py")


class TemplateError(ModelError):
    """A chat template that cannot render a conversation; `reason` is what the template, or Jinja, says."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class TemplateLimitError(TemplateError):
    """A chat template that takes more time or memory, or writes more, than any needs."""


def rendered_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation, by the tokenizer's chat template.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        messages: of the conversation, each with its `role` and `content`.
        add_generation_prompt: whether the text ends with the beginning of an answer.
        variables: of the template, beside those that every one has.

    Raises:
        TemplateLimitError: see there.
        TemplateError: the template is faulty, or refuses such a conversation.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # several, and none is the one for conversations
        raise TemplateError(f"the model has no chat template for conversations: {error}", str(error)) from error
    given = {
        **(variables or {}),
        **tokenizer.special_tokens_map,
        "messages": [dict(message) for message in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    request = json.dumps({"template": template, "variables": given}, default=str)
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
            f"the model's chat template cannot render this conversation: {answer['error']}; leave out what it refuses "
            "(a system message?), or give a model with a sound template",
            answer["error"],
        )
    return answer["text"]


class _Renderer:
    """The process that renders, started when it is asked; one conversation at a time."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.lock = threading.Lock()

    def forget(self) -> None:
        """Leave the process to the one that this was forked from."""
        if self.process is not None:
            # Not to be waited for here.
            self.process.returncode = 0
            self._close_pipes(self.process)
        self.__init__()  # type: ignore[misc]

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
            except BaseException:  # Ctrl-C: its answer would be taken for the next one's
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
        """Let the process end, and its pipes."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self._close_pipes(self.process)
        self.process = None

    @staticmethod
    def _close_pipes(process: subprocess.Popen[str]) -> None:
        for pipe in (process.stdin, process.stdout):
            # What it was still to be told is of no use any more.
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def _running(self) -> subprocess.Popen[str]:
        if self.process is None or self.process.poll() is not None:
            self.end()
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-X", "utf8", str(_PROGRAM)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8",
                # Ctrl-C in a terminal goes to all of its processes.
                start_new_session=True,
            )  # fmt: skip
        return self.process


_RENDERER = _Renderer()
atexit.register(_RENDERER.end)
# A process that was forked has the pipes of the other one's renderer, and needs its own.
os.register_at_fork(after_in_child=_RENDERER.forget)
