"""Clients of a server that speaks OpenAI's API: questions about documents, and when each token came."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class TimedAnswer:
    """One question: when it was sent, and when its tokens came, seconds of `time.perf_counter`.

    Attributes:
        text: the answer.
        prompt_tokens: of the prompt, as the server counts them.
        cached_tokens: of these, those that the server had already.
    """

    began: float
    times: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.began

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between two tokens."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def ask(address: str, prompt: str, tokens: int) -> TimedAnswer:
    """Ask for the continuation of a text, streamed; the answer has exactly so many tokens.

    Raises RuntimeError if the server answers otherwise.
    """
    place = urlsplit(address)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=3600)
    fields = {
        "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    answer = TimedAnswer(time.perf_counter())
    connection.request("POST", "/v1/completions", json.dumps(fields), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{address} answered {response.status}: {response.read(500)!r}")
    for line in response:
        if line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(f"{address}: {chunk['error']}")
            text = "".join(choice["text"] for choice in chunk.get("choices", ()))
            if text:
                answer.times.append(time.perf_counter())
                answer.text += text
            if usage := chunk.get("usage"):
                answer.prompt_tokens = usage["prompt_tokens"]
                answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    connection.close()
    return answer


def ask_all(address: str, prompts: Sequence[str], tokens: int) -> list[TimedAnswer]:
    """Ask all questions at the same time."""
    found: list[TimedAnswer | BaseException] = []

    def run(prompt: str) -> None:
        try:
            found.append(ask(address, prompt, tokens))
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=run, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return [each for each in found if isinstance(each, TimedAnswer)]
