"""The result of one request as it arrives, from one replica or from several that go on with it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from hetero_kv.errors import HeteroKVError
from hetero_kv.server.cluster.messages import Alive, Message, NextPieces, RemoteRequest
from hetero_kv.serving.stream import Completion, Piece, ResultStream


class ArrivingResult:
    """Passes messages on to the readers of a stream.

    Attributes:
        pieces: the tokens of the answer so far.
    """

    def __init__(self, stream: ResultStream[Any]) -> None:
        self._stream = stream
        self.pieces: list[Piece] = []
        self._began = time.perf_counter()
        self._first_token_s: float | None = None

    def take(self, message: Message) -> None:
        """The next message of a replica."""
        match message:
            case NextPieces():
                if self._first_token_s is None:
                    self._first_token_s = time.perf_counter() - self._began
                self.pieces.extend(message.pieces)
                for piece in message.pieces:
                    self._stream.put(piece)
            case Alive():
                self._stream.progress = message.progress
            case Completion():
                # Of the tokens before its own, a replica that went on knows the ids alone.
                pieces, first_token_s = tuple(self.pieces), self._first_token_s
                self._stream.complete(
                    replace(message, pieces=pieces, first_token_s=first_token_s, total_s=self._seconds())
                )
            case Exception():
                self._stream.fail(message)
            case _:
                self._stream.complete(message)

    def going_on(self, request: RemoteRequest, lost: str | None) -> RemoteRequest:
        """The request to another replica, behind the tokens that came, without the one that was lost."""
        answered = {"answered": [piece.token for piece in self.pieces]} if self.pieces else {}
        avoided = request.avoided if lost is None else {*request.avoided, lost}
        return replace(request, arguments={**request.arguments, **answered}, avoided=avoided)

    def cancelled(self, request: RemoteRequest) -> None:
        """The request is cancelled: an answer ends as it is."""
        if request.sampling is None:
            self._stream.fail(HeteroKVError("the request was cancelled"))
            return
        self._stream.complete(
            Completion(
                text="".join(piece.text for piece in self.pieces),
                pieces=tuple(self.pieces),
                finish_reason="stopped",
                stop_text=None,
                prompt_tokens=len(request.tokens),
                cached_tokens=0,
                first_token_s=self._first_token_s,
                total_s=self._seconds(),
            )
        )

    def _seconds(self) -> float:
        return time.perf_counter() - self._began
