"""Retrieval of single tokens, whatever chooses them: exact where all are attended to, and whole in every history."""

from __future__ import annotations

import pytest
import torch
from ragged_rows import alone, assert_same_but_for_rounding, prompt
from small_recipes import new_cache, small_recipe
from token_problem import TokenProblem

from hetero_kv import inject
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.evals.budget import attended_tokens
from hetero_kv.families.token_retrieval import choosers

pytestmark = pytest.mark.usefixtures("one_thread")

#: Settings with which a step attends to all tokens, by their scores, and to how many of 100 it does else.
COVERING = {
    "infinigen": {"token_budget": 1.0, "alpha": 1e9},
    "loki": {"token_budget": 1.0},
    # A bit tells apart only what lies on opposite sides.
    "magicpig": {"hash_bits": 1, "hash_tables": 400},
    "retroinfer": {"exact_clusters": 1.0, "cluster_tokens": 4},
    "sparq": {"token_budget": 1.0},
}
ATTENDED = {"infinigen": 12, "loki": 27, "magicpig": 40, "retroinfer": 8, "sparq": 12}
CHOOSERS = sorted(COVERING)
SMALLER = {"block_size": 4, "initial_len": 4, "local_windows_len": 8}


def test_every_chooser_is_tested():
    assert sorted(choosers.names()) == CHOOSERS


@pytest.mark.parametrize("chooser", CHOOSERS)
@pytest.mark.parametrize("kv_type", ["FP16", "Q8_0", "Q4_0"])
def test_a_step_that_takes_all_tokens_is_full_attention(chooser, kv_type):
    problem = TokenProblem(chooser, kv_type=kv_type, dim=32, block=32, **COVERING[chooser])
    answer, out, lse = problem.answered()
    scores = problem.scores
    assert answer.tokens == problem.asked.tokens == int(problem.in_context.sum())
    torch.testing.assert_close(out, scores.softmax(dim=3) @ problem.values, rtol=1e-4, atol=1e-4)
    for found in (lse, torch.logaddexp(answer.mass, problem.around[1])):
        torch.testing.assert_close(found, scores.logsumexp(dim=3), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("chooser", CHOOSERS)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss"])
def test_a_model_whose_steps_take_all_tokens_is_the_untouched_one(chooser, architecture, model_of, monkeypatch):
    model, tokens = model_of(architecture), torch.stack([prompt(90, 1), prompt(90, 2)])
    with torch.no_grad():
        expected = model(tokens).logits
    inject(model, small_recipe(chooser, **SMALLER), command_line={**COVERING[chooser], "dense_layer_num": 0})
    monkeypatch.setattr(choosers.get(chooser).implementation, "covers", lambda *_: False)
    cache = new_cache(model)
    with torch.no_grad():
        parts = [tokens[:, :50], *tokens[:, 50:80].split(1, dim=1), tokens[:, 80:]]
        found = torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.fixture(params=CHOOSERS)
def model(request, model_of):
    """A tiny Llama, its first layer dense, in which blocks enter the Context while answering."""
    model = model_of("llama")
    inject(model, small_recipe(request.param, **SMALLER, dense_layer_num=1))
    return model


def said(model, cache, *script):
    return alone(model, cache, script)


def test_forks_go_on_by_themselves(model):
    cache = new_cache(model)
    said(model, cache, prompt(61, 0), 9)
    twin, third = cache.fork(), cache.fork()
    scripts = [(prompt(7, seed), 12) for seed in range(3)]
    answers = [said(model, each, *script) for each, script in zip((cache, twin, third), scripts, strict=True)]
    for answer, script in zip(answers, scripts, strict=True):
        fresh = new_cache(model)
        said(model, fresh, prompt(61, 0), 9)
        assert torch.equal(said(model, fresh, *script), answer)


@pytest.mark.parametrize("kept", [58, 43, 21])
def test_what_is_forgotten_leaves_no_trace(model, kept, request):
    if kept == 58 and "retroinfer" in request.node.callspec.params.values():
        # A cluster has tokens of several blocks: those that closed with a block stay so while all their tokens do.
        kept = 60
    cache, fresh, whole = new_cache(model), new_cache(model), new_cache(model)
    first, second, script = prompt(40, 0), prompt(22, 1), (prompt(9, 2), 11)
    said(model, cache, first, second)
    other = cache.fork()
    cache.crop(kept - 62)
    answer = said(model, cache, *script)
    # What was learned of tokens that are gone is learned anew when the next prompt has passed, of all.
    turns = (first, second[: kept - 40], *script) if kept > 40 else (torch.cat([first[:kept], script[0]]), script[1])
    assert_same_but_for_rounding(answer, said(model, fresh, *turns)[-len(answer) :])
    said(model, whole, first, second)
    assert torch.equal(said(model, other, *script), said(model, whole, *script))


def test_a_saved_context_goes_on_bit_for_bit(model, tmp_path):
    cache = new_cache(model)
    said(model, cache, prompt(61, 0), 9)
    cache.save(tmp_path / "context.safetensors")
    loaded = new_cache(model, load=tmp_path / "context.safetensors")
    assert loaded.statistics == cache.statistics
    script = prompt(5, 1), 20
    assert torch.equal(said(model, loaded, *script), said(model, cache, *script))
    assert loaded.statistics == cache.statistics


def test_what_is_kept_is_what_the_plan_counts(model):
    cache = new_cache(model)
    said(model, cache, prompt(61, 0), 9)
    for operator, layer in zip(model.hetero_kv_injection.attention_operators(), cache.layers, strict=True):
        pool = layer.pool
        stored = operator.footprint(KVShape(pool.keys.shape[1], 16, 16)).stored
        assert stored.total * pool.block_size == pytest.approx(pool.bytes_per_block)
    assert not cache.layers[0].pool.beside
    assert cache.layers[1].pool.beside


def test_steps_are_counted(model, request):
    chooser = choosers.get(request.node.callspec.params["model"])
    cache = new_cache(model)
    said(model, cache, prompt(120, 0), 1)
    counted = cache.statistics
    # 4 tokens of the sink, 108 of the Context, 9 others.
    dense, chosen, _ = counted["attended_tokens"]
    assert dense is None
    assert chosen == pytest.approx(ATTENDED[chooser.name], rel=1.0)
    assert counted["read_bytes"][1] > 12 * 2 * 2 * 16 * 4
    assert counted["read_bytes"][0] == 121 * 2 * 2 * 16 * 4
    of_model = attended_tokens(model.hetero_kv_injection, 120)
    assert 120 / 3 < of_model < 120
