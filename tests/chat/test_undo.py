"""Turns of a conversation are undone, forgotten, forked and reset."""

from __future__ import annotations

import pytest

from hetero_kv.chat.conversation import MOST_UNDONE, Conversation
from hetero_kv.errors import HeteroKVError
from tests.chat.tiny_conversations import FEW, conversation, new_model, replies
from tests.support.slow_variants import with_few
from tests.support.tiny_tokenizers import TEMPLATE, byte_level

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_reset_that_is_interrupted_is_made_good_by_the_next_question(model, monkeypatch):
    talk = conversation(model)
    first = replies(talk, "hello")

    reset, calls = talk.cache.reset, []

    def interrupted():
        calls.append(0)
        if len(calls) == 1:
            raise KeyboardInterrupt
        reset()

    monkeypatch.setattr(talk.cache, "reset", interrupted)
    with pytest.raises(KeyboardInterrupt):
        talk.reset()
    assert talk.context_tokens == 0
    assert replies(talk, "hello") == first


def test_a_fork_goes_its_own_way_and_undoes_its_own_turns(model):
    talk = conversation(model, forks=1)
    talk.ask("hello", **FEW)
    fork = talk.fork()
    assert replies(talk, "one", "two") != replies(fork, "two", "one")
    assert talk.context_tokens == talk.cache.get_seq_length() + 1
    fork.reset()
    assert replies(fork, "hello") == replies(conversation(model), "hello")
    with pytest.raises(HeteroKVError, match="an answer is being generated; fork the conversation before or after"):
        talk.ask("hello", **FEW, on_text=lambda text: talk.fork())
    assert talk.fork().context_tokens == talk.context_tokens


@pytest.mark.parametrize(
    "recipe", with_few([None, "ktransformers", "h2o", "infllm", "shadowkv"], quick=["ktransformers", "h2o"])
)
def test_undo_restores_the_state_before_the_question(recipe):
    model = new_model(recipe)
    talk, other = conversation(model), conversation(model)
    assert replies(talk, "hello " * 20) == replies(other, "hello " * 20)
    replies(talk, "never " * 20)
    talk.undo()
    assert talk.turns == other.turns
    assert talk._state.tokens == other._state.tokens
    assert replies(talk, "again " * 9, "more") == replies(other, "again " * 9, "more")


def test_as_many_questions_as_are_kept_can_be_taken_back_in_a_row():
    model = new_model("ktransformers")
    talk = conversation(model)
    questions = [f"hello {number}" for number in range(MOST_UNDONE + 1)]
    answers = replies(talk, *questions)
    for _ in range(MOST_UNDONE):
        talk.undo()
    assert not talk.can_undo
    with pytest.raises(HeteroKVError, match="cannot be taken back: its state is not kept"):
        talk.undo()
    assert replies(talk, *questions[1:]) == answers[1:]
    with pytest.raises(HeteroKVError, match="the conversation is empty"):
        conversation(model).undo()
    with pytest.raises(HeteroKVError, match="an answer is being generated; take the question back when it is complete"):
        talk.ask("hello", **FEW, on_text=lambda text: talk.undo())


def test_turns_are_the_tokens_of_the_conversation(model):
    talk = conversation(model)
    answers = [talk.ask(question, **FEW) for question in ("hello", "again")]
    assert [turn.answer for turn in talk.turns] == [answer.statistics.generated_tokens for answer in answers]
    assert sum(turn.question + turn.answer for turn in talk.turns) == talk.context_tokens
    talk.reset()
    assert talk.turns == ()


def test_another_system_message_starts_a_new_conversation(model):
    talk = conversation(model)
    talk.ask("hello", **FEW)
    talk.restart("Obey.")
    assert talk.context_tokens == 0
    assert replies(talk, "hello") == replies(conversation(model, system="Obey."), "hello")


def test_a_template_that_takes_no_system_message_leaves_the_conversation_as_it_was(model):
    tokenizer = byte_level(add_prefix_space=False)
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}" + TEMPLATE
    talk = Conversation(model, tokenizer)
    talk.ask("hello", **FEW)
    before = talk.context_tokens
    with pytest.raises(HeteroKVError, match="refuses messages of system"):
        talk.restart("Obey.")
    assert (talk.context_tokens, talk.system) == (before, None)
