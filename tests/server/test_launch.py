"""How a server stops."""

import asyncio
import logging
import signal

import pytest
import uvicorn

from hetero_kv.server.launch import _Server


def test_a_signal_is_answered_by_how_long_answers_may_still_take(caplog: pytest.LogCaptureFixture):
    stopped: list[str] = []

    async def signalled_twice() -> None:
        server = _Server(uvicorn.Config("no application"), lambda: stopped.append("answers"), 45.0)
        with server.capture_signals():
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0)
            assert "stopping: answers under way have 45 s to end; a second signal ends them at once" in caplog.text
            assert not stopped
            signal.raise_signal(signal.SIGTERM)
            while not stopped:
                await asyncio.sleep(0)
            assert "stopping: answers under way end now" in caplog.text

    with caplog.at_level(logging.INFO, "hetero_kv"):
        asyncio.run(signalled_twice())
    assert stopped == ["answers"]
