"""A conversation whose tokens are guessed is the one without guesses, also where it ends within a burst."""

from __future__ import annotations

import pytest

from hetero_kv.chat.conversation import Conversation
from hetero_kv.errors import ConfigError
from hetero_kv.serving.speculation.speculation import Speculation
from tests.chat.tiny_conversations import TOKENIZER, new_model
from tests.support.free_rows import FreeRows

pytestmark = pytest.mark.usefixtures("one_thread")

ANSWER = {"max_new_tokens": 16}


class Knowing:
    """Knows where a conversation is; `talk` is the one that it becomes."""

    def __init__(self, talk, tokens):
        self._talk, self._place = talk, len(tokens)

    def add(self, token):
        self._place += 1

    def release(self):
        pass

    def guesses(self, most):
        """Three right guesses and a wrong one."""
        return [*self._talk._state.tokens[self._place : self._place + 3], 0][:most]


@pytest.fixture(scope="module")
def model():
    return new_model("quest")


@pytest.fixture
def conversations(model, monkeypatch):
    """A conversation that guesses what the other one, which guesses nothing, has answered before it."""
    talk, other = (Conversation(model, TOKENIZER, forks=1, speculation=way) for way in ("lookup", "off"))

    def drafter(speculation, tokens, way=None, tenant=""):
        return None if speculation.way == "off" else Knowing(other, tokens)

    def drafts(speculation, drafters, caches, left):
        return [drafters[0].guesses(left[0] - 1)]

    monkeypatch.setattr(Speculation, "drafter", drafter)
    monkeypatch.setattr(Speculation, "drafts", drafts)
    return talk, other


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.5}])
def test_guesses_change_no_token_and_are_counted(conversations, settings):
    talk, other = conversations
    for question in ("hello", "again"):
        expected, answer = (each.ask(question, **ANSWER, **settings) for each in (other, talk))
        assert (answer.text, talk._state.tokens) == (expected.text, other._state.tokens)
        # The first token follows from the prompt; each forward then gives three right guesses and one more token.
        assert (answer.statistics.drafted_tokens, answer.statistics.accepted_tokens) == (14, 11)
        assert expected.statistics.drafted_tokens == 0
    for each in (other, talk):
        each.undo()
    expected, answer = (each.fork().ask("more", **ANSWER) for each in (other, talk))
    assert answer.text == expected.text


@pytest.mark.parametrize("most", [6, 7, 8])
def test_a_stop_within_a_burst_keeps_the_answer_so_far(conversations, most):
    (talk, other), tokens = conversations, []
    other.ask("hello", **ANSWER)
    answer = talk.ask("hello", **ANSWER, on_token=tokens.append, should_stop=lambda: len(tokens) == most)
    assert (answer.finish_reason, answer.statistics.generated_tokens) == ("stopped", most)
    assert answer.statistics.accepted_tokens > 0
    assert talk.cache.get_seq_length() == talk.context_tokens - 1
    other.reset()
    other.ask("hello", max_new_tokens=most)
    expected, answer = (each.ask("again", **ANSWER) for each in (other, talk))
    assert (answer.text, talk._state.tokens) == (expected.text, other._state.tokens)


@pytest.mark.parametrize("most", [6, 7, 8])
def test_an_interrupt_within_a_burst_leaves_the_conversation_as_it_was(conversations, most):
    def interrupted(count):
        if count == most:
            raise KeyboardInterrupt

    talk, other = conversations
    other.ask("hello", **ANSWER)
    with pytest.raises(KeyboardInterrupt):
        talk.ask("hello", **ANSWER, on_token=interrupted)
    assert talk.context_tokens == 0
    talk.ask("hello", **ANSWER)
    assert talk._state.tokens == other._state.tokens


def test_an_unknown_way_to_guess_is_refused(model):
    with pytest.raises(ConfigError, match="speculation is 'never'; it must be one of off, lookup, sparse, auto"):
        Conversation(model, TOKENIZER, speculation="never")


def test_an_untouched_model_guesses_nothing():
    talk = Conversation(new_model(), TOKENIZER, speculation="lookup")
    assert talk.ask("hello hello hello", **ANSWER).statistics.drafted_tokens == 0


@pytest.fixture(scope="module")
def guessing(tmp_path_factory):
    """A conversation whose draft model, of the same weights, is read from a folder, and one that guesses nothing."""
    folder = tmp_path_factory.mktemp("models") / "small"
    new_model().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    model = new_model("quest")
    talk, other = (Conversation(model, TOKENIZER, forks=1, speculation=way) for way in (str(folder), "off"))
    talk._generator._speculation.costs = FreeRows()
    return talk, other


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.5}])
def test_a_draft_model_follows_turns_forks_and_undone_questions(guessing, settings):
    talk, other = guessing
    draft = talk._generator._speculation.draft
    assert draft.name == "small"
    for each in (talk, other):
        each.reset()
    for question in ("hello", "again"):
        expected, answer = (each.ask(question, **ANSWER, **settings) for each in (other, talk))
        assert (answer.text, talk._state.tokens) == (expected.text, other._state.tokens)
        assert answer.statistics.drafted_tokens > 0
    for each in (other, talk):
        each.undo()
    expected, answer = (each.fork().ask("more", **ANSWER) for each in (other, talk))
    assert answer.text == expected.text
    assert answer.statistics.drafted_tokens > 0
