"""An answer that one engine began goes on in another one as if it had not been interrupted."""

from __future__ import annotations

import pytest

from hetero_kv import SamplingParams
from hetero_kv.errors import HeteroKVError
from tests.serving.tiny_engine import PROMPTS, call_before_parts, engine_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Rotating:
    """A mask that allows a third of the tokens, another third after each one."""

    def __init__(self):
        self.turn = 0

    def apply(self, logits):
        logits[[token for token in range(len(logits)) if token % 3 != self.turn]] = -float("inf")

    def accept(self, token):
        assert token % 3 == self.turn
        self.turn = (self.turn + 1) % 3


@pytest.fixture(scope="module")
def engine():
    with engine_of("dense") as found:
        yield found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.5, "seed": 3, "top_p": 0.95},
        {"temperature": 1.5, "seed": 4, "presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"temperature": 1.5, "seed": 5, "mask": True},
    ],
    ids=["greedy", "seeded", "penalties", "mask"],
)
def test_an_answer_goes_on_behind_any_of_its_tokens(engine, settings):
    def params():
        masks = {"mask": Rotating()} if settings.get("mask") else {}
        return SamplingParams(max_new_tokens=7, ignore_eos=True, **{**settings, **masks})

    whole = engine.generate(PROMPTS[1], params()).result()
    for given in range(len(whole.tokens) + 1):
        stream = engine.generate(PROMPTS[1], params(), answered=whole.tokens[:given])
        following = [piece.token for piece in stream]
        found = stream.result()
        assert following == list(whole.tokens[given:])
        assert (found.tokens, found.text, found.finish_reason) == (whole.tokens, whole.text, whole.finish_reason)
        assert found.prompt_tokens == len(PROMPTS[1]) >= found.cached_tokens
        assert stream.progress is None or stream.progress.processed_tokens == len(PROMPTS[1])


def test_the_question_of_an_answer_that_goes_on_is_that_of_its_prompt():
    questions = []
    with engine_of("dense") as engine:
        call_before_parts(engine, lambda part: questions.append(part.prompt[-part.question :]))
        params = SamplingParams(max_new_tokens=9, ignore_eos=True)
        for prompt in PROMPTS[1:3]:
            engine.generate(prompt, params, question=10, answered=[1, 2, 3]).result()
    assert questions == [[*prompt[-10:], 1, 2, 3] for prompt in PROMPTS[1:3]]


def test_more_tokens_than_the_answer_may_have_are_refused(engine):
    with pytest.raises(HeteroKVError, match="answered has 3 tokens; give at most the answer's 2"):
        engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=2), answered=[1, 2, 3])
