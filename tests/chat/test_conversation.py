"""Conversations on a tiny random model: stops, errors and interrupts leave them consistent under every method."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

import hetero_kv
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.retrieval.observation import Observation
from hetero_kv.families.retrieval.settings import UNKNOWN_QUESTION
from hetero_kv.models.turns import TurnTokens
from tests.chat.tiny_conversations import FEW, TOKENIZER, conversation, new_model, replies
from tests.support.devices import simulated_cuda
from tests.support.slow_variants import with_slow
from tests.support.small_recipes import small_recipe
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizers import END

pytestmark = pytest.mark.usefixtures("one_thread")

PACKAGE = Path(hetero_kv.__file__).parent
#: Where an interrupt between the model's work and the bookkeeping may come; the model's own has tests in tests/engine.
BOOKKEEPING = {
    str(PACKAGE / name)
    for name in (
        "chat/conversation.py",
        "chat/answer.py",
        "chat/answer_generator.py",
        "chat/answer_text.py",
        "chat/fitting.py",
        "chat/generation_monitor.py",
        "models/turns.py",
        "models/text_encoding.py",
        "serving/answer_tokens.py",
        "serving/speculation/burst.py",
        "serving/growing_answer.py",
        "serving/sampler.py",
        "serving/text_stream.py",
    )
}


@pytest.mark.cuda
def test_the_peak_of_gpu_memory_is_that_of_the_models_gpu():
    with simulated_cuda(devices=2):
        elsewhere = conversation(new_model()).ask("What?", **FEW).statistics
        model = new_model()
        hetero_kv.inject(model.to("cuda:1"), small_recipe("ktransformers", chunk_size=16))
        statistics = conversation(model).ask("What?", **FEW).statistics
        assert statistics.peak_vram_bytes == torch.cuda.max_memory_allocated("cuda:1") > 0
        assert statistics.kv_device_bytes > 0
        assert torch.cuda.max_memory_allocated("cuda:0") == 0
    assert elsewhere.peak_vram_bytes is None


def test_the_observation_window_is_the_question_and_not_the_document(monkeypatch):
    watched = []

    def observation(window):
        watched.append(window)
        return Observation(window)

    monkeypatch.setattr("hetero_kv.families.retrieval.prefill.Observation", observation)
    model = tiny_model("llama", vocab_size=len(TOKENIZER), eos_token_id=None, max_position_embeddings=4096)
    settings = {"preselect_block": True, "preselect_block_count": 2, "local_windows_len": 64, "max_seq_len": 3000}
    # Stored as elsewhere in these tests.
    settings["kv_type"] = "FP32"
    hetero_kv.inject(model, "ktransformers", command_line=settings)
    talk, turns = conversation(model), TurnTokens(TOKENIZER)
    document, question = "a text of no use\n" * 60, "What is asked?"
    talk.ask(question, document=document, **FEW)
    template = turns.first("")
    behind = len(template) - template.index(TOKENIZER.convert_tokens_to_ids(END))
    assert set(watched) == {len(turns.text(question)) + behind}
    watched.clear()
    talk.ask(question + question, **FEW)
    assert set(watched) == {len(turns.text(question + question)) + behind}
    watched.clear()
    talk.ask(document * 2 + question, **FEW)
    assert set(watched) == {UNKNOWN_QUESTION}


def test_a_document_stands_before_its_question(model):
    talk = conversation(model)
    talk.ask("hello", document="a text\n\n", **FEW)
    said = conversation(model)
    said.ask("a text\n\nhello", **FEW)
    assert talk._state.tokens == said._state.tokens


def test_a_stop_while_answering_keeps_the_partial_answer(model):
    talk, looks = conversation(model), []
    answer = talk.ask("hello", max_new_tokens=40, should_stop=lambda: looks.append(0) or len(looks) > 20)
    assert answer.finish_reason == "stopped"
    assert 2 < answer.statistics.generated_tokens < 40
    assert talk.context_tokens == answer.statistics.context_tokens == talk.cache.get_seq_length() + 1
    # The turn that was cut short is ended, and its last token passed, before the next.
    assert talk.ask("hello", **FEW).statistics.prompt_tokens == len(talk._turns.following("hello", -1)) + 1


def test_a_stop_during_prefill_leaves_the_conversation_as_it_was():
    model = new_model("ktransformers")
    talk, other = conversation(model), conversation(model)
    assert replies(talk, "hello") == replies(other, "hello")
    before, chunks = talk.context_tokens, []
    stopped = talk.ask("hello " * 30, on_progress=lambda *at: chunks.append(at), should_stop=lambda: len(chunks) > 6)
    assert (stopped.finish_reason, stopped.text, len(chunks)) == ("stopped", "", 7)
    assert stopped.statistics.context_tokens == talk.context_tokens == before
    assert replies(talk, "again") == replies(other, "again")


class OutOfMemory(HeteroKVError):
    """An error of ours that the conversation knows nothing of."""


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemory("no memory"),
        pytest.param(OSError("no terminal"), marks=pytest.mark.slow),
        KeyboardInterrupt(),
    ],
)
def test_an_error_while_answering_leaves_the_conversation_as_it_was(model, error):
    def broken(text):
        raise error

    talk, other = conversation(model), conversation(model)
    assert replies(talk, "hello") == replies(other, "hello")
    before = talk.context_tokens
    with pytest.raises(type(error)):
        talk.ask("never", on_text=broken)
    assert talk.context_tokens == before
    assert replies(talk, "again", "more") == replies(other, "again", "more")


class Interruption:
    """Raises KeyboardInterrupt at one of the moments of the bookkeeping, before a line or an instruction of it runs.

    Args:
        at: the moment, from 0; None counts only.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at, self.passed, self.where = at, 0, ""

    def run(self, call):
        sys.settrace(self._enter)
        try:
            return call()
        finally:
            sys.settrace(None)

    def _enter(self, frame, event, _):
        if frame.f_code.co_filename not in BOOKKEEPING:
            return None
        frame.f_trace_opcodes = frame.f_code.co_name in ("_answer", "ask", "_prompt", "generate")
        return self._step

    def _step(self, frame, event, _):
        if event in ("line", "opcode"):
            self.passed += 1
            if self.passed - 1 == self.at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                sys.settrace(None)
                raise KeyboardInterrupt(self.where)
        return self._step


# Of the last moments every fifth, or all of them.
@pytest.mark.parametrize("step", with_slow([5, 1], slow=[1]))
def test_an_interrupt_at_any_moment_of_the_bookkeeping_leaves_a_conversation_that_goes_on(model, step):
    """The state is the one before the question or, behind the last line, the one after its answer."""
    begun = conversation(model, forks=1)
    begun.ask("hello", **FEW)
    without, answered = begun.fork(), begun.fork()
    question = f"twice{END}"
    # What is made once is made, and Python traces instructions: from 3.12 on it does so after a first traced call.
    Interruption().run(lambda: begun.fork().ask(question, **FEW))
    counted = Interruption()
    counted.run(lambda: answered.ask(question, **FEW))
    expected = {without.context_tokens: replies(without, "more"), answered.context_tokens: replies(answered, "more")}
    moments = range(counted.passed)
    assert len(moments) > 300
    found = set()
    for at in [*random.Random(0).sample(moments, 4), *moments[-1:-25:-step]]:
        talk = begun.fork()
        interruption = Interruption(at)
        with pytest.raises(KeyboardInterrupt):
            interruption.run(lambda talk=talk: talk.ask(question, **FEW))
        said = talk.context_tokens
        found.add(said)
        assert replies(talk, "more") == expected[said], interruption.where
        assert talk.fork().context_tokens == talk.context_tokens
    assert found == {*expected}
