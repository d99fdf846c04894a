"""Short turns attend to stored tokens in place, and equal prompts that load them into a buffer."""

from __future__ import annotations

import itertools

import pytest
import torch

from hetero_kv.engine.buffered_layer import BufferedLayer
from hetero_kv.errors import HeteroKVError
from hetero_kv.families.retrieval import exact_prefill, short_turn
from hetero_kv.families.retrieval.short_turn import MOST_TOKENS
from hetero_kv.rules.rule_file import parse_rules
from hetero_kv.store import storage
from tests.support.ragged_rows import Batch, alone, assert_same_but_for_rounding, prompt
from tests.support.slow_variants import combined, with_slow
from tests.support.small_recipes import ENGINE, injected, new_cache, with_settings
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {
    "block_size": 8,
    "sink_tokens": 8,
    "local_windows_len": 16,
    "top_k_blocks": 3,
    "observation_len": 24,
    "chunk_size": 128,
}
COVERING = {"top_k_blocks": 500, "preselect_block_count": 500}
CHUNKED = {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}}
PRESELECTING = {"preselect_block": True, "preselect_block_count": 5}
METHODS = {
    "DYNAMIC": {"representative_type": "DYNAMIC"},
    "MEAN": {"representative_type": "MEAN"},
    "QUEST": {"representative_type": "QUEST", "representative_num": 2},
    "preselection": {"representative_type": "MEAN", **PRESELECTING},
    "DYNAMIC and preselection": {"representative_type": "DYNAMIC", "head_select_mode": "SEPARATE", **PRESELECTING},
}
OFFSET = {"key_offset": "block_mean", **METHODS["QUEST"], "block_size": 4}
#: Of two later turns: a question of two tokens is the least that is no decoded token.
TURNS = [(2, 3), (7, 30), (30, MOST_TOKENS), (MOST_TOKENS, MOST_TOKENS + 1)]


@pytest.fixture(autouse=True)
def behind_any_past(monkeypatch):
    """Tiny models have short pasts."""
    monkeypatch.setattr(short_turn, "LEAST_PAST", 1)


@pytest.fixture
def buffered(monkeypatch):
    """What is called for a model whose short turns are to take the way through the buffer."""
    return lambda: monkeypatch.setattr(short_turn, "MOST_TOKENS", 0)


def retrieval(*rules, **settings):
    every = {"match": {"name": r"self_attn$"}, "replace": {"class": "RetrievalAttention"}}
    rules = parse_rules({"rules": [*rules, every, CHUNKED]})
    return with_settings(rules, {**ENGINE, **SMALL, **settings})


def conversation(*turns, first=90):
    """A prompt and later ones of these lengths, each with an answer longer than a block."""
    return [part for seed, length in enumerate((first, *turns)) for part in (prompt(length, seed), 11)]


def error(actual, expected):
    return float((actual - expected).abs().max() / expected.abs().max())


def loads(monkeypatch):
    """A list that fills with (stored tokens, new tokens) of every prompt that a layer makes a buffer for."""
    record, made = [], BufferedLayer._loaded_buffer

    def recorded(layer, keys, values):
        buffer = made(layer, keys, values)
        record.append((buffer.past, buffer.keys.shape[2] - buffer.past))
        return buffer

    monkeypatch.setattr(BufferedLayer, "_loaded_buffer", recorded)
    return record


_QUICK_TURNS = ("QUEST", TURNS[2]), ("preselection", TURNS[3]), ("DYNAMIC and preselection", TURNS[0])


@pytest.mark.parametrize(
    ("method", "turns"),
    with_slow(list(itertools.product(METHODS, TURNS)), slow={*itertools.product(METHODS, TURNS)} - {*_QUICK_TURNS}),
)
def test_answers_are_those_of_turns_that_go_through_the_buffer(monkeypatch, buffered, method, turns):
    model, script = tiny_model("llama"), conversation(*turns)
    # Attention received is added up in several pieces.
    monkeypatch.setattr(short_turn, "_KEYS_AT_ONCE", 32)
    record = loads(monkeypatch)
    actual = alone(model, injected(model, retrieval(**METHODS[method])), script)
    assert {tokens for past, tokens in record if past} == {tokens for tokens in turns if tokens > MOST_TOKENS}
    record.clear()
    buffered()
    expected = alone(model, new_cache(model), script)
    assert {tokens for past, tokens in record if past} == set(turns)
    assert_same_but_for_rounding(actual, expected)


@pytest.mark.parametrize("method", with_slow(list(METHODS), slow=["DYNAMIC", "MEAN", "preselection"]))
def test_derived_arrays_of_a_turn_equal_those_by_the_buffer(buffered, method):
    model = tiny_model("llama")
    caches = [injected(model, retrieval(**METHODS[method])), new_cache(model)]
    alone(model, caches[0], conversation(30, 9)[:-1])
    buffered()
    alone(model, caches[1], conversation(30, 9)[:-1])
    for ours, theirs in zip(*(cache.layers for cache in caches), strict=True):
        assert ours.context_blocks == theirs.context_blocks > 8
        for name in ("candidates", "accumulated"):
            pair = [getattr(layer.state, name) for layer in (ours, theirs)]
            assert (pair[0] is None) == (pair[1] is None), name
            if pair[0] is not None:
                torch.testing.assert_close(*(torch.as_tensor(each) for each in pair), rtol=1e-4, atol=1e-5)
        assert ours.state.open_start == theirs.state.open_start
        assert ours.state.observation is None
        representatives = [
            layer.pool.representatives[layer.block_ids(0)[1 : layer.context_end].tolist()] for layer in (ours, theirs)
        ]
        torch.testing.assert_close(*representatives, rtol=1e-4, atol=1e-5)


# Soft-capped scores; learned sinks; keys and values of several dimensions; no groups; groups of two.
# DeepSeek's shape and Gemma's soft cap have kernels of their own: test_exactness.py, tests/cpu_ops.
@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        *combined(["gpt_oss", "phi"], ["DYNAMIC", "MEAN"]),
        *(
            pytest.param(name, method, marks=pytest.mark.slow)
            for name in ("gemma2", "qwen3", "deepseek_v3")
            for method in ("DYNAMIC", "MEAN")
        ),
    ],
)
def test_short_turns_are_exact_where_the_budget_covers(architecture, method):
    model, script = tiny_model(architecture), [prompt(90, 0), prompt(30, 1), prompt(9, 2), prompt(70, 3)]
    with torch.no_grad():
        expected = model(torch.cat(script)[None]).logits[0]
    actual = alone(model, injected(model, retrieval(**METHODS[method], **COVERING)), script)
    assert error(actual, expected) < 1e-5


@pytest.mark.parametrize("kv_type", with_slow(storage.names(), slow=("FP32", "BF16", "Q8_0", "Q4_0")))
def test_every_storage_type_loses_about_what_it_loses_by_the_buffer(buffered, kv_type):
    # Types in groups of 32 numbers want heads and blocks of as many.
    in_groups = kv_type.startswith("Q")
    model = tiny_model("llama", head_dim=32 if in_groups else 16)
    script = [prompt(90, 0), prompt(30, 1), prompt(9, 2), prompt(2, 3)]
    with torch.no_grad():
        exact = model(torch.cat(script)[None]).logits[0]
    settings = {"kv_type": kv_type, **COVERING, **({"block_size": 32, "sink_tokens": 32} if in_groups else {})}
    ours = error(alone(model, injected(model, retrieval(**settings)), script), exact)
    buffered()
    assert ours <= 2 * error(alone(model, new_cache(model), script), exact) + 1e-6


@pytest.mark.parametrize(
    ("architecture", "method"),
    with_slow(
        list(itertools.product(["llama", "gemma2", "gpt_oss"], ["DYNAMIC", "preselection"])),
        slow={*itertools.product(["llama", "gemma2", "gpt_oss"], ["DYNAMIC", "preselection"])} - {("llama", "DYNAMIC")},
    ),
)
def test_rows_equal_each_row_alone(architecture, method):
    model = tiny_model(architecture, max_position_embeddings=1024)
    # Two of one length, which pass together, and two of others.
    firsts = [prompt(length, seed) for seed, length in enumerate((90, 90, 33, 200))]
    batch = Batch(model, injected(model, retrieval(**METHODS[method])), firsts)
    batch.answer(3)
    seconds = [prompt(length, 10 + seed) for seed, length in enumerate((30, 30, 2, MOST_TOKENS))]
    batch.say(seconds)
    batch.answer(3)
    thirds = [prompt(5, 20 + seed) for seed in range(4)]
    batch.say(thirds)
    batch.answer(11)
    for row, logits in enumerate(batch.logits):
        script = firsts[row], 3, seconds[row], 3, thirds[row], 11
        assert_same_but_for_rounding(logits, alone(model, new_cache(model), script), f"row {row}")


@pytest.mark.parametrize(
    "settings",
    # Keys less an offset have kernels of their own, which tests/cpu_ops/test_causal_attention.py has.
    with_slow({"DYNAMIC": METHODS["DYNAMIC"], "QUEST": METHODS["QUEST"], "offset": OFFSET}, slow=["QUEST", "offset"]),
)
def test_forks_that_share_a_block_answer_as_if_each_were_alone(settings):
    model = tiny_model("llama")
    # The last of the shared blocks has room for both forks' tokens.
    first = injected(model, retrieval(**settings), forks=1)
    alone(model, first, [prompt(90, 0), 4])
    second = first.fork()
    answers = [alone(model, cache, [prompt(30, 5 + seed)]) for seed, cache in enumerate((first, second))]
    answers = [
        torch.cat([logits, alone(model, cache, [prompt(9, 7), 11])])
        for logits, cache in zip(answers, (first, second), strict=True)
    ]
    for seed, logits in enumerate(answers):
        expected = alone(model, new_cache(model), [prompt(90, 0), 4, prompt(30, 5 + seed), prompt(9, 7), 11])
        assert torch.equal(logits, expected[-len(logits) :])


@pytest.mark.parametrize(("stored", "layer_idx"), combined([False, True], [0, 2]))
def test_an_interrupted_turn_leaves_the_conversation_as_it_was(monkeypatch, stored, layer_idx):
    model, script = tiny_model("llama"), [prompt(90, 0), 11]
    cache = injected(model, retrieval(**METHODS["DYNAMIC and preselection"]))
    alone(model, cache, script)
    attend = short_turn.store_and_attend

    def interrupted(layer, *args):
        if layer.layer_idx < layer_idx:
            return attend(layer, *args)
        if stored:
            attend(layer, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(exact_prefill, "store_and_attend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            alone(model, cache, [prompt(30, 1)])
    assert cache.get_seq_length() == 90 + 11
    rest = [prompt(21, 2), 11]
    assert torch.equal(alone(model, cache, rest), alone(model, new_cache(model), [*script, *rest])[101:])


def test_a_turn_that_is_undone_and_repeated_answers_the_same():
    model = tiny_model("llama")
    cache = injected(model, retrieval(**METHODS["DYNAMIC"]))
    alone(model, cache, [prompt(90, 0), 11])
    before = cache.snapshot()
    first = alone(model, cache, [prompt(30, 1), 11])
    cache.rollback(before)
    assert torch.equal(alone(model, cache, [prompt(30, 1), 11]), first)


def test_a_turn_of_several_chunks_goes_through_the_buffer(monkeypatch):
    model = tiny_model("llama")
    record = loads(monkeypatch)
    alone(model, injected(model, retrieval(chunk_size=16)), conversation(16, 17))
    assert {tokens for past, tokens in record if past} == {17}


def test_parts_of_a_prompt_are_short_turns_and_a_catalyst_is_none(monkeypatch, buffered):
    """A layer of bounded memory has prompts pass in strides; its catalyst is stored nowhere."""
    bounded = {"policy": "infinipot", "budget": 24, "catalyst": "abcdef"}
    first = {"match": {"name": r"layers\.0\.self_attn$"}, "replace": {"class": "BoundedAttention", "kwargs": bounded}}
    rules, model = retrieval(first, representative_type="DYNAMIC", stride=16), tiny_model("llama")
    record, script = loads(monkeypatch), conversation(30, 9)
    actual = alone(model, injected(model, rules), script)
    assert {tokens for past, tokens in record if past} == {len("abcdef")}
    record.clear()
    buffered()
    expected = alone(model, new_cache(model), script)
    assert {tokens for past, tokens in record if past} > {len("abcdef")}
    assert_same_but_for_rounding(actual, expected)


def test_recall_and_lengths_are_counted_as_ever():
    model = tiny_model("llama")
    cache = injected(model, retrieval(measure_recall=True, **METHODS["MEAN"]))
    alone(model, cache, conversation(30))
    assert cache.get_seq_length() == 90 + 11 + 30 + 11
    assert all(0 < layer.state.recall.mean < 1 for layer in cache.layers)
    assert all(layer.state.recall.numbers == 22 for layer in cache.layers)


def test_a_number_beyond_the_storage_type_is_refused_and_the_turn_undone():
    model = tiny_model("llama")
    cache = injected(model, retrieval(kv_type="FP16"))
    alone(model, cache, [prompt(90, 0)])
    weight = model.model.layers[1].self_attn.v_proj.weight
    weight.mul_(1e6)
    with pytest.raises(HeteroKVError, match="exceeds the range of kv_type FP16"):
        alone(model, cache, [prompt(9, 1)])
    weight.div_(1e6)
    assert cache.get_seq_length() == 90
