"""Adapters that are switched and hooks that are set while an engine answers."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hetero_kv import SamplingParams
from hetero_kv.contexts.present_state import PresentState
from hetero_kv.rules import injection
from tests.serving.tiny_engine import GREEDY, PROMPTS, computed_alone, engine_of

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = SamplingParams(max_new_tokens=60, ignore_eos=True)


def adapted(engine):
    torch.manual_seed(5)
    model = get_peft_model(
        engine._scheduler.forward.model, LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def steps(engine, number):
    for _ in range(number):
        engine.step()


def test_tokens_decoded_without_an_adapter_are_no_beginning_under_it():
    with engine_of("dense") as engine:
        model = adapted(engine)
        stream = engine.generate(PROMPTS[2], LONG)
        steps(engine, 3)
        with model.disable_adapter():
            steps(engine, 5)
        turn = [*PROMPTS[2], *stream.result().tokens, 7, 8]
        following = engine.generate(turn, GREEDY).result()
        assert following.cached_tokens == 0
        assert following.tokens == computed_alone(engine, turn)


def test_a_part_computed_without_an_adapter_is_no_beginning_under_it():
    with engine_of("dense", longest_gap_s=1e-6, part=8) as engine:
        model = adapted(engine)
        beside = engine.generate(PROMPTS[1], LONG)
        while not engine._queues.running:
            steps(engine, 1)
        stream = engine.generate(PROMPTS[3], GREEDY)
        steps(engine, 2)
        assert engine._queues.prefilling
        with model.disable_adapter():
            steps(engine, 1)
        assert engine._queues.prefilling
        stream.result()
        beside.cancel()
        turn = [*PROMPTS[3], 7, 8]
        following = engine.generate(turn, GREEDY).result()
        assert following.cached_tokens == 0
        assert following.tokens == computed_alone(engine, turn)


@pytest.mark.parametrize("settings", [{"longest_gap_s": 1e-6}, {"part": 50}], ids=["beside another", "in parts"])
def test_a_hook_that_looks_across_tokens_sees_those_that_it_sees_alone(settings):
    def last(module, arguments, hidden):
        hidden = hidden.clone()
        hidden[:, -1] += 0.7
        return hidden

    with engine_of("dense", **settings) as engine:
        engine._scheduler.forward.model.model.layers[1].wrapped.mlp.register_forward_hook(last)
        beside = engine.generate(PROMPTS[1], LONG)
        steps(engine, 2)
        answer = engine.generate(PROMPTS[3], GREEDY).result()
        beside.cancel()
        assert answer.tokens == computed_alone(engine, PROMPTS[3])


def test_a_step_looks_at_the_weights_once_and_every_step_again(monkeypatch):
    looks = []
    monkeypatch.setattr(injection, "PresentState", lambda model: looks.append(1) or PresentState(model))
    with engine_of("dense") as engine:
        beside = engine.generate(PROMPTS[1], LONG)
        steps(engine, 2)
        del looks[:]
        streams = [engine.generate([*PROMPTS[1], token], GREEDY) for token in (7, 8, 9)]
        steps(engine, 1)
        assert len(looks) == 1
        assert all(each.reuse.tokens for each in streams)
        for _ in range(20):
            steps(engine, 1)
        assert 1 < len(looks) <= 21
        beside.cancel()
