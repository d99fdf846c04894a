"""Mixed steps: a part of a prompt passes in one forward with other requests' tokens, and changes none of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_kv import SamplingParams
from hetero_kv.serving.part_size import LEAST_BESIDE
from tests.serving.tiny_engine import PROMPTS, alone, engine_of
from tests.support.slow_variants import with_few

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = SamplingParams(max_new_tokens=40, ignore_eos=True)


def counted_forwards(engine, monkeypatch):
    """The kinds of forwards of an engine from now on, and the tokens of parts that pass in them."""
    forward, kinds = engine._scheduler.forward, []
    for name in ("mixed", "prefill", "decode"):
        original = getattr(forward, name)

        def counting(*args, name=name, original=original):
            parts = {"mixed": lambda: [part for _, part in args[-1]], "prefill": lambda: [args[-1]], "decode": list}
            kinds.append((name, sum(len(part.tokens) for part in parts[name]())))
            return original(*args)

        monkeypatch.setattr(forward, name, counting)
    return kinds


@pytest.mark.parametrize("recipe", with_few(["dense", "quest", "adaptive", "retroinfer", "infllm", "loki"], ("loki",)))
def test_a_prompt_that_passes_beside_others_changes_no_answer(recipe, monkeypatch):
    with engine_of(recipe, longest_gap_s=1e-6) as engine:
        kinds = counted_forwards(engine, monkeypatch)
        streams = [engine.generate(tokens, LONG) for tokens in PROMPTS[:4]]
        answers = [stream.result().tokens for stream in streams]
        assert answers == [alone(engine, tokens, 40) for tokens in PROMPTS[:4]]
    parts = [tokens for kind, tokens in kinds if kind == "mixed"]
    assert parts
    assert set(parts[1:-1]) >= {LEAST_BESIDE}


@pytest.mark.parametrize("recipe", with_few(["dense", "quest", "adaptive", "retroinfer", "infllm", "loki"], ("quest",)))
def test_short_prompts_pass_in_one_forward_and_none_changes(recipe, monkeypatch):
    prompts = [PROMPTS[0], [*PROMPTS[2], 7], [*PROMPTS[2], 8, 9], PROMPTS[4], PROMPTS[7]]
    with engine_of(recipe) as engine:
        beside = engine.generate(PROMPTS[1], replace(LONG, max_new_tokens=80))
        engine.generate(PROMPTS[2], LONG).result()
        forward, taken = engine._scheduler.forward, []
        mixed = forward.mixed
        monkeypatch.setattr(forward, "mixed", lambda *args: taken.append(len(args[-1])) or mixed(*args))
        streams = [engine.generate(tokens, LONG) for tokens in prompts]
        assert [stream.result().tokens for stream in streams] == [alone(engine, tokens, 40) for tokens in prompts]
        assert beside.result().tokens == alone(engine, PROMPTS[1], 80)
    assert max(taken) > 2


@pytest.mark.parametrize("kind", with_few(["mixed", "decode"]))
def test_a_forward_of_several_requests_that_fails_behind_the_model_changes_none(kind, monkeypatch):
    with engine_of("quest", longest_gap_s=1e-6) as engine:
        forward, failures = engine._scheduler.forward, []
        compute, logits = getattr(forward, kind), forward._logits

        def failing(cache, token_ids):
            found = logits(cache, token_ids)
            if len(token_ids) > 1 and len(failures) < 3:
                failures.append(len(token_ids))
                raise MemoryError
            return found

        def fails(*args):
            with monkeypatch.context() as patch:
                patch.setattr(forward, "_logits", failing)
                return compute(*args)

        monkeypatch.setattr(forward, kind, fails)
        streams = [engine.generate(tokens, LONG) for tokens in PROMPTS[:3]]
        answers = [stream.result().tokens for stream in streams]
        assert answers == [alone(engine, tokens, 40) for tokens in PROMPTS[:3]]
        assert len(failures) == 3


@pytest.mark.parametrize("kind", with_few(["dynamic", "longrope"], 1))
def test_rows_of_a_model_whose_rotation_follows_the_longest_are_computed_alone(kind):
    half = [1.0 + 0.3 * index for index in range(8)]
    scaling = {
        "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        "longrope": {
            "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": half, "rope_theta": 10000.0,
            "original_max_position_embeddings": 64, "factor": 8.0,
        },
    }[kind]  # fmt: skip
    with engine_of("dense", "llama", {"rope_parameters": scaling}, longest_gap_s=1e-6) as engine:
        streams = [engine.generate(tokens, LONG) for tokens in PROMPTS[:4]]
        answers = [stream.result().tokens for stream in streams]
        assert answers == [alone(engine, tokens, 40) for tokens in PROMPTS[:4]]
        assert not engine._scheduler.forward.mixes
