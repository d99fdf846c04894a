"""Engines on several machines find each other's contexts at an address, and go on without it while it is away."""

from __future__ import annotations

import time

import pytest

from hetero_kv import SamplingParams
from hetero_kv.contexts import cards, medium
from tests.serving.tiny_engine import GREEDY, PROMPTS, alone, engine_of
from tests.support.faulty_files import FaultyFiles
from tests.support.slow_variants import with_few

FIRST = PROMPTS[3]
FOLLOWING, BRANCH = [*FIRST, *PROMPTS[1]], [*FIRST[:150], *PROMPTS[7]]
ONE = SamplingParams(max_new_tokens=1)

pytestmark = pytest.mark.usefixtures("one_thread", "always_listed")


@pytest.fixture
def always_listed(monkeypatch):
    monkeypatch.setattr(cards, "_FRESH_S", 0.0)
    monkeypatch.setattr(cards, "_FRESH_TIMES", 0)
    monkeypatch.setattr(medium, "_PAUSES_S", (0.01, 0.01))
    FaultyFiles.reset()
    yield
    FaultyFiles.running.set()


@pytest.fixture
def folder(tmp_path):
    """A folder at the address, which the late uploads of other tests do not reach."""
    return tmp_path.name


@pytest.fixture
def machine(tmp_path, folder, monkeypatch):
    """An engine with a disk cache of its own."""

    def engine(name, recipe="dense", architecture="llama", **settings):
        monkeypatch.setenv("HETERO_KV_HOME", str(tmp_path / name))
        return engine_of(recipe, architecture, context_folder=f"faulty://{folder}", **settings)

    return engine


@pytest.mark.parametrize("recipe", with_few(["adaptive", "quest", "snapkv"], ("adaptive",)))
def test_another_machine_goes_on_from_what_one_has_computed(recipe, machine):
    with machine("one", recipe) as engine:
        engine.generate(FIRST, ONE).result()
    with machine("two", recipe) as engine:
        for tokens, cached in ((FOLLOWING, len(FIRST)), (BRANCH, 150)):
            found = engine.generate(tokens, GREEDY).result()
            assert (found.cached_tokens, found.reuse.source) == (cached, "disk")
            assert found.tokens == alone(engine, tokens)
            engine._prefixes.drop_oldest()
        assert engine.status().context_failures == 0


def test_layers_that_cannot_go_back_find_whole_sequences(machine):
    with machine("one", "quest", "qwen3_5_text") as engine:
        engine.generate(FIRST, ONE).result()
    with machine("two", "quest", "qwen3_5_text") as engine:
        for tokens, cached in ((BRANCH, 0), (FOLLOWING, len(FIRST))):
            found = engine.generate(tokens, GREEDY).result()
            assert found.cached_tokens == cached
            assert found.tokens == alone(engine, tokens)


def test_what_is_in_memory_is_not_fetched(machine, folder):
    with machine("one") as engine:
        engine.generate(FIRST, ONE).result()
    with machine("two") as engine:
        engine.generate(FIRST, ONE).result()
        for path in list(FaultyFiles.store):
            if f"/{folder}/blocks/" in path:
                FaultyFiles().rm_file(path)
        found = engine.generate(FOLLOWING, GREEDY).result()
        assert (found.cached_tokens, found.reuse.source) == (len(FIRST), "memory")


def test_requests_go_on_while_the_address_is_away_and_use_it_when_it_is_back(machine, folder, caplog):
    with machine("one") as engine:
        engine.generate(FIRST, ONE).result()
    FaultyFiles.error = OSError("Connection refused")
    with machine("two") as engine:
        found = engine.generate(PROMPTS[2], GREEDY).result()
        assert (found.cached_tokens, found.reuse.reason) == (0, "store_away")
        assert "did not answer in time" in found.reuse.text
        assert found.tokens == alone(engine, PROMPTS[2])
        assert engine.status().context_failures > 0
        assert "requests go on without it" in caplog.text
        FaultyFiles.error = None
        time.sleep(0.02)
        found = engine.generate(FOLLOWING, GREEDY).result()
        assert (found.cached_tokens, found.reuse.source) == (len(FIRST), "disk")
        assert found.tokens == alone(engine, FOLLOWING)
    # What was computed meanwhile has been uploaded since.
    assert len([path for path in FaultyFiles.store if f"/{folder}/contexts/" in path]) == 3


def test_a_request_does_not_wait_for_one_that_fetches_and_can_be_cancelled_meanwhile(machine):
    with machine("one", starts_thread=True) as engine:
        FaultyFiles.running.clear()
        waiting = engine.generate(FOLLOWING, GREEDY)
        short = engine.generate(FIRST[:40], GREEDY)
        # A prompt that is too short for a stored beginning fetches nothing.
        assert short.result(20).tokens == alone(engine, FIRST[:40])
        assert [each.state for each in engine.status().requests] == ["waiting"]
        waiting.cancel()
        assert waiting.result(20).finish_reason == "stopped"
        last = engine.generate(FOLLOWING, GREEDY)
        FaultyFiles.running.set()
        assert last.result(20).tokens == alone(engine, FOLLOWING)


def test_a_request_that_is_cancelled_while_it_goes_on_computes_nothing(machine):
    with machine("one") as engine:
        arrive = engine._loop._arrivals._arrive

        def cancelled(request):
            request.stream.cancel()
            engine._loop._receive()
            arrive(request)

        engine._loop._arrivals._arrive = cancelled
        found = engine.generate(FOLLOWING, GREEDY).result(20)
        assert (found.finish_reason, found.tokens) == ("stopped", ())


def test_an_address_that_hangs_delays_a_request_by_the_wait_at_most(machine):
    with machine("one", context_wait_s=0.1) as engine:
        FaultyFiles.running.clear()
        found = engine.generate(FOLLOWING, GREEDY).result()
        assert found.reuse.reason == "store_away"
        assert found.tokens == alone(engine, FOLLOWING)


def test_what_does_not_come_as_a_whole_is_not_loaded_and_takes_no_memory(machine, caplog):
    with machine("one") as engine:
        engine.generate(FIRST, ONE).result()
    with machine("two", context_wait_s=0.5) as engine:
        # The card comes, and no chunk.
        assert engine._prefixes.stored.fetch(FOLLOWING, len(FIRST) + 1)
        FaultyFiles.running.clear()
        found = engine.generate(FOLLOWING, GREEDY).result()
        assert (found.cached_tokens, found.reuse.reason) == (0, "store_away")
        assert found.tokens == alone(engine, FOLLOWING)
        assert "cannot be used" not in caplog.text
        FaultyFiles.running.set()


def test_an_engine_closes_while_a_request_fetches(machine):
    engine = machine("one", starts_thread=True, context_wait_s=0.2)
    FaultyFiles.running.clear()
    waiting = engine.generate(FOLLOWING, GREEDY)
    engine.close()
    assert waiting.result(20).finish_reason == "stopped"


def test_another_tenant_fetches_nothing(machine):
    with machine("one") as engine:
        engine.generate(FIRST, ONE, tenant="ann").result()
    with machine("two") as engine:
        assert engine.generate(FOLLOWING, ONE, tenant="bob").result().cached_tokens == 0
        assert engine.generate(FOLLOWING, ONE, tenant="ann").result().cached_tokens == len(FIRST)
