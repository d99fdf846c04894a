"""The answers to one request: queued, computed, and passed on as they come."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from hetero_kv.server.errors import ApiError
from hetero_kv.server.limits import Rates, Ticket, stopping
from hetero_kv.server.metrics import Metrics
from hetero_kv.server.served import ServedModel
from hetero_kv.serving.sampling import SamplingParams
from hetero_kv.serving.stream import Completion, Piece, Progress, Stream

#: The most answers to one request.
MOST_ANSWERS = 64


@dataclass(frozen=True)
class GenerationRequest:
    """What is to be continued.

    Attributes:
        served: the model.
        prompts: token ids of each prompt, at least one.
        sampling: how each answer is drawn: those to the first prompt, then as many to the next one, and so on.
        question: how many of the last tokens are the question about the others; None if unknown.
        priority, markers, reuses, speculation: as `Engine.generate` takes them.
    """

    served: ServedModel
    prompts: Sequence[Sequence[int]]
    sampling: Sequence[SamplingParams]
    question: int | None = None
    priority: int = 0
    markers: Mapping[int, str] = field(default_factory=dict)
    reuses: bool = True
    speculation: str | None = None


@dataclass(frozen=True)
class Token:
    """A token of answer number `choice`."""

    choice: int
    piece: Piece


@dataclass(frozen=True)
class Ended:
    """Answer number `choice` is complete."""

    choice: int
    completion: Completion


class Source(ABC):
    """A stream of answers. Use it as a context manager: answers that are not complete at the end are cancelled."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *raised: object) -> None:
        """Cancel what is not complete."""

    @property
    @abstractmethod
    def progress(self) -> Progress | None:
        """How much of the prompt is computed; None while it waits."""

    @abstractmethod
    def events(self) -> AsyncIterator[Token | Ended]:
        """The tokens and ends of all answers, as they come.

        Raises ApiError 429 if the request waits too long for its turn, and the errors of the engine.
        """

    async def ended(self) -> list[Ended]:
        """All answers, once they are complete. Raises as `events`."""
        found = [each async for each in self.events() if isinstance(each, Ended)]
        return sorted(found, key=lambda each: each.choice)


class Answers(Source):
    """The answers to a prompt, several if it has several sampling parameters.

    The request is queued at once; `events` waits for its turn.

    Args:
        prompt: the prompt.
        key: the name of the API key.
        tenant: as `Engine.generate` takes it.
        active: the running answers; this one is added until it ends.

    Raises ApiError for a prompt that does not fit, 429 if the queue is full or the key's rate is used up.
    """

    def __init__(
        self,
        prompt: GenerationRequest,
        key: str,
        tenant: str,
        rates: Sequence[Rates],
        metrics: Metrics,
        active: set[Answers],
    ) -> None:
        self.prompt, self._tenant = prompt, tenant
        self._key, self._rates, self._metrics = key, rates, metrics
        capacity = prompt.served.engine.max_seq_len
        longest = max(map(len, prompt.prompts))
        if longest > capacity:
            raise ApiError(
                # As Anthropic's API words it.
                400, f"prompt is too long: {longest} tokens > {capacity} maximum of {prompt.served.id}; shorten it "
                f"by {longest - capacity} tokens, or start the server with --max_seq_len {longest} or more",
                code="context_length_exceeded", details={"n_prompt_tokens": longest, "n_ctx": capacity},
            )  # fmt: skip
        if len(prompt.sampling) > MOST_ANSWERS:
            raise ApiError(400, f"the request asks for {len(prompt.sampling)} answers; ask for at most {MOST_ANSWERS}")
        for each in rates:
            each.require(key)
        self._ticket: Ticket = prompt.served.gate.enter(key)
        rates[0].use(key, 1)
        self._active = active
        self._active.add(self)
        # By the number of the answer.
        self._streams: dict[int, Stream] = {}
        self._is_enough: set[int] = set()
        # To each prompt.
        self._choices = len(prompt.sampling) // len(prompt.prompts)
        self._is_stopping = False

    def __exit__(self, *raised: object) -> None:
        self._active.discard(self)
        self._cancel()
        self._ticket.leave()

    def stop(self) -> None:
        """End the answers with an error, because the server stops."""
        self._is_stopping = True
        for stream in self._streams.values():
            stream.cancel()

    def end(self, choice: int) -> None:
        """End answer number `choice`, which has begun, as complete."""
        self._is_enough.add(choice)
        self._streams[choice].cancel()

    def _cancel(self) -> None:
        for stream in self._streams.values():
            if not stream.is_done:
                stream.cancel()
                self._metrics.cancelled(self.prompt.served)

    @property
    def progress(self) -> Progress | None:
        """See `Source`."""
        return next((stream.progress for stream in self._streams.values()), None)

    async def events(self) -> AsyncIterator[Token | Ended]:
        """See `Source`."""
        async for each in _merged([self._answer(number) for number in range(len(self.prompt.sampling))]):
            yield each

    async def _answer(self, number: int) -> AsyncIterator[Token | Ended]:
        prompt, tokens = self.prompt, self._rates[1]
        await self._ticket.turn()
        if self._is_stopping:
            raise stopping()
        stream = prompt.served.engine.generate(
            prompt.prompts[number // self._choices],
            prompt.sampling[number],
            question=prompt.question,
            priority=prompt.priority,
            markers=prompt.markers,
            reuses=prompt.reuses,
            speculation=prompt.speculation,
            tenant=self._tenant,
        )
        self._streams[number] = stream
        # Also counted for clients that leave before the end.
        tokens.use(self._key, 0 if number % self._choices else len(prompt.prompts[number // self._choices]))
        async for piece in stream:
            self._metrics.token(prompt.served)
            tokens.use(self._key, 1)
            yield Token(number, piece)
        completion = await stream
        self._metrics.completed(prompt.served, completion)
        if completion.finish_reason == "stopped" and number not in self._is_enough:
            raise stopping()
        self._ticket.done()
        yield Ended(number, completion)


async def _merged(sources: Sequence[AsyncIterator[Token | Ended]]) -> AsyncIterator[Token | Ended]:
    """The items of several iterators, in the order of arrival."""
    if len(sources) == 1:
        async for item in sources[0]:
            yield item
        return
    items: asyncio.Queue[Token | Ended | BaseException | None] = asyncio.Queue()

    async def pump(source: AsyncIterator[Token | Ended]) -> None:
        try:
            async for item in source:
                items.put_nowait(item)
            items.put_nowait(None)
        except Exception as error:
            items.put_nowait(error)

    tasks = [asyncio.ensure_future(pump(source)) for source in sources]
    try:
        open_sources = len(tasks)
        while open_sources:
            found = await items.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                open_sources -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
