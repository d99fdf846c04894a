"""How the tokens of answers are chosen, and what ends an answer."""

from __future__ import annotations

import pytest
import torch

import hetero_kv
from hetero_kv import Engine, SamplingParams
from hetero_kv.errors import ConfigError
from hetero_kv.models.loading import LoadedModel
from tests.chat.tiny_conversations import TOKENIZER, conversation, new_model
from tests.support.slow_variants import with_few
from tests.support.small_recipes import small_recipe
from tests.support.tiny_models import tiny_model

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


@pytest.mark.parametrize("recipe", with_few([None, "dense", "quest"], quick=2))
@pytest.mark.parametrize(
    "architecture", with_few(["llama", "bamba", "qwen3_next", "gemma2", "gpt_oss", "deepseek_v3", "lfm2"], quick=2)
)
def test_greedy_answers_are_those_of_transformers_generate(architecture, recipe):
    model = tiny_model(architecture, vocab_size=len(TOKENIZER), eos_token_id=None)
    if recipe is not None:
        hetero_kv.inject(model, small_recipe(recipe, chunk_size=16, kv_type="FP32"))
    settings = {"max_new_tokens": 6, "repetition_penalty": 1.3}

    def generated(prompt):
        ids = torch.tensor([prompt])
        return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **settings)[0].tolist()

    talk = conversation(model)
    talk.ask("hello hello", **settings)
    assert talk._state.tokens == generated(talk._state.tokens[: talk.turns[0].question])
    # What the checkpoint's generation config asks of every answer.
    first, *_, last = talk._state.tokens[talk.turns[0].question :]
    model.generation_config.suppress_tokens = [first]
    model.generation_config.eos_token_id = [last, talk._state.tokens[-2]]
    talk.reset()
    talk.ask("hello hello", **settings)
    answered = talk._state.tokens[talk.turns[0].question :]
    assert talk._state.tokens == generated(talk._state.tokens[: talk.turns[0].question])
    assert first not in answered


@pytest.mark.parametrize("drawing", [{}, {"frequency_penalty": 1.5, "logit_bias": {7: 3.0}}])
def test_a_seed_draws_the_tokens_that_an_engine_draws(drawing):
    model = new_model("ktransformers")
    settings = {"max_new_tokens": 8, "temperature": 2.0, "top_p": 0.9, "min_p": 0.01, "seed": 11, **drawing}
    talk = conversation(model)
    talk.ask("hello", **settings)
    question = talk.turns[0].question
    with Engine(LoadedModel(model, TOKENIZER, "tiny", 512), max_seq_len=256, starts_thread=False) as engine:
        answer = engine.generate(talk._state.tokens[:question], SamplingParams(**settings)).result()
    assert talk._state.tokens[question:] == list(answer.tokens)


def test_penalties_and_biases_change_greedy_answers_too(model):
    def said(**settings):
        talk = conversation(model)
        talk.ask("hello", max_new_tokens=24, **settings)
        return talk._state.tokens[-24:]

    assert len({*said(presence_penalty=1e6)}) == len({*said(frequency_penalty=1e6)}) == 24 > len({*said()})
    assert {*said(logit_bias={65: 1e6})} == {65}


def test_a_setting_outside_its_range_leaves_the_conversation_as_it_was(model):
    talk = conversation(model)
    with pytest.raises(ConfigError, match="top_p is 0; it must be more than 0"):
        talk.ask("hello", top_p=0)
    assert talk.context_tokens == 0


def test_a_stop_text_that_spells_a_control_token_ends_the_answer_without_a_text(model):
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    answer = conversation(model).ask("hello", max_new_tokens=12, stop="<|im_end|>", logit_bias={end: 1e6})
    assert (answer.finish_reason, answer.text, answer.statistics.generated_tokens) == ("stop_text", "", 1)
