"""The state that all routes of a server share."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from hetero_kv.server.errors import ApiError, api_error
from hetero_kv.server.files import Files
from hetero_kv.server.generation import Answers, Ended, GenerationRequest, Source, Token
from hetero_kv.server.keys import Keys
from hetero_kv.server.limits import Rates
from hetero_kv.server.metrics import Metrics
from hetero_kv.server.recent_answers import RecentAnswers
from hetero_kv.server.served import ServedModels
from hetero_kv.server.settings import ServerSettings
from hetero_kv.server.stored_responses import StoredResponses
from hetero_kv.server.streaming import PING, ticking, while_connected
from hetero_kv.serving.sampling_settings import SamplingSettings
from hetero_kv.serving.stream import Progress

_logger = logging.getLogger(__name__)
T = TypeVar("T")
# How often a stream without tokens looks for progress to report, seconds.
_TICK_S = 0.5


@dataclass(frozen=True)
class Host:
    """A running server.

    Attributes:
        defaults: the sampling settings of requests without their own.
        rates: what a key may use in a minute: requests, tokens.
        active: answers that have not ended.
        uploads: bounds how many documents are read at a time.
    """

    models: ServedModels
    settings: ServerSettings
    defaults: SamplingSettings
    keys: Keys
    metrics: Metrics
    files: Files
    responses: StoredResponses
    recent: RecentAnswers
    rates: tuple[Rates, Rates]
    active: set[Answers] = field(default_factory=set)
    uploads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))

    @classmethod
    def of(
        cls, models: ServedModels, settings: ServerSettings, *, folder: Path,
        defaults: SamplingSettings | None = None, keys: Keys | None = None,
    ) -> Host:  # fmt: skip
        """A host with empty counts, whose uploads and responses lie in `folder`."""
        return cls(
            models=models,
            settings=settings,
            defaults=defaults or SamplingSettings(),
            keys=keys or Keys(),
            metrics=Metrics(lambda: models.all),
            files=Files(folder, round(settings.file_gb * 1e9)),
            responses=StoredResponses(folder / "responses", settings.kept_responses, round(settings.file_gb * 1e9)),
            recent=RecentAnswers(),
            rates=(Rates(settings.requests_per_minute, "requests"), Rates(settings.tokens_per_minute, "tokens")),
        )

    def answers(self, prompt: GenerationRequest, request: Request) -> Answers:
        """Queue a prompt. Raises ApiError as `Answers`."""
        if self.settings.log_prompts:
            decode = prompt.served.tokenizer.decode
            for tokens in prompt.prompts:
                _logger.info("request_id=%s prompt=%r", request.state.request_id, decode(tokens))
        return Answers(prompt, request.state.key, self.tenant(request), self.rates, self.metrics, self.active)

    def tenant(self, request: Request) -> str:
        """The tenant of a request's key, for `Engine.generate`; "" if keys share prefixes."""
        return "" if self.settings.share_prefixes else self.keys.tenant(request.state.key)

    def stop_answers(self) -> None:
        """End all answers, and refuse waiting requests, because the server stops."""
        for served in self.models.all:
            served.gate.stop()
        for answers in list(self.active):
            answers.stop()


def host_of(request: Request) -> Host:
    """The host of a request."""
    host: Host = request.app.state.host
    return host


async def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """The result of `work`, which may take long, computed outside of the event loop."""
    return await run_in_threadpool(work, *arguments)


class Writer(Protocol):
    """Writes answers as the events of one API."""

    def begin(self) -> list[bytes]:
        """The events before all tokens."""

    def progress(self, progress: Progress) -> list[bytes]:
        """The events of prefill progress; none if the client did not request them."""

    def token(self, token: Any) -> list[bytes]:
        """A token of an answer, as its source gives it."""

    def ended(self, ended: Any) -> list[bytes]:
        """The end of an answer, as its source gives it."""

    def finish(self, ended: list[Any]) -> list[bytes]:
        """The events after all answers; `ended` are their ends."""

    def failed(self, error: ApiError) -> list[bytes]:
        """The events of an error in the middle of the stream."""


class EventStream(StreamingResponse):
    """Answers as server-sent events. A client that goes away ends them."""

    def __init__(self, answers: Source, writer: Writer, ping_s: float, request: Request) -> None:
        self._answers = answers
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(_frames(answers, writer, ping_s, request), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See starlette."""
        # Also if the client is gone before the first frame.
        with self._answers:
            await super().__call__(scope, receive, send)


async def _frames(answers: Source, writer: Writer, ping_s: float, request: Request) -> AsyncIterator[bytes]:
    said, ended, has_begun = time.monotonic() - ping_s, list[Ended](), False
    try:
        if begun := writer.begin():
            yield b"".join(begun)
        async for item in ticking(answers.events(), _TICK_S):
            frames: list[bytes] = []
            if isinstance(item, Token):
                has_begun = True
                frames = writer.token(item)
            elif isinstance(item, Ended):
                ended.append(item)
                # In a thread, because it may store the response on the disk.
                frames = await in_thread(writer.ended, item)
            elif answers.progress is not None and not has_begun:
                frames = writer.progress(answers.progress)
            if not frames and time.monotonic() - said >= ping_s:
                frames = [PING]
            if frames:
                said = time.monotonic()
                yield b"".join(frames)
        ended.sort(key=lambda each: each.choice)
        note(request, ended)
        yield b"".join(writer.finish(ended))
    except Exception as error:
        yield b"".join(writer.failed(failure(error, request)))


async def completed(answers: Source, request: Request) -> list[Any]:
    """The ends of all answers of a request that is not streamed.

    Raises ClientGoneError if the client goes away, and the errors of the engine.
    """
    with answers:
        ended = await while_connected(request, answers.ended())
    note(request, ended)
    return ended


def failure(error: Exception, request: Request) -> ApiError:
    """An error for the client; the server's own bugs are logged."""
    found = api_error(error)
    if found.status >= 500:
        _logger.error("request_id=%s failed", request.state.request_id, exc_info=error)
    return found


def note(request: Request, ended: list[Ended]) -> None:
    """Add the counts of tokens to the request's line in the log; also the answers, if the server logs prompts."""
    if host_of(request).settings.log_prompts:
        for each in ended:
            _logger.info("request_id=%s answer=%r", request.state.request_id, each.completion.text)
    if ended:
        first = ended[0].completion
        request.scope["state"]["log"] = {
            "prompt_tokens": first.prompt_tokens,
            "cached_tokens": first.cached_tokens,
            "cache": first.reuse.reason,
            "answer_tokens": sum(len(each.completion.pieces) for each in ended),
            "first_token_s": f"{first.first_token_s or 0:.3f}",
        }


def response(body: Response, unknown: list[str]) -> Response:
    """A response whose header names the request's fields that have no effect."""
    if unknown:
        # Names come from the client, and a header holds printable ASCII only.
        body.headers["x-hetero-kv-ignored"] = re.sub(r"[^ -~]", "?", ",".join(unknown)[:1000])
    return body
