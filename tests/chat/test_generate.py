"""Conversations on the small real model: later turns, stops, and agreement with the untouched model."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

import pytest

from hetero_kv import HeteroCache, HeteroKVError, eject, inject
from hetero_kv.chat.conversation import Conversation
from hetero_kv.engine.errors import CacheFullError

pytestmark = pytest.mark.model

TEXT = "The library opens at nine. " * 12 + "The librarian is called Oswald. " + "Dogs have to wait outside. " * 12
#: As many of the model's layers as tests need that look at a conversation and not at what it says.
FEW_LAYERS = 3
SETTINGS = {"block_size": 16, "local_windows_len": 32, "sink_tokens": 16, "top_k_blocks": 8, "kv_type": "FP32"}


@pytest.fixture(scope="module")
def shallow(smollm2):
    """The model's embeddings, its first layers, and its head: the same weights."""
    model = deepcopy(smollm2.model, {id(weights): weights for weights in smollm2.model.parameters()})
    del model.model.layers[FEW_LAYERS:]
    model.config.num_hidden_layers = FEW_LAYERS
    return replace(smollm2, model=model)


@contextmanager
def under_rules(loaded):
    inject(loaded.model, "ktransformers", command_line={**SETTINGS, "chunk_size": 100, "max_seq_len": 600})
    yield loaded
    eject(loaded.model)


@pytest.fixture
def injected(shallow):
    with under_rules(shallow) as loaded:
        yield loaded


@pytest.fixture
def injected_whole(smollm2):
    with under_rules(smollm2) as loaded:
        yield loaded


def conversation(loaded, **settings):
    return Conversation(loaded.model, loaded.tokenizer, **settings)


# tests/chat/test_one_answer.py has the same of a tiny model.
@pytest.mark.slow
def test_the_answer_is_the_untouched_models(smollm2):
    untouched = conversation(smollm2).ask(TEXT + "What is the librarian called?", max_new_tokens=8)
    inject(smollm2.model, "dense", command_line={"chunk_size": 100, "kv_type": "FP32"})
    try:
        answer = conversation(smollm2).ask(TEXT + "What is the librarian called?", max_new_tokens=8)
    finally:
        eject(smollm2.model)
    assert answer.text == untouched.text
    assert "Oswald" in answer.text


def test_a_second_question_prefills_only_its_own_tokens(injected):
    talk = conversation(injected)
    first = talk.ask(TEXT + "When does it open?", max_new_tokens=12)
    second = talk.ask("What is the librarian called?", max_new_tokens=12)
    assert second.statistics.prompt_tokens < 40 < first.statistics.prompt_tokens
    assert talk.cache.get_seq_length() == talk.context_tokens - 1


# Of tokenizers of every kind, without the model: tests/models/test_turns.py.
@pytest.mark.slow
def test_a_conversations_tokens_are_those_of_the_chat_template(injected_whole):
    talk = conversation(injected_whole)
    # Short answers that end by themselves.
    questions = "What is 1 + 1?", "And 2 + 2?"
    answers = [talk.ask(question, max_new_tokens=200).text for question in questions]
    messages = [
        {"role": "user", "content": questions[0]},
        {"role": "assistant", "content": answers[0]},
        {"role": "user", "content": questions[1]},
        {"role": "assistant", "content": answers[1]},
    ]
    whole = injected_whole.tokenizer.apply_chat_template(messages, tokenize=False)
    assert injected_whole.tokenizer.decode(talk._state.tokens) == whole.removesuffix("\n")


def test_the_covered_attention_mass_is_reported_when_it_is_measured(shallow):
    def recall(**settings):
        inject(shallow.model, "ktransformers", command_line={**SETTINGS, "max_seq_len": 600, **settings})
        try:
            return conversation(shallow).ask(TEXT + "When?", max_new_tokens=4).statistics.of_layers.get("block_recall")
        finally:
            eject(shallow.model)

    assert recall() is None
    little = recall(measure_recall=True, top_k_blocks=1)
    everything = recall(measure_recall=True, top_k_blocks="all")
    assert len(little) == shallow.model.config.num_hidden_layers
    assert all(0 < share < 1 for share in little)
    assert everything == pytest.approx([1] * len(little), abs=1e-5)


def test_the_streamed_pieces_are_the_answer(injected):
    pieces = []
    answer = conversation(injected).ask("Count from one to five.", max_new_tokens=24, on_text=pieces.append)
    assert len(pieces) > 1
    assert "".join(pieces).strip() == answer.text.strip()


def test_sampling_repeats_with_a_seed(injected):
    def sampled(seed):
        settings = {"max_new_tokens": 8, "temperature": 1.5, "top_p": 0.95, "seed": seed}
        return conversation(injected).ask("Tell me a story.", **settings).text

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_progress_runs_through_every_chunk_of_every_layer(injected):
    reports = []
    conversation(injected).ask(TEXT, max_new_tokens=1, on_progress=lambda *report: reports.append(report))
    tokens = reports[0][3]
    layers = injected.model.config.num_hidden_layers
    assert reports[0] == (0, layers, 0, tokens)
    assert reports[-1] == (layers, layers, tokens, tokens)
    assert len(reports) == 1 + layers * -(-tokens // 100)


def test_a_stop_during_prefill_leaves_the_conversation_as_it_was(injected):
    talk = conversation(injected)
    talk.ask("My name is Ada.", max_new_tokens=4)
    before, chunks = talk.context_tokens, []
    stopped = talk.ask(TEXT, on_progress=lambda *report: chunks.append(report), should_stop=lambda: len(chunks) > 4)
    assert (stopped.finish_reason, stopped.text) == ("stopped", "")
    assert len(chunks) == 5
    assert talk.context_tokens == before
    assert {layer.get_seq_length() for layer in talk.cache.layers} == {before - 1}
    assert talk.ask("What is my name?", max_new_tokens=12).finish_reason in ("end", "max_new_tokens")


def test_a_stop_while_answering_keeps_the_partial_answer(injected):
    talk, pieces = conversation(injected), []
    answer = talk.ask("Count to a hundred.", should_stop=lambda: len(pieces) > 5, on_text=pieces.append)
    assert answer.finish_reason == "stopped"
    assert answer.text.startswith("".join(pieces[:4]))
    assert talk.ask("Go on.", max_new_tokens=4).statistics.prompt_tokens < 30


def test_an_error_while_answering_leaves_the_conversation_as_it_was(injected):
    def broken(text):
        raise OSError("no terminal")

    talk = conversation(injected)
    with pytest.raises(OSError, match="no terminal"):
        talk.ask("Hello!", on_text=broken)
    assert talk.context_tokens == talk.cache.get_seq_length() == 0


def test_a_question_that_does_not_fit_names_max_seq_len(injected):
    talk = conversation(injected, max_seq_len=64)
    with pytest.raises(CacheFullError, match=r"max_seq_len is 64; set max_seq_len to at least \d+, shorten"):
        talk.ask(TEXT)
    assert talk.cache.get_seq_length() == 0


def test_an_answer_ends_when_the_store_is_full(injected):
    talk = conversation(injected, max_seq_len=60)
    answer = talk.ask("Count to a hundred.", max_new_tokens=200)
    assert answer.finish_reason == "full"
    assert talk.cache.get_seq_length() == 60


def test_forked_conversations_answer_as_if_each_were_alone(injected):
    questions = "What is the librarian called?", "When does it open?"

    def alone(question):
        talk = conversation(injected)
        talk.ask(TEXT + "Understood?", max_new_tokens=4)
        return talk.ask(question, max_new_tokens=8).text

    talk = conversation(injected, forks=1)
    talk.ask(TEXT + "Understood?", max_new_tokens=4)
    before = talk.context_tokens
    fork = talk.fork()
    answers = [each.ask(question, max_new_tokens=8) for each, question in zip((talk, fork), questions, strict=True)]
    assert [answer.text for answer in answers] == [alone(question) for question in questions]
    assert all(answer.statistics.prompt_tokens < 40 for answer in answers)
    talk.reset()
    assert fork.context_tokens > before
    assert fork.ask("Thank you.", max_new_tokens=4).statistics.prompt_tokens < 40


def test_an_untouched_models_conversation_can_be_forked_too(shallow):
    talk = conversation(shallow)
    talk.ask("My name is Ada.", max_new_tokens=4)
    fork = talk.fork()
    fork.ask("Hello!", max_new_tokens=4)
    assert talk.cache.get_seq_length() == talk.context_tokens - 1 < fork.context_tokens


def test_forks_that_share_the_room_of_one_say_so_before_they_answer(injected):
    talk = conversation(injected, max_seq_len=300)
    talk.ask("My name is Ada.", max_new_tokens=2)
    fork = talk.fork()
    talk.ask(TEXT, max_new_tokens=2)
    with pytest.raises(CacheFullError, match="reset or drop a fork"):
        fork.ask(TEXT)
    talk.reset()
    fork.ask(TEXT, max_new_tokens=2)
    assert fork.ask("What is the librarian called?", max_new_tokens=4).finish_reason == "max_new_tokens"


def test_a_conversation_is_not_forked_in_the_middle_of_an_answer(injected):
    talk = conversation(injected)
    with pytest.raises(HeteroKVError, match="an answer is being generated; fork the conversation before or after"):
        talk.ask("Count to a hundred.", max_new_tokens=20, on_text=lambda text: talk.fork())


def test_an_empty_question_is_an_error(injected):
    with pytest.raises(HeteroKVError, match="the question is empty"):
        conversation(injected).ask("  \n")


def test_generate_works_with_transformers_own_streamer_and_stop_strings(injected_whole):
    from transformers import TextIteratorStreamer

    tokenizer = injected_whole.tokenizer
    prompt = tokenizer("One, two, three, four,", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    output = injected_whole.model.generate(
        **prompt,
        past_key_values=HeteroCache(injected_whole.model),
        max_new_tokens=20,
        do_sample=False,
        stop_strings=[" seven"],
        tokenizer=tokenizer,
        streamer=streamer,
    )
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer.endswith("seven")
    assert "".join(streamer) == answer


def test_without_a_chat_template_no_word_of_the_question_is_dropped(smollm2):
    from copy import copy

    from hetero_kv.models.turns import TurnTokens

    tokenizer = copy(smollm2.tokenizer)
    tokenizer.chat_template = None
    tokens = tokenizer("the the cat", add_special_tokens=False)["input_ids"]
    assert TurnTokens(tokenizer).following("the the cat", last_token=tokens[0]) == tokens
