"""How the tokens of answers are drawn, and what ends an answer."""

from __future__ import annotations

import pytest

from tests.chat.tiny_conversations import conversation

pytestmark = pytest.mark.usefixtures("one_thread")


def test_settings_of_sampling_that_leave_one_token_give_the_greedy_answer(model):
    greedy = conversation(model).ask("hello", max_new_tokens=8).text
    for narrow in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        assert conversation(model).ask("hello", max_new_tokens=8, temperature=5.0, **narrow).text == greedy
    drawn = [conversation(model).ask("hello", max_new_tokens=8, temperature=5.0, seed=7).text for _ in range(2)]
    assert drawn[0] == drawn[1] != greedy


def test_a_repetition_penalty_counts_in_greedy_answers_too(model):
    def repeated(penalty):
        talk = conversation(model)
        talk.ask("hello", max_new_tokens=24, repetition_penalty=penalty)
        return 24 - len({*talk._state.tokens[-24:]})

    assert repeated(1e6) == 0 < repeated(1.0)


def test_an_answer_ends_with_a_stop_text_and_the_conversation_goes_on(model):
    whole = conversation(model).ask("hello", max_new_tokens=12)
    talk = conversation(model)
    stop = whole.text[4:7]
    # What stands in the question ends nothing.
    answer = talk.ask("hello", max_new_tokens=12, stop=("hello", stop))
    assert answer.finish_reason == "stop_text"
    assert answer.text == whole.text[: len(answer.text)]
    assert whole.text.index(stop) + len(stop) <= len(answer.text) < len(whole.text)
    assert talk.ask("again", max_new_tokens=12, stop=("no such text",)).finish_reason == "max_new_tokens"
