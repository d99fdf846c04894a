"""Speculation: whatever is guessed, the answer has the tokens that it has without."""

from __future__ import annotations

import itertools

import pytest

from hetero_kv import SamplingParams
from hetero_kv.serving.answer_tokens import AnswerTokens
from hetero_kv.serving.forward import Part
from hetero_kv.serving.sampler import Sampler
from hetero_kv.serving.speculation import Speculation
from tests.serving.test_engine import PROMPTS, engine_of

pytestmark = pytest.mark.usefixtures("one_thread")

#: Recipes whose sequences can go back, and the architecture of a model.
CAN_GO_BACK = (
    ("dense", "llama"), ("quest", "llama"), ("ktransformers", "llama"), ("adaptive", "llama"),
    ("loki", "llama"), ("magicpig", "llama"), ("retroinfer", "llama"), ("sparq", "llama"), ("infllm", "llama"),
    ("snapkv", "llama"), ("quest", "gemma3_text"), ("quest", "gpt_oss"), ("adaptive", "qwen3_moe"),
    ("dense", "deepseek_v3"), ("quest", "phi"),
)  # fmt: skip
PARAMS = SamplingParams(), SamplingParams(temperature=1.0, seed=3, frequency_penalty=0.5)


class Scripted(Speculation):
    """Guesses `answer` from the sequence's end on, `most` tokens at a time, each right one where `is_right` says."""

    def __init__(self, forward, prompt_tokens, answer, is_right=lambda place: True, most=4):
        super().__init__(forward, "lookup")
        self._prompt_tokens, self._answer, self._is_right, self._most = prompt_tokens, answer, is_right, most

    def drafter(self, tokens, way=None):
        self.given = 0
        return self

    def add(self, token):
        self.given += 1

    def drafts(self, drafters, caches, left):
        places = range(self.given, self.given + min(self._most, left[0] - 1))
        return [[self._answer[place] if self._is_right(place) else (self._answer[place] + 1) % 97 for place in places]]


def prefilled(engine, tokens):
    forward = engine._scheduler.forward
    cache = forward.new_cache(engine._store)
    return forward, cache, forward.prefill(cache, Part(tokens, 0, len(tokens), 0, None))


def answered(engine, tokens, count, params, speculation=None):
    """An answer's tokens, the drafted and accepted numbers, and the cache behind it."""
    forward, cache, logits = prefilled(engine, tokens)
    sampler = Sampler(params, tokens, engine.vocab_size)
    with AnswerTokens(forward, cache, sampler, tokens, logits, speculation, limit=count) as answer:
        found = [choice.token for choice in itertools.islice(answer, count)]
    return found, answer.counts, cache


@pytest.mark.parametrize(("recipe", "architecture"), CAN_GO_BACK)
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
