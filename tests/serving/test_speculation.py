"""Speculation: whatever is guessed, the answer has the tokens that it has without."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv import SamplingParams
from hetero_kv.engine.errors import CacheFullError
from hetero_kv.errors import ConfigError
from hetero_kv.serving.answer_tokens import AnswerTokens
from hetero_kv.serving.forward import Part
from hetero_kv.serving.sampler import Sampler
from hetero_kv.serving.speculation.draft_length import StepCosts
from hetero_kv.serving.speculation.speculation import Speculation
from tests.serving.tiny_engine import PROMPTS, alone, engine_of
from tests.support.slow_variants import with_few

pytestmark = pytest.mark.usefixtures("one_thread")

#: Recipes whose sequences can go back, and the architecture of a model.
CAN_GO_BACK = (
    ("dense", "llama"), ("quest", "gemma3_text"), ("adaptive", "qwen3_moe"), ("loki", "llama"),
    ("ktransformers", "llama"), ("quest", "llama"), ("adaptive", "llama"), ("magicpig", "llama"),
    ("retroinfer", "llama"), ("sparq", "llama"), ("infllm", "llama"), ("snapkv", "llama"), ("quest", "gpt_oss"),
    ("dense", "deepseek_v3"), ("quest", "phi"),
)  # fmt: skip
PARAMS = SamplingParams(), SamplingParams(temperature=1.0, seed=3, frequency_penalty=0.5)


class Scripted(Speculation):
    """Guesses `answer` from the sequence's end on, `most` tokens at a time, each right one where `is_right` says."""

    def __init__(self, forward, prompt_tokens, answer, is_right=lambda place: True, most=4):
        super().__init__(forward, "lookup")
        self._prompt_tokens, self._answer, self._is_right, self._most = prompt_tokens, answer, is_right, most

    def drafter(self, tokens, way=None, tenant=""):
        self.given = 0
        return self

    def add(self, token):
        self.given += 1

    def release(self):
        pass

    def drafts(self, drafters, caches, left, has_room=None):
        places = range(self.given, self.given + min(self._most, left[0] - 1))
        return [[self._answer[place] if self._is_right(place) else (self._answer[place] + 1) % 97 for place in places]]


def prefilled(engine, tokens):
    forward = engine._scheduler.forward
    cache = forward.new_cache(engine._store)
    return forward, cache, forward.prefill(cache, Part(tokens, 0, len(tokens), 0, None))


def answered(engine, tokens, count, params, speculation=None, limit=None):
    """An answer's tokens, the drafted and accepted numbers, and the cache behind it."""
    forward, cache, logits = prefilled(engine, tokens)
    sampler = Sampler(params, tokens, engine.vocab_size)
    with AnswerTokens(forward, cache, sampler, tokens, logits, speculation, limit=limit or count) as answer:
        found = [choice.token for choice in itertools.islice(answer, count)]
    return found, answer.counts, cache


@pytest.mark.parametrize(("recipe", "architecture"), with_few(CAN_GO_BACK, 3))
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
def test_guesses_right_and_wrong_change_no_token(recipe, architecture, params):
    with engine_of(recipe, architecture) as engine:
        tokens, forward = PROMPTS[2], engine._scheduler.forward
        assert forward.why_no_drafts is None
        expected, _, _ = answered(engine, tokens, 40, params)
        for is_right in (lambda place: True, lambda place: False, lambda place: place % 3 != 1):
            speculation = Scripted(forward, len(tokens), expected, is_right)
            found, counts, cache = answered(engine, tokens, 40, params, speculation)
            assert found == expected
            assert counts.drafted > 20
            assert cache.get_seq_length() == len(tokens) + 39


PROMPT = PROMPTS[2]
LONG = SamplingParams(max_new_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def quest():
    """An engine, whose model's forward is shared, and what follows PROMPT."""
    with engine_of("quest", speculation="off") as engine:
        yield engine, engine.generate(PROMPT, LONG).result().tokens


@settings(max_examples=15, deadline=None)
@given(wrong=st.sets(st.integers(0, 29)), most=st.integers(1, 9), stop=st.integers(1, 30))
def test_wherever_a_draft_is_wrong_and_the_reader_stops_the_answer_and_the_cache_are_the_same(quest, wrong, most, stop):
    engine, answer = quest
    speculation = Scripted(engine._scheduler.forward, len(PROMPT), answer, lambda place: place not in wrong, most)
    found, _, cache = answered(engine, PROMPT, stop, SamplingParams(), speculation, limit=30)
    assert tuple(found) == answer[:stop]
    assert cache.get_seq_length() == len(PROMPT) + stop - 1
    # It goes on as any other cache, and so does a fork.
    forward = engine._scheduler.forward
    for each in (cache.fork(), cache):
        assert int(forward.decode([each], [found[-1]])[0].argmax()) == answer[stop]


def test_a_request_says_how_it_is_guessed_and_reports_it(quest):
    _, answer = quest
    with engine_of("quest", speculation="auto") as engine:
        assert engine.speculation == "lookup"
        engine._speculation = engine._scheduler._decoder._speculation = engine._inputs._speculation = Scripted(
            engine._scheduler.forward, len(PROMPT), answer, lambda place: place % 5 > 0, most=3
        )
        found = engine.generate(PROMPT, LONG).result()
    assert found.tokens == answer
    assert 0 < found.accepted_tokens < found.drafted_tokens


def test_an_unknown_way_is_refused_by_name(quest):
    engine, _ = quest
    with pytest.raises(ConfigError, match="speculation is 'guess'; it must be one of off, lookup, sparse, auto"):
        engine.generate(PROMPT, LONG, speculation="guess")
    with pytest.raises(
        ConfigError, match="speculation is 'guess'; it must be one of off, lookup, sparse, auto, or a draft"
    ):
        engine_of("quest", speculation="guess")


class Many(Speculation):
    """Guesses the answers of several requests, found by their prompts' first tokens, `most` tokens at a time."""

    def __init__(self, forward, answers, most=3):
        super().__init__(forward, "lookup")
        self.answers, self.most = answers, most

    def drafter(self, tokens, way=None, tenant=""):
        answer = self.answers.get(tuple(tokens[:4]))
        return None if answer is None else Known(answer)

    def drafts(self, drafters, caches, left, has_room=None):
        return [
            [] if each is None else list(each.answer[each.given : each.given + min(self.most, most - 1)])
            for each, most in zip(drafters, left, strict=True)
        ]


class Known:
    def __init__(self, answer):
        self.answer, self.given = answer, 0

    def add(self, token):
        self.given += 1

    def release(self):
        pass


def guessing(engine, answers, most=3):
    speculation = Many(engine._scheduler.forward, answers, most)
    engine._speculation = engine._scheduler._decoder._speculation = engine._inputs._speculation = speculation
    return speculation


def counted_rows(engine, monkeypatch):
    """The rows of every forward that verifies guesses, from now on."""
    forward, rows = engine._scheduler.forward, []
    verify = forward.verify

    def counting(caches, tokens):
        rows.append(tuple(map(len, tokens)))
        return verify(caches, tokens)

    monkeypatch.setattr(forward, "verify", counting)
    return rows


@pytest.mark.parametrize("recipe", ["quest", pytest.param("adaptive", marks=pytest.mark.slow)])
def test_rows_that_draft_and_one_that_does_not_get_their_tokens(recipe, monkeypatch):
    with engine_of(recipe) as engine:
        expected = [alone(engine, tokens, 40) for tokens in PROMPTS[:3]]
        guessing(engine, {tuple(PROMPTS[0][:4]): expected[0], tuple(PROMPTS[2][:4]): [0, *expected[2][1:]]})
        rows = counted_rows(engine, monkeypatch)
        streams = [engine.generate(tokens, LONG) for tokens in PROMPTS[:3]]
        assert [stream.result().tokens for stream in streams] == expected
    assert any(len(each) == 3 and each.count(1) == 1 for each in rows)


def test_a_stop_text_or_the_longest_answer_within_a_draft_ends_it_there(quest):
    _, answer = quest
    with engine_of("quest") as engine:
        guessing(engine, {tuple(PROMPT[:4]): answer}, most=6)
        stop = next(place for place in range(9, 30) if answer[place] not in answer[:place])
        params = SamplingParams(max_new_tokens=40, ignore_eos=True, stop=(f" {answer[stop]} ",))
        found = engine.generate(PROMPT, params).result()
        assert (found.tokens, found.finish_reason) == (answer[: stop + 1], "stop_text")
        for count in (1, 2, 3, 5):
            params = SamplingParams(max_new_tokens=count, ignore_eos=True)
            assert engine.generate(PROMPT, params).result().tokens == answer[:count]
        # What stays for others is the answer without its last token, and nothing guessed.
        kept = engine.generate([*PROMPT, *answer[:4], 1], SamplingParams(max_new_tokens=1)).result()
        assert kept.cached_tokens == len(PROMPT) + 4


def test_a_mask_sees_every_token_once_and_in_its_place(quest):
    _, answer = quest

    class Watching:
        def __init__(self):
            self.seen = []

        def apply(self, logits):
            logits[5] = -torch.inf

        def accept(self, token):
            self.seen.append(token)
            if len(self.seen) == 7:
                raise ArithmeticError("of the mask")

    with engine_of("quest") as engine:
        seen = []
        for guesses in (False, True):
            if guesses:
                guessing(engine, {tuple(PROMPT[:4]): answer}, most=5)
            masks = [Watching(), Watching()]
            streams = [
                engine.generate(PROMPT, SamplingParams(max_new_tokens=count, mask=mask))
                for count, mask in zip((6, 9), masks, strict=True)
            ]
            assert list(streams[0].result().tokens) == masks[0].seen
            with pytest.raises(ArithmeticError, match="of the mask"):
                streams[1].result()
            seen.append(masks[1].seen)
        assert seen[0] == seen[1]
        # Nothing of the failed request is left.
        assert not engine.status().requests


def test_a_cancelled_request_leaves_no_guess_behind():
    # Full attention: the answer's tokens are the same behind a prompt that has some of them.
    with engine_of("dense", speculation="off", kept_prefixes=1) as engine:
        answer = engine.generate(PROMPT, LONG).result().tokens
        guessing(engine, {tuple(PROMPT[:4]): [*answer[:6], 1, *answer[7:]]})
        stream = engine.generate(PROMPT, LONG)
        pieces = iter(stream)
        for _ in range(6):
            next(pieces)
        stream.cancel()
        given = stream.result().tokens
        assert given == answer[: len(given)]
        found = engine.generate([*PROMPT, *answer[: len(given) + 1]], LONG).result()
        assert found.tokens[:8] == answer[len(given) + 1 :][:8]


@pytest.mark.parametrize(("error", "tried"), [(MemoryError, 1), (CacheFullError, 4)])
def test_a_forward_that_fails_with_guesses_is_computed_without(error, tried, monkeypatch, quest):
    _, answer = quest
    with engine_of("quest") as engine:
        guessing(engine, {tuple(PROMPT[:4]): answer})
        forward, failures = engine._scheduler.forward, []
        logits = forward._logits

        def failing(cache, token_ids):
            found = logits(cache, token_ids)
            if cache.request.rows is not None and len(failures) < 4:
                failures.append(cache.get_seq_length())
                raise error("no room")
            return found

        monkeypatch.setattr(forward, "_logits", failing)
        assert engine.generate(PROMPT, LONG).result().tokens == answer
        # Only room comes back.
        assert len(failures) == tried


def test_guesses_take_no_more_room_than_there_is(quest):
    _, answer = quest
    with engine_of("quest", max_seq_len=len(PROMPT) + 20) as short:
        guessing(short, {tuple(PROMPT[:4]): answer}, most=8)
        found = short.generate(PROMPT, LONG).result()
        assert (found.tokens, found.finish_reason) == (answer[:21], "full")


@pytest.mark.parametrize(
    ("recipe", "architecture", "named"),
    [("h2o", "llama", "BoundedAttention"), ("shadowkv", "llama", "ShadowKVAttention")],
)
def test_rules_that_cannot_take_a_token_back_decode_without_and_say_so(recipe, architecture, named, caplog):
    with engine_of(recipe, architecture, speculation="lookup") as engine:
        assert engine.speculation == "off"
        assert named in engine._scheduler.forward.why_no_drafts
        found = engine.generate(PROMPTS[1], SamplingParams(max_new_tokens=8, ignore_eos=True)).result()
        assert (len(found.tokens), found.drafted_tokens) == (8, 0)
    assert [named in line for line in caplog.messages] == [True]


def test_an_answer_goes_on_without_guesses_that_cannot_be_verified(monkeypatch):
    with engine_of("quest") as engine:
        tokens, forward, calls = PROMPTS[2], engine._scheduler.forward, []
        expected, _, _ = answered(engine, tokens, 12, PARAMS[0])

        def failing(*arguments):
            calls.append(arguments)
            raise MemoryError

        monkeypatch.setattr(forward, "verify", failing)
        found, counts, _ = answered(engine, tokens, 12, PARAMS[0], Scripted(forward, len(tokens), expected))
    assert (found, counts.drafted, len(calls)) == (expected, 0, 1)


def test_costs_that_are_not_measured_for_long_are_forgotten():
    costs = StepCosts()
    for rows in (1, 1, 1, 4, 4, 4):
        costs.took(rows, 0.1 * rows**2)
    assert costs.of(4) == pytest.approx(1.6)
    for _ in range(2001):
        costs.took(1, 0.1)
    assert costs.of(4) < 0.2
