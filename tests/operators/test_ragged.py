"""Rows of a batch with different lengths: each is computed as if it were alone."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import eject
from hetero_kv.rules.rule_file import parse_rules
from tests.operators.ragged_prompts import LENGTHS, PROMPTS, TURNS
from tests.support.devices import model_on, on_both
from tests.support.ragged_rows import Batch, alone, assert_same_but_for_rounding, prompt
from tests.support.slow_variants import with_slow
from tests.support.small_recipes import ENGINE, RECIPES, injected, new_cache, small_recipe, with_settings
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

#: The row that leaves half-way, the others, no longer in their order, and what joins them.
LEAVING, STAYING = 2, [3, 0, 1]
JOINING = prompt(75, 20), prompt(12, 21)
# More than a block, so that every row fills one; then fewer tokens, with which some do.
HALF, REST = 9, 5

SMALLER = {"block_size": 4, "sink_tokens": 4, "local_windows_len": 8, "top_k_blocks": 3, "observation_len": 12}
CHUNKED = {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}}


@pytest.fixture(scope="module")
def shared_shallow():
    return tiny_model("llama", num_hidden_layers=2)


@pytest.fixture
def shallow(shared_shallow):
    """A shared tiny Llama of two layers, of which most recipes leave one dense, without rules after each test."""
    yield shared_shallow
    if getattr(shared_shallow, "hetero_kv_injection", None) is not None:
        eject(shared_shallow)


def operator_in(pattern, name, **kwargs):
    return {"match": {"name": pattern}, "replace": {"class": name, "kwargs": kwargs}}


def assert_rows_are_what_they_are_alone(model, rules):
    """Four prompts, an answer in whose middle one row leaves and another joins, a second turn, and its answer."""
    batch = Batch(model, injected(model, rules), PROMPTS)
    assert batch.cache.lengths == [*LENGTHS]
    assert batch.cache.get_seq_length() == max(LENGTHS)
    batch.answer(HALF)
    left = batch.logits[LEAVING]
    batch.select(STAYING)
    batch.extend(Batch(model, new_cache(model), JOINING[:1]))
    assert batch.cache.lengths == [*(LENGTHS[row] + HALF for row in STAYING), len(JOINING[0])]
    assert batch.cache.get_seq_length() == max(LENGTHS) + HALF
    batch.answer(REST)
    batch.say([*(TURNS[row] for row in STAYING), JOINING[1]])
    batch.answer(4)

    for row, logits in zip(STAYING, batch.logits, strict=False):
        script = PROMPTS[row], HALF, REST, TURNS[row], 4
        assert_same_but_for_rounding(logits, alone(model, new_cache(model), script), f"{LENGTHS[row]} tokens")
    assert_same_but_for_rounding(left, alone(model, new_cache(model), (PROMPTS[LEAVING], HALF)), "the one that left")
    joined = JOINING[0], REST, JOINING[1], 4
    assert_same_but_for_rounding(batch.logits[-1], alone(model, new_cache(model), joined), "the one that joined")


# Which differ from others in how a long prompt is attended to, in what scores a block or an entry, or in numbers, or
# put together what two others have.
_LIKE_OTHERS = (
    "adaptive", "adaptive_lean", "bigbird", "cam", "d2o", "dense", "flexprefill", "h2o", "infinigen", "infinipot",
    "infllm", "infllm_stream", "kvretrieval", "loki", "magicpig", "minference", "pyramidkv", "quest", "random",
    "retroinfer", "roco", "self_extend", "self_extend_quest", "shadowkv_minference", "shadowkv_plus", "sirllm",
    "snapkv", "snapkv_evict", "sparq", "streaming", "streaming_llm", "tova",
)  # fmt: skip


@pytest.mark.parametrize(("recipe", "device"), on_both(RECIPES, slow=_LIKE_OTHERS), indirect=["device"])
def test_rows_of_different_lengths_equal_each_row_alone(recipe, device, shallow):
    assert_rows_are_what_they_are_alone(model_on(device, shallow), small_recipe(recipe))


@pytest.mark.slow
def test_rows_whose_tokens_the_layer_before_chooses_equal_each_row_alone(model_of):
    # InfiniGen does so from the third layer on.
    assert_rows_are_what_they_are_alone(model_of(), small_recipe("infinigen"))


# Recipes that differ from dense in long prompts alone: tests/families/test_sparse_prefill.py.
_DENSE_HERE = ("dense", "flexprefill", "minference")


@pytest.mark.parametrize(
    "recipe",
    with_slow(
        [name for name in RECIPES if name not in _DENSE_HERE], slow=[n for n in _LIKE_OTHERS if n not in _DENSE_HERE]
    ),
)
def test_small_recipes_leave_tokens_out_so_that_choosing_others_would_show(recipe, model_of):
    model, long = model_of(), [PROMPTS[-1], *prompt(20, 30).split(1)]
    with torch.no_grad():
        full = model(torch.cat(long)[None]).logits[0]
    sparse = alone(model, injected(model, small_recipe(recipe)), long)
    assert (sparse - full)[-20:].abs().amax(dim=-1).min() > 0.01 * full.abs().max()


# Windows of the model itself; learned sinks too; experts, which get the rows' tokens in another order; and a
# rotation of some of the channels.
@pytest.mark.parametrize(
    ("architecture", "recipe"),
    with_slow(
        [
            ("gemma2", "ktransformers"),
            ("gemma3_text", "ktransformers"),
            ("gemma3_text", "tova"),
            ("gpt_oss", "quest"),
            ("gpt_oss", "h2o"),
            ("qwen3_moe", "ktransformers"),
            ("glm", "shadowkv"),
            ("glm", "streaming_llm"),
        ],
        # Windows and sinks; of experts and of a layer's rotation rows know the positions alone.
        slow=[
            ("gemma2", "ktransformers"),
            ("gemma3_text", "ktransformers"),
            ("gemma3_text", "tova"),
            ("gpt_oss", "h2o"),
            ("qwen3_moe", "ktransformers"),
            ("glm", "shadowkv"),
            ("glm", "streaming_llm"),
        ],
    ),
)
def test_rows_of_every_kind_of_model_equal_each_row_alone(architecture, recipe, model_of):
    assert_rows_are_what_they_are_alone(model_of(architecture), small_recipe(recipe))


MIXED = {
    "a layer left alone": [
        operator_in(r"layers\.1\.self_attn$", "default"),
        operator_in(r"self_attn$", "RetrievalAttention", representative_type="DYNAMIC"),
    ],
    "retrieval above entries": [
        operator_in(r"layers\.0\.self_attn$", "BoundedAttention", policy="tova", budget=40, stride=16),
        operator_in(r"self_attn$", "RetrievalAttention", representative_type="QUEST", representative_num=2),
    ],
    "layouts of their own": [
        operator_in(r"layers\.0\.self_attn$", "RetrievalAttention", block_size=8),
        operator_in(
            r"layers\.1\.self_attn$",
            "ShadowKVAttention",
            rank=8,
            landmark_chunk_size=4,
            outlier_chunks=3,
            local_chunks=2,
            sparse_budget=16,
            value_type="FP32",
        ),
        operator_in(r"self_attn$", "BoundedAttention", policy="h2o", budget=40),
    ],
    "a catalyst below preselection": [
        operator_in(r"layers\.0\.self_attn$", "BoundedAttention", policy="infinipot", budget=40, catalyst="abcdef"),
        operator_in(r"self_attn$", "RetrievalAttention", preselect_block=True, preselect_block_count=6),
    ],
    "selections that are reused": [
        operator_in(r"self_attn$", "RetrievalAttention", representative_type="MEAN", layer_step=2, token_step=3),
    ],
}


@pytest.mark.parametrize("rules", with_slow(MIXED, slow=MIXED.keys() - {"layouts of their own"}))
def test_rows_equal_each_row_alone_under_mixed_methods(rules, model_of):
    rules = with_settings(parse_rules({"rules": [*rules, CHUNKED]}), {**ENGINE, **SMALLER})
    assert_rows_are_what_they_are_alone(model_of(), rules)


def test_longer_rows_may_join_shorter_ones(model_of):
    model = model_of()
    short, long = [prompt(9, 1), prompt(30, 2)], [prompt(200, 3), prompt(2, 4)]
    batch = Batch(model, injected(model, small_recipe("ktransformers")), short)
    batch.answer(3)
    other = Batch(model, new_cache(model), long)
    batch.extend(other)
    assert batch.cache.lengths == [12, 33, 200, 2]
    assert batch.cache.get_seq_length() == 200
    assert batch.cache.attention_mask.sum(dim=1).tolist() == [12, 33, 200, 2]
    # The narrower rows are padded on the left: what they hold ends where the longest ends.
    assert batch.cache.attention_mask[:, -2:].all()
    assert other.cache.get_seq_length() == 0
    assert other.cache.lengths == []
    batch.answer(10)
    scripts = [*((each, 13) for each in short), *((each, 10) for each in long)]
    for logits, script in zip(batch.logits, scripts, strict=True):
        assert_same_but_for_rounding(logits, alone(model, new_cache(model), script), f"{len(script[0])} tokens")


def test_the_emptied_cache_takes_new_rows(model_of):
    model = model_of()
    batch = Batch(model, injected(model, small_recipe("ktransformers")), PROMPTS[:2])
    other = Batch(model, new_cache(model), PROMPTS[2:3])
    batch.extend(other)
    anew = Batch(model, other.cache, PROMPTS[1:3])
    anew.answer(3)
    for logits, row in zip(anew.logits, PROMPTS[1:3], strict=True):
        assert_same_but_for_rounding(logits, alone(model, new_cache(model), (row, 3)))


@pytest.mark.parametrize(
    ("recipe", "device"),
    on_both(["ktransformers", "shadowkv_plus", "tova"], slow=["shadowkv_plus"]),
    indirect=["device"],
)
def test_a_row_that_is_repeated_goes_several_ways(recipe, device, shallow):
    model = model_on(device, shallow)
    batch = Batch(model, injected(model, small_recipe(recipe)), PROMPTS[:3])
    batch.answer(3)
    batch.select([2, 0, 2])
    turns = TURNS[0], TURNS[1], TURNS[3]
    batch.say(turns)
    batch.answer(5)
    for logits, row, turn in zip(batch.logits, (2, 0, 2), turns, strict=True):
        assert_same_but_for_rounding(logits, alone(model, new_cache(model), (PROMPTS[row], 3, turn, 5)))


# Of a smaller rank, factors would remember what was cropped.
OF_FULL_RANK = {
    "rank": 32,
    "landmark_chunk_size": 4,
    "sparse_budget": "all",
    "value_type": "FP32",
}
CROPPED = {
    "retrieval": [operator_in(r"self_attn$", "RetrievalAttention", **SMALLER)],
    "shadowkv": [operator_in(r"self_attn$", "ShadowKVAttention", **OF_FULL_RANK)],
}


@pytest.mark.parametrize(("family", "device"), on_both(CROPPED), indirect=["device"])
def test_columns_that_are_cropped_are_forgotten_by_the_rows_that_had_tokens_there(family, device, shallow):
    model = model_on(device, shallow)
    rules = with_settings(parse_rules({"rules": [*CROPPED[family], CHUNKED]}), ENGINE)
    batch = Batch(model, injected(model, rules), PROMPTS[:3])
    batch.say([prompt(6, 40), prompt(1, 41), prompt(3, 42)])
    batch.cache.crop(-4)
    assert batch.cache.lengths == [LENGTHS[0] + 2, LENGTHS[1], LENGTHS[2]]
    assert batch.cache.get_seq_length() == LENGTHS[2] + 2
    batch.say(TURNS[:3])
    kept = [torch.cat([PROMPTS[0], prompt(6, 40)[:2]]), *PROMPTS[1:3]]
    for logits, parts in zip(batch.logits, zip(kept, TURNS[:3], strict=True), strict=True):
        turn = len(parts[1])
        expected = alone(model, new_cache(model), parts)
        assert_same_but_for_rounding(logits[-turn:], expected[-turn:])


@pytest.mark.parametrize("recipe", with_slow(["ktransformers", "shadowkv_plus", "h2o"], slow=["shadowkv_plus", "h2o"]))
def test_forks_of_a_ragged_batch_go_their_own_ways(recipe, model_of):
    model = model_of()
    first = Batch(model, injected(model, small_recipe(recipe)), PROMPTS[:3])
    first.answer(2)
    second = Batch.__new__(Batch)
    second.model, second.cache, second.logits = model, first.cache.fork(), first.logits
    assert second.cache.lengths == first.cache.lengths
    ways = TURNS[:3], TURNS[2:]
    first.say(ways[0])
    second.say(ways[1])
    first.answer(4)
    second.answer(4)
    for batch, turns in zip((first, second), ways, strict=True):
        for logits, start, turn in zip(batch.logits, PROMPTS, turns, strict=False):
            assert_same_but_for_rounding(logits, alone(model, new_cache(model), (start, 2, turn, 4)))
