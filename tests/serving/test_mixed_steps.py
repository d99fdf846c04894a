"""Mixed steps: a part of a prompt passes in one forward with other requests' tokens, and changes none of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hetero_kv import HeteroCache, SamplingParams, inject
from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.adapter.fused_decode_layer import FusedDecodeLayer
from hetero_kv.cpu_ops.amx_tiles import multiplies_by_tiles
from hetero_kv.cpu_ops.threads import at_most
from hetero_kv.engine.errors import DamagedContextError
from hetero_kv.serving import scheduler
from hetero_kv.serving.forward import ModelForward, Part
from hetero_kv.serving.part_size import LEAST_BESIDE, SMALL, SMALL_BY_TILES
from tests.serving.tiny_engine import PROMPTS, alone, engine_of
from tests.support.bfloat16_errors import require_as_exact
from tests.support.slow_variants import with_few
from tests.support.small_recipes import RECIPES
from tests.support.tiny_models import tiny_model

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
    with engine_of(recipe, longest_gap_s=1e-6, part=LEAST_BESIDE) as engine:
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


@pytest.mark.parametrize("recipe", with_few(RECIPES, ("dense", "adaptive", "snapkv")))
def test_a_short_prompt_passes_in_a_mixed_forward_though_nothing_is_decoded(recipe, monkeypatch):
    prompts = PROMPTS[0], PROMPTS[2], [*PROMPTS[2], 7, 8, 9]
    monkeypatch.setattr(scheduler, "_NOTICED_S", math.inf)
    with engine_of(recipe) as engine:
        kinds = counted_forwards(engine, monkeypatch)
        answers = [engine.generate(tokens, LONG).result() for tokens in prompts]
        computed = [len(tokens) - each.cached_tokens for tokens, each in zip(prompts, answers, strict=True)]
        assert [each.tokens for each in answers] == [alone(engine, tokens, 40) for tokens in prompts]
        mixes = engine._scheduler.forward.mixes
    assert [each for each in kinds if each[0] != "decode"] == [
        ("mixed" if mixes and tokens <= SMALL else "prefill", tokens) for tokens in computed
    ]
    # Recipes whose layers keep every token share the second prompt's beginning.
    assert recipe not in ("dense", "quest", "adaptive") or computed == [5, 130, 3]


@pytest.mark.parametrize(("prompt", "kind"), [(PROMPTS[0], "mixed"), (PROMPTS[1], "prefill")])
def test_a_prompt_that_takes_a_slow_model_long_can_be_cancelled_between_two_layers(prompt, kind, monkeypatch):
    with engine_of() as engine:
        kinds = counted_forwards(engine, monkeypatch)
        # Five tokens take a third of a second, as far as is known, and 61 take four.
        engine._scheduler._part_size.passed(60, 4.0)
        engine.generate(prompt, LONG).result()
        assert [each for each in kinds if each[0] != "decode"] == [(kind, len(prompt))]


def test_a_short_prompt_alone_passes_through_the_fused_layers_of_packed_weights():
    model = tiny_model("qwen2")
    inject(model, "dense", command_line={"block_size": 4, "max_seq_len": 256, "kv_type": "FP32", "weights": "q8_0"})
    forward, tokens = ModelForward(model), PROMPTS[1]
    cache, own = HeteroCache(model), HeteroCache(model)
    for each in (cache, own):
        forward.prefill(each, Part(tokens, 0, 40, 0, None))
    logits = forward.mixed([], [], [(cache, Part(tokens, 40, 61, 0, None))])[0]
    expected = [forward.decode([own], [token])[0] for token in tokens[40:]][-1]
    assert torch.linalg.vector_norm(logits - expected) < 1e-3 * torch.linalg.vector_norm(expected)
    layers = [module for module in model.modules() if isinstance(module, ChunkedDecoderLayer)]
    assert all(isinstance(layer._native, FusedDecodeLayer) for layer in layers)


@pytest.mark.parametrize("count", [20, 37, 61])
def test_a_short_prompt_in_bfloat16_by_two_threads_is_that_of_one_forward(count):
    model, exact = tiny_model("qwen2").to(torch.bfloat16), tiny_model("qwen2").to(torch.bfloat16).float()
    for each in (model, exact):
        inject(each, "dense", command_line={"block_size": 16, "max_seq_len": 256, "threads_num": at_most(2)})
    forward, part = ModelForward(model), Part(PROMPTS[1][:count], 0, count, 0, None)
    logits = forward.mixed([], [], [(HeteroCache(model), part)])[0]
    expected = forward.prefill(HeteroCache(model), part)
    require_as_exact(logits, expected, ModelForward(exact).prefill(HeteroCache(exact), part))


@pytest.mark.skipif(not multiplies_by_tiles(), reason="this CPU has no tiles of bfloat16")
@pytest.mark.parametrize(
    ("architecture", "recipe"), with_few([("qwen2", "dense"), ("gemma2", "dense"), ("qwen3", "adaptive")], 2)
)
def test_a_large_part_takes_tiles_and_changes_no_bit_of_the_answers_beside_it(architecture, recipe):
    model = tiny_model(architecture).to(torch.bfloat16)
    inject(model, recipe, command_line={"block_size": 16, "max_seq_len": 400, "weights": "q8_0"})
    forward, tokens = ModelForward(model), PROMPTS[3]
    assert forward.most_beside == SMALL_BY_TILES
    caches, alone_caches = [[HeteroCache(model) for _ in range(3)] for _ in range(2)]
    for cache, other, start in zip(caches, alone_caches, (20, 31, 44), strict=True):
        for each in (cache, other):
            forward.prefill(each, Part(tokens, 0, start, start, None))
    logits = forward.mixed(caches[:2], [7, 8], [(caches[2], Part(tokens, 44, 200, 0, None))]).float()
    assert torch.equal(logits[:2], forward.decode(alone_caches[:2], [7, 8]).float())
    expected = forward.prefill(alone_caches[2], Part(tokens, 44, 200, 0, None)).float()
    assert torch.linalg.vector_norm(logits[2] - expected) < 3e-2 * torch.linalg.vector_norm(expected)
    layers = [module for module in model.modules() if isinstance(module, ChunkedDecoderLayer)]
    assert all(isinstance(layer._native, FusedDecodeLayer) for layer in layers)


@pytest.mark.parametrize(("dtype", "weights"), [(torch.float32, "q8_0"), (torch.bfloat16, "auto")])
def test_parts_beside_answers_stay_small_without_products_by_tiles(dtype, weights):
    model = tiny_model("qwen2").to(dtype)
    inject(model, "dense", command_line={"block_size": 16, "max_seq_len": 400, "weights": weights})
    assert ModelForward(model).most_beside == SMALL


def test_a_file_that_changes_under_a_prompt_is_noticed_in_a_mixed_forward():
    class ChangedFile:
        def require_unchanged(self):
            raise DamagedContextError("changed")

    with engine_of() as engine:
        forward = engine._scheduler.forward
        cache = forward.new_cache(engine._store)
        cache.mapped_files = (ChangedFile(),)
        with pytest.raises(DamagedContextError):
            forward.mixed([], [], [(cache, Part(PROMPTS[0], 0, 5, 0, None))])
        cache.mapped_files = ()
        forward.mixed([], [], [(cache, Part(PROMPTS[0], 0, 5, 0, None))])
        assert cache.get_seq_length() == 5


@pytest.mark.parametrize("kind", with_few(["mixed", "decode"]))
def test_a_forward_of_several_requests_that_fails_behind_the_model_changes_none(kind, monkeypatch):
    with engine_of("quest", longest_gap_s=1e-6, part=LEAST_BESIDE) as engine:
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
