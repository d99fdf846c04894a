"""What a request cannot mean is refused; what it means has an effect."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hetero_kv import SamplingParams
from hetero_kv.errors import ConfigError, HeteroKVError
from hetero_kv.serving.model_answers import ModelAnswers
from tests.serving.number_tokenizer import Numbers
from tests.serving.tiny_engine import GREEDY, PROMPTS, engine_of
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 2.5), ("top_k", 2.5), ("seed", 1.0), ("logprobs", True), ("ends", (1.5,)),
        ("logit_bias", {5.7: 1.0}), ("logit_bias", {"5": 1.0}),
    ],
)  # fmt: skip
def test_numbers_that_are_not_whole_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("prompt", [[5.7, 6.2], ["5", "6"], torch.tensor([[5, 6]])], ids=["floats", "texts", "rows"])
def test_a_prompt_is_a_text_or_a_list_of_token_ids(prompt):
    with engine_of("dense") as engine, pytest.raises(HeteroKVError, match="give a text, or one list of token ids"):
        engine.generate(prompt)


def test_token_ids_of_any_integer_type_are_a_prompt():
    with engine_of("dense") as engine:
        expected = engine.generate(PROMPTS[2], GREEDY).result().tokens
        assert engine.generate(torch.tensor(PROMPTS[2]), GREEDY).result().tokens == expected


def test_ends_that_the_model_does_not_have_are_refused():
    with engine_of("dense") as engine, pytest.raises(HeteroKVError, match="ends has token 99999"):
        engine.generate(PROMPTS[0], SamplingParams(ends=(99999,)))


def test_the_models_ends_are_those_of_the_moment():
    with engine_of("dense") as engine:
        second = engine.generate(PROMPTS[2], GREEDY).result().tokens[1]
        engine._scheduler.forward.model.generation_config.eos_token_id = second
        answer = engine.generate(PROMPTS[2], replace(GREEDY, ignore_eos=False)).result()
        assert answer.finish_reason == "end"
        assert answer.tokens[-1] == second


def test_tokens_that_the_model_suppresses_never_come():
    with engine_of("dense") as engine:
        first = engine.generate(PROMPTS[2], GREEDY).result().tokens[0]
        engine._scheduler.forward.model.generation_config.suppress_tokens = [first]
        assert first not in engine.generate(PROMPTS[2], GREEDY).result().tokens


def test_settings_of_a_generation_config_that_nothing_applies_are_named(caplog):
    model = tiny_model("llama")
    ModelAnswers(model, Numbers())
    assert not caplog.messages
    model.generation_config.update(no_repeat_ngram_size=3, num_beams=1, min_new_tokens=2)
    ModelAnswers(model, Numbers())
    (message,) = caplog.messages
    assert "sets min_new_tokens=2, no_repeat_ngram_size=3, which only model.generate applies" in message


def test_a_stop_text_that_spells_a_control_token_stops_at_the_token(monkeypatch):
    with engine_of("dense") as engine:
        tokens = engine.generate(PROMPTS[2], GREEDY).result().tokens
        monkeypatch.setitem(engine._inputs.answers._special, "<|end|>", tokens[1])
        answer = engine.generate(PROMPTS[2], replace(GREEDY, stop=("<|end|>",))).result()
        assert (answer.finish_reason, answer.stop_text, answer.tokens) == ("stop_text", "<|end|>", tokens[:2])


def test_a_wait_ends_in_time_where_the_reader_computes():
    with engine_of("dense") as engine:
        stream = engine.generate(PROMPTS[2], GREEDY)
        with pytest.raises(TimeoutError):
            stream.result(timeout=0)
        assert stream.result().tokens


def test_a_mask_that_returns_logits_fails_its_request():
    mask = SimpleNamespace(apply=lambda logits: logits.clone(), accept=lambda token: None)
    with engine_of("dense") as engine, pytest.raises(HeteroKVError, match="must change the logits in place"):
        engine.generate(PROMPTS[2], replace(GREEDY, mask=mask)).result()
