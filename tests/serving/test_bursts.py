"""The pieces of a stream in bursts, for readers to whom every message costs something."""

from __future__ import annotations

import asyncio

import pytest

from hetero_kv.errors import HeteroKVError
from hetero_kv.serving.stream import Completion, Piece, ResultStream

PIECES = [Piece(number, str(number)) for number in range(6)]


def test_what_comes_while_the_reader_pauses_comes_together():
    pauses = []

    def pause_s():
        pauses.append(len(pauses))
        return 0.0

    async def read():
        stream = ResultStream(lambda _: None)
        source = stream.bursts(pause_s)
        stream.put(PIECES[0])
        assert await anext(source) == PIECES[:1]
        for piece in PIECES[1:4]:
            stream.put(piece)
        assert await anext(source) == PIECES[1:4]
        waiting = asyncio.create_task(anext(source))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        stream.put(PIECES[4])
        assert await waiting == PIECES[4:5]
        stream.put(PIECES[5])
        stream.complete(Completion("", tuple(PIECES), "end", None, 1, 0, None, 0.0))
        return [burst async for burst in source]

    assert asyncio.run(read()) == [PIECES[5:]]
    # None behind the third one: the answer was complete by then.
    assert len(pauses) == 2


def test_the_end_of_an_answer_ends_the_pause():
    completion = Completion("", tuple(PIECES[:2]), "end", None, 1, 0, None, 0.0)

    async def read():
        stream = ResultStream(lambda _: None)
        source = stream.bursts(lambda: 3600.0)
        stream.put(PIECES[0])
        assert await anext(source) == PIECES[:1]
        waiting = asyncio.create_task(anext(source))
        await asyncio.sleep(0.01)
        stream.put(PIECES[1])
        await asyncio.sleep(0.01)
        assert not waiting.done()
        stream.complete(completion)
        assert await waiting == PIECES[1:2]
        return await stream

    assert asyncio.run(asyncio.wait_for(read(), 60)) is completion


def test_a_stream_that_fails_gives_what_came_before_it():
    given = []

    async def read():
        stream = ResultStream(lambda _: None)
        stream.put(PIECES[0])
        stream.fail(HeteroKVError("full"))
        async for burst in stream.bursts(lambda: 0.0):
            given.extend(burst)

    with pytest.raises(HeteroKVError, match="full"):
        asyncio.run(read())
    assert given == PIECES[:1]


def test_a_loop_that_closes_while_it_is_woken_ends_no_answer(monkeypatch):
    stream, loop = ResultStream(lambda _: None), asyncio.new_event_loop()
    reader = stream.bursts(lambda: 0.0)
    waiting = loop.create_task(anext(reader))
    loop.run_until_complete(asyncio.wait([waiting], timeout=0.01))
    loop.close()
    # Its thread closed it meanwhile.
    monkeypatch.setattr(loop, "is_closed", lambda: False)
    stream.put(PIECES[0])
    stream.complete(Completion("", tuple(PIECES[:1]), "end", None, 1, 0, None, 0.0))
    assert stream.result().tokens == (0,)
