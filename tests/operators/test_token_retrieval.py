"""Retrieval of single tokens by every chooser: exact under covering budgets, consistent in every history."""

from __future__ import annotations

import itertools

import pytest
import torch

from hetero_kv import inject
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.evals.budget import attended_tokens
from hetero_kv.families.token_retrieval import choosers
from hetero_kv.families.token_retrieval.choosers.retroinfer import RetroInfer
from hetero_kv.rules.rule_file import parse_rules
from tests.support.ragged_rows import Batch, alone, assert_same_but_for_rounding, prompt
from tests.support.slow_variants import combined, with_slow
from tests.support.small_recipes import ENGINE, new_cache, small_recipe, with_settings
from tests.support.tiny_models import tiny_model
from tests.support.token_problem import TokenProblem

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
SMALLER = {"block_size": 4, "sink_tokens": 4, "local_windows_len": 8}


def test_every_chooser_is_tested():
    assert sorted(choosers.names()) == CHOOSERS


# A chooser that keeps clusters, and numbers in groups.
_QUICK_STORED = ("retroinfer", "FP16"), ("sparq", "Q8_0")
_STORED = list(itertools.product(CHOOSERS, ["FP16", "Q8_0", "Q4_0"]))


@pytest.mark.parametrize(("chooser", "kv_type"), with_slow(_STORED, slow={*_STORED} - {*_QUICK_STORED}))
def test_a_step_that_takes_all_tokens_is_full_attention(chooser, kv_type):
    problem = TokenProblem(chooser, kv_type=kv_type, dim=32, block=32, **COVERING[chooser])
    answer, out, lse = problem.answered()
    scores = problem.scores
    assert answer.tokens == problem.request.tokens == int(problem.in_context.sum())
    torch.testing.assert_close(out, scores.softmax(dim=3) @ problem.values, rtol=1e-4, atol=1e-4)
    for found in (lse, torch.logaddexp(answer.mass, problem.around[1])):
        torch.testing.assert_close(found, scores.logsumexp(dim=3), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("chooser", "architecture"), combined(CHOOSERS, ["llama", "gemma2", "gpt_oss"]))
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


@pytest.mark.parametrize("chooser", with_slow(CHOOSERS, slow=["loki", "magicpig", "sparq"]))
def test_one_kv_head_and_no_token_around_the_context_are_enough(chooser, monkeypatch):
    # Groups of two, as elsewhere.
    model = tiny_model("llama", num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    ids = prompt(70, 1)[None]
    with torch.no_grad():
        expected = model(ids).logits
    least = {"block_size": 4, "sink_tokens": 0, "local_windows_len": 1}
    injection = inject(model, small_recipe(chooser, **least), command_line={**COVERING[chooser], "dense_layer_num": 0})
    monkeypatch.setattr(choosers.get(chooser).implementation, "covers", lambda *_: False)
    injection.compile_kernels()
    cache = new_cache(model)
    with torch.no_grad():
        parts = [ids[:, :50], *ids[:, 50:].split(1, dim=1)]
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


@pytest.mark.parametrize("model", with_slow(CHOOSERS, slow=["loki", "magicpig", "retroinfer", "sparq"]), indirect=True)
def test_forks_go_on_by_themselves(model):
    cache = new_cache(model)
    said(model, cache, prompt(61, 0), 9)
    fork, third = cache.fork(), cache.fork()
    scripts = [(prompt(7, seed), 6) for seed in range(3)]
    answers = [said(model, each, *script) for each, script in zip((cache, fork, third), scripts, strict=True)]
    for answer, script in zip(answers, scripts, strict=True):
        fresh = new_cache(model)
        said(model, fresh, prompt(61, 0), 9)
        assert torch.equal(said(model, fresh, *script), answer)


# One chooser that learns after a long crop, and the one that keeps clusters after a short one.
@pytest.mark.parametrize(
    ("model", "kept"),
    with_slow(
        list(itertools.product(CHOOSERS, [58, 43, 21])),
        slow={*itertools.product(CHOOSERS, [58, 43, 21])} - {("retroinfer", 58)},
    ),
    indirect=["model"],
)
def test_cropped_tokens_leave_no_trace(model, kept, request):
    cache, fresh, whole = new_cache(model), new_cache(model), new_cache(model)
    first, second, script = prompt(40, 0), prompt(22, 1), (prompt(9, 2), 11)
    said(model, cache, first, second)
    other = cache.fork()
    cache.crop(kept - 62)
    answer = said(model, cache, *script)
    # After cropped tokens, the index of all tokens is rebuilt after the next prompt.
    turns = (first, second[: kept - 40], *script) if kept > 40 else (torch.cat([first[:kept], script[0]]), script[1])
    if kept == 58 and "retroinfer" in request.node.callspec.params.values():
        # So is a segment that has lost some of the Context's blocks to the window: with the next prompt's.
        turns = first, torch.cat([second[:18], script[0]]), script[1]
    assert_same_but_for_rounding(answer, said(model, fresh, *turns)[-len(answer) :])
    said(model, whole, first, second)
    assert torch.equal(said(model, other, *script), said(model, whole, *script))


@pytest.mark.parametrize("model", with_slow(CHOOSERS, slow={*CHOOSERS} - {"infinigen"}), indirect=True)
@pytest.mark.parametrize(
    ("script", "forgotten"),
    [pytest.param((prompt(62, 0),), 4, marks=pytest.mark.slow), ((prompt(61, 0), 9), 8)],
)
def test_a_cropped_context_can_be_saved(model, tmp_path, script, forgotten):
    cache = new_cache(model)
    said(model, cache, *script)
    cache.crop(-forgotten)
    cache.save(tmp_path / "context.safetensors")
    loaded = new_cache(model, load=tmp_path / "context.safetensors")
    script = prompt(5, 1), 9
    assert torch.equal(said(model, loaded, *script), said(model, cache, *script))


def test_clusters_end_where_the_context_does(model_of, monkeypatch):
    model, seen = model_of("llama"), []
    attend = RetroInfer.attend
    monkeypatch.setattr(RetroInfer, "attend", lambda self, request: seen.append(request) or attend(self, request))
    inject(model, small_recipe("retroinfer", **SMALLER, dense_layer_num=0, segment_tokens=8192, exact_clusters=2))
    cache, fresh, whole = new_cache(model), new_cache(model), prompt(202, 0)
    said(model, cache, whole)
    cache.crop(-6)
    answer = said(model, cache, prompt(1, 1), 3)
    for request in seen:
        sizes = request.pool.auxiliary["cluster_sizes"][torch.from_numpy(request.context.astype("int64"))]
        assert sizes.sum(dim=(1, 3)).tolist() == [[request.tokens] * 2]
    said(model, fresh, whole[:196])
    assert_same_but_for_rounding(answer, said(model, fresh, prompt(1, 1), 3))


def test_clusters_of_layers_with_other_segments_keep_their_tokens(model_of, monkeypatch):
    """After a crop one layer clusters its cut segment again; another, whose segments end elsewhere, does not."""
    model, seen = model_of("llama"), []
    attend = RetroInfer.attend
    monkeypatch.setattr(RetroInfer, "attend", lambda self, request: seen.append(request) or attend(self, request))
    settings = {"chooser": "retroinfer", "cluster_tokens": 4, "exact_clusters": 2, "estimated_clusters": 4}
    rules = [
        {
            "match": {"name": rf"layers\.{layer}\.self_attn$"},
            "replace": {"class": "TokenRetrievalAttention", "kwargs": {**settings, "segment_tokens": segment}},
        }
        for layer, segment in enumerate((40, 60, 40))
    ]
    inject(model, with_settings(parse_rules({"rules": rules}), {**ENGINE, **SMALLER}))
    cache = new_cache(model)
    said(model, cache, prompt(202, 0))
    cache.crop(-94)
    said(model, cache, prompt(1, 1), 3)
    assert len(seen) == 3 * 4
    for request in seen:
        ids = torch.from_numpy(request.context.astype("int64"))
        sizes = request.pool.auxiliary["cluster_sizes"][ids].transpose(1, 2).flatten(2)
        clusters = request.pool.auxiliary["clusters"][ids].transpose(1, 2).flatten(2) - request.first
        counted = torch.zeros_like(sizes).scatter_add_(2, clusters.long(), torch.ones(clusters.shape))
        assert torch.equal(counted, sizes)
        assert int(counted.sum()) == 2 * request.tokens


def test_a_skewing_by_queries_that_are_gone_is_gone_too(model_of):
    model = learner(model_of("llama"), "infinigen")
    cache, fresh, script = new_cache(model), new_cache(model), (prompt(9, 2), 20)
    said(model, cache, prompt(28, 0), prompt(7, 1))
    said(model, fresh, prompt(28, 0))
    cache.crop(-7)
    assert torch.equal(said(model, cache, *script), said(model, fresh, *script))
    cache.crop(-29 - 1)
    assert not any(layer.state.known for layer in cache.layers)


def learner(model, chooser):
    """The model under a chooser whose knowledge of a sequence is of all of it, in every layer."""
    inject(model, small_recipe(chooser, **SMALLER), command_line={"dense_layer_num": 0})
    return model


def learned(cache):
    return [layer.state.learned for layer in cache.layers]


LEARNERS = ["infinigen", "loki", "magicpig"]
# What they learn of is the same; the one that learns most.
ONE_LEARNER = with_slow(LEARNERS, slow=["loki", "magicpig"])


@pytest.mark.parametrize("chooser", ONE_LEARNER)
def test_a_long_prompt_behind_a_short_one_is_learned_from(model_of, chooser):
    model = learner(model_of("llama"), chooser)
    cache, fresh, first, second = new_cache(model), new_cache(model), prompt(17, 0), prompt(300, 1)
    said(model, cache, first)
    assert learned(cache) == [2] * 3
    answer = said(model, cache, second, 12)[-12:]
    # All that are closed but one of the answer's.
    assert learned(cache) == [77] * 3
    assert_same_but_for_rounding(answer, said(model, fresh, torch.cat([first, second]), 12)[-12:])


@pytest.mark.parametrize("chooser", ONE_LEARNER)
def test_an_index_stays_until_a_prompt_is_several_times_longer(model_of, chooser):
    model, found = learner(model_of("llama"), chooser), []
    for tokens in (127, 128):
        cache = new_cache(model)
        said(model, cache, prompt(47, 0), prompt(tokens, 1))
        found.append(learned(cache))
    # The Context had 8 blocks of 4 tokens behind the sink.
    assert found == [[9] * 3, [41] * 3]


@pytest.mark.parametrize("chooser", ONE_LEARNER)
def test_a_fork_keeps_its_index_where_the_other_rebuilds_it(model_of, chooser):
    model = learner(model_of("llama"), chooser)
    cache, alike = new_cache(model), new_cache(model)
    for each in (cache, alike):
        said(model, each, prompt(47, 0), 5)
    fork = cache.fork()
    said(model, cache, prompt(300, 1), 2)
    assert learned(fork) != learned(cache)
    assert torch.equal(said(model, fork, prompt(9, 2), 12), said(model, alike, prompt(9, 2), 12))


@pytest.mark.parametrize("chooser", ONE_LEARNER)
def test_a_failed_turn_leaves_the_index_unchanged(model_of, chooser, monkeypatch):
    """Even if the failed turn rebuilt block indexes in some layers, also for rows that diverge."""
    model = learner(model_of("llama"), chooser)
    cache, alike = new_cache(model), new_cache(model)
    rows = [prompt(47, 0), prompt(47, 3)]
    batches = [Batch(model, each, rows) for each in (cache, alike)]

    def fail(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as failing:
        failing.setattr(model.model.layers[2].mlp, "forward", fail)
        with pytest.raises(KeyboardInterrupt):
            batches[0].say([prompt(300, 1), prompt(3, 4)])
    for batch in batches:
        batch.say([prompt(5, 1), prompt(3, 4)])
        batch.answer(10)
    for one, other in zip(batches[0].logits, batches[1].logits, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("chooser", ONE_LEARNER)
def test_each_row_rebuilds_its_index_from_its_own_tokens(model_of, chooser):
    model = learner(model_of("llama"), chooser)
    rows, turns = [prompt(47, 0), prompt(47, 3)], [prompt(3, 4), prompt(300, 1)]
    batch = Batch(model, new_cache(model), rows)
    batch.say(turns)
    batch.answer(6)
    for logits, row, turn in zip(batch.logits, rows, turns, strict=True):
        assert_same_but_for_rounding(logits, said(model, new_cache(model), row, turn, 6))


@pytest.mark.parametrize("model", with_slow(CHOOSERS, slow=["loki", "magicpig", "sparq"]), indirect=True)
def test_a_saved_context_goes_on_bit_for_bit(model, tmp_path):
    cache = new_cache(model)
    said(model, cache, prompt(61, 0), 9)
    cache.save(tmp_path / "context.safetensors")
    loaded = new_cache(model, load=tmp_path / "context.safetensors")
    assert loaded.statistics == cache.statistics
    script = prompt(5, 1), 9
    assert torch.equal(said(model, loaded, *script), said(model, cache, *script))
    assert loaded.statistics == cache.statistics


def test_kept_arrays_have_the_planned_bytes(model):
    cache = new_cache(model)
    said(model, cache, prompt(61, 0), 9)
    for operator, layer in zip(model.hetero_kv_injection.attention_operators(), cache.layers, strict=True):
        pool = layer.pool
        stored = operator.footprint(KVShape(pool.keys.shape[1], 16, 16)).stored
        assert stored.total * pool.block_size == pytest.approx(pool.bytes_per_block)
    assert not cache.layers[0].pool.auxiliary
    assert cache.layers[1].pool.auxiliary


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
