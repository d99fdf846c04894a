"""Several engines in one process compute in turn, and each gives the answers that it gives alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import pytest

from hetero_kv import Engine, SamplingParams, with_rules
from hetero_kv.models.loading import LoadedModel
from hetero_kv.serving.part_size import LEAST, SMALL, PartSize
from hetero_kv.serving.scheduler import Scheduler
from hetero_kv.serving.turns import EngineTurn, Others, _Queue
from tests.serving.number_tokenizer import Numbers
from tests.serving.test_draft_models import draft_of
from tests.serving.tiny_engine import GREEDY, PROMPTS, alone, computed_alone, engine_of
from tests.support.free_rows import FreeRows
from tests.support.small_recipes import small_recipe

pytestmark = pytest.mark.usefixtures("one_thread")


def beside(engine, recipe, **settings):
    """An engine of the same weights under another recipe."""
    loaded = LoadedModel(engine._scheduler.forward.model, Numbers(), "tiny", 512)
    view = with_rules(loaded, small_recipe(recipe, max_seq_len=400))
    return Engine(view, **{"max_seq_len": 400, "longest_gap_s": 1e6, "speculation": "off", **settings})


# Of one model's weights, below, the engines are under load as well.
@pytest.mark.slow
def test_engines_of_two_models_under_load_answer_as_alone():
    settings = {"starts_thread": True, "max_batch": 3, "longest_gap_s": 1e-6}
    with engine_of("quest", **settings) as first, engine_of("dense", "gemma2", **settings) as second:
        engines = [first, second]
        prompts = PROMPTS[:3]
        expected = [[alone(engine, tokens) for tokens in prompts] for engine in engines]
        with ThreadPoolExecutor(4) as clients:
            answers = [
                clients.submit(lambda engine, tokens: engine.generate(tokens, GREEDY).result().tokens, engine, tokens)
                for tokens in prompts
                for engine in engines
            ]
            found = [answer.result(120) for answer in answers]
        assert [found[::2], found[1::2]] == expected


def test_engines_of_one_models_weights_under_load_answer_as_alone():
    with (
        engine_of("quest", starts_thread=True, longest_gap_s=1e-6) as first,
        beside(first, "dense", longest_gap_s=1e-6) as second,
        beside(first, "infinipot") as third,
    ):
        engines = [first, second, third]
        streams = [[engine.generate(tokens, GREEDY) for tokens in PROMPTS[:3]] for engine in engines]
        answers = [[stream.result(120).tokens for stream in each] for each in streams]
        assert answers == [[alone(engine, tokens) for tokens in PROMPTS[:3]] for engine in engines]
        assert answers[0] != answers[1]


def test_only_one_engine_computes_at_a_time_and_they_alternate():
    answer = SamplingParams(max_new_tokens=40, ignore_eos=True)
    steps: list[str] = []
    computing = threading.Lock()

    def watched(engine, name):
        decode = engine._scheduler.forward.decode

        def watching(*arguments):
            assert computing.acquire(blocking=False)
            logits = decode(*arguments)
            steps.append(name)
            computing.release()
            return logits

        engine._scheduler.forward.decode = watching

    with engine_of("dense", starts_thread=True) as first, engine_of("dense", starts_thread=True) as second:
        watched(first, "first")
        watched(second, "second")
        with first._loop._turn:
            streams = [engine.generate(PROMPTS[0], answer) for engine in (first, second)]
            # Both wait for their turn before either of them begins.
            while len(first._loop._turn._queue.turns) < 3:
                threading.Event().wait(0.001)
        for stream in streams:
            assert len(stream.result(60).tokens) == 40
    # Behind their first steps, a step of one is between any two of the other.
    both = steps[4:70]
    assert all(first != second for first, second in pairwise(both))


def test_turns_are_taken_in_the_order_in_which_they_were_asked_for():
    queue, order = _Queue(), []
    turns = [EngineTurn(queue) for _ in range(4)]

    def take(number):
        with turns[number]:
            order.append(number)

    with turns[0]:
        threads = []
        for number in (2, 1, 3):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            while len(queue.turns) < 1 + len(threads):
                threading.Event().wait(0.001)
        turns[0].pass_on(0.0)
        order.append(0)
    for thread in threads:
        thread.join(10)
    assert order == [2, 1, 3, 0]
    assert not queue.turns


@pytest.mark.parametrize("needed_as", ["rules", "draft_rules"])
def test_within_a_forward_a_turn_goes_to_engines_that_need_no_lock_of_it(needed_as):
    queue, order, rules = _Queue(), [], object()
    first, needing, other = EngineTurn(queue, rules), EngineTurn(queue, **{needed_as: rules}), EngineTurn(queue)

    def take(turn, name):
        with turn:
            order.append(name)

    with first:
        threads = []
        for turn, name in ((needing, "needing"), (other, "other")):
            threads.append(threading.Thread(target=take, args=(turn, name)))
            threads[-1].start()
            while len(queue.turns) < 1 + len(threads):
                threading.Event().wait(0.001)
        # Only the second engine that waits can compute; afterwards there is none.
        first.pass_on(0.0)
        threads[1].join(10)
        first.pass_on(0.0)
        order.append("first")
    for thread in threads:
        thread.join(10)
    assert order == ["other", "first", "needing"]
    assert not queue.turns


def test_a_short_turn_is_not_cut():
    queue = _Queue()
    first, second, order = EngineTurn(queue), EngineTurn(queue), []

    def take():
        with second:
            order.append("second")

    with first:
        thread = threading.Thread(target=take)
        thread.start()
        while len(queue.turns) < 2:
            threading.Event().wait(0.001)
        first.pass_on(1e6)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_a_turn_that_ends_in_an_error_is_over():
    queue = _Queue()
    turn = EngineTurn(queue)
    with pytest.raises(ZeroDivisionError), turn:
        raise ZeroDivisionError
    assert not queue.turns
    with EngineTurn(queue):
        pass


def test_engines_of_one_model_do_not_wait_for_each_other_in_a_forward():
    settings = {"longest_gap_s": 1e-6, "speculation": "off", "starts_thread": True}
    with engine_of("dense", longest_gap_s=1e-6, starts_thread=True) as first:
        model = first._scheduler.forward.model
        expected = [alone(first, tokens) for tokens in PROMPTS[2:4]]
        with Engine(LoadedModel(model, first.tokenizer, "tiny", 512), max_seq_len=400, **settings) as second:
            streams = [[engine.generate(tokens, GREEDY) for tokens in PROMPTS[2:4]] for engine in (first, second)]
            assert [[stream.result(60).tokens for stream in each] for each in streams] == [expected, expected]


def test_an_engine_whose_draft_model_answers_in_another_engine_waits_for_its_forward():
    draft = draft_of()
    with (
        Engine(draft, max_seq_len=400, longest_gap_s=1e-6, speculation="off", starts_thread=True) as first,
        engine_of("quest", longest_gap_s=1e-6, speculation=draft, starts_thread=True) as second,
    ):
        second._speculation.costs = FreeRows()
        expected = [[computed_alone(engine, tokens) for tokens in PROMPTS[2:4]] for engine in (first, second)]
        for _ in range(3):
            streams = [
                [engine.generate(tokens, GREEDY, reuses=False) for tokens in PROMPTS[2:4]] for engine in (first, second)
            ]
            assert [[stream.result(60).tokens for stream in each] for each in streams] == expected
        assert streams[1][0].result().drafted_tokens


def test_a_prompt_that_passes_whole_gives_way_between_its_chunks():
    """Under sparse prefill a prompt passes whole, and the other engine's requests get tokens meanwhile."""
    during: list[int] = []
    with engine_of("minference", longest_gap_s=1e-6) as first, engine_of("dense", starts_thread=True) as second:
        answered = second.generate(PROMPTS[0], SamplingParams(max_new_tokens=60, ignore_eos=True))
        prefill = first._scheduler.forward.prefill

        def counted(cache, part):
            before = len(answered._pieces)
            logits = prefill(cache, part)
            during.append(len(answered._pieces) - before)
            return logits

        first._scheduler.forward.prefill = counted
        stream = first.generate(PROMPTS[3], GREEDY)
        assert stream.result().tokens == alone(first, PROMPTS[3])
        answered.result(60)
    assert len(during) == 1
    assert during[0] > 0


def test_other_engines_have_their_turns_between_short_prompts_in_a_pause(monkeypatch):
    with engine_of("dense", max_batch=8) as engine:
        scheduler, streams, done = engine._scheduler, [], []
        mixed = scheduler.forward.mixed
        # A prompt is computed in a forward of its own, and comes before the long one, which pauses at once.
        monkeypatch.setattr(scheduler, "_parts_beside", lambda passing: parts_beside(passing)[:1])
        parts_beside = Scheduler._parts_beside.__get__(scheduler)
        scheduler._order._speed = SimpleNamespace(tokens_per_s=1e-3, passed=lambda *_: None)

        def noting(*arguments):
            if engine._queues.computing is not None:
                done.append("prompt")
            return mixed(*arguments)

        def passing_on(after_s):
            if engine._queues.computing is not None:
                done.append("turn")
            elif not streams:
                streams.extend(engine.generate(tokens, GREEDY) for tokens in (PROMPTS[0], PROMPTS[4], PROMPTS[7]))

        monkeypatch.setattr(scheduler.forward, "mixed", noting)
        monkeypatch.setattr(scheduler._turn, "pass_on", passing_on)
        assert engine.generate(PROMPTS[3], GREEDY).result().tokens == alone(engine, PROMPTS[3])
        for stream, tokens in zip(streams, (PROMPTS[0], PROMPTS[4], PROMPTS[7]), strict=True):
            assert stream.result().tokens == alone(engine, tokens)
    assert done == ["prompt", "turn"] * 3


def test_an_engine_tells_the_others_what_waits_for_a_token():
    with engine_of("dense") as first, engine_of("dense") as second:
        before = first._loop._turn.others.rows
        stream = second.generate(PROMPTS[0], GREEDY)
        second.step()
        assert first._loop._turn.others.rows == before + 1
        assert second._loop._turn.others.rows == before
        stream.result()
        assert first._loop._turn.others.rows == before


def test_a_part_fits_into_the_gap_of_other_engines_requests():
    size = PartSize(0.25, 2048)
    for _ in range(50):
        size.passed(64, 64 * 0.25 / 1000)
        size.decoded(0.2)
    assert size.of(5000, rows=0) == 2048
    assert size.of(5000, rows=0, others=Others(rows=1)) == pytest.approx(1000, abs=2)
    assert size.of(5000, rows=0, others=Others(rows=1, prompts=1)) == SMALL
    assert size.of(5000, rows=0, others=Others(rows=1, decode_s=0.1)) == pytest.approx(600, abs=2)
    assert size.of(5000, rows=0, others=Others(rows=1, decode_s=0.3)) == LEAST
    # Their own requests' tokens take time between the parts as well.
    assert size.of(5000, rows=1, others=Others(rows=1, decode_s=0.1)) == LEAST
