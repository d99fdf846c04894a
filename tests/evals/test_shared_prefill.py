"""A cache filled from a recorded prefill continues exactly like one that prefilled under the same rules."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hetero_kv import HeteroCache, HeteroKVError, eject, inject
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.engine.errors import CacheFullError
from hetero_kv.evals.shared_prefill import record_prefill, shares_prefill
from hetero_kv.families.retrieval.layer import RetrievalLayer
from hetero_kv.families.retrieval.settings import UNKNOWN_QUESTION
from hetero_kv.rules.rule_file import parse_rules
from tests.support.slow_variants import with_few, with_slow
from tests.support.tiny_models import ARCHITECTURES, tiny_model

RECIPES = ("dense", "ktransformers", "kvretrieval", "quest", "snapkv", "infllm", "streaming")
CHUNK = 32
PROMPT, DECODED = 85, 20


def small(recipe, block_size=4):
    """Settings with which a recipe chooses 2 blocks, of which preselection leaves 3, from a prompt of PROMPT tokens."""
    budget = {"dense": "all", "streaming": 0}.get(recipe, 2)
    return {
        "block_size": block_size,
        # Two blocks of four, the second in part.
        "sink_tokens": 6,
        "local_windows_len": 9,
        "top_k_blocks": budget,
        "preselect_block_count": 3,
        "observation": 20,
        "chunk_size": CHUNK,
        "max_seq_len": 128,
        "kv_type": "FP16",
    }


def stored(model):
    """Settings of a model whose dimensions or soft cap need kernels of their own, which other tests have in FP32."""
    return {"kv_type": "FP32"} if model.config.model_type in ("gemma2", "deepseek_v3") else {}


def random_tokens(count, seed=0):
    return torch.randint(2, 97, (1, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def decoded_logits(model, cache, tokens):
    return torch.cat([model(token, past_key_values=cache).logits for token in tokens.split(1, dim=1)], dim=1)


@torch.no_grad()
def prefilled(model, prompt):
    """A cache after a real prefill, and its logits."""
    cache = HeteroCache(model)
    return cache, model(prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1]


def differing(model, actual, expected):
    """Indices of the paged layers that differ: blocks, representatives, received attention, candidates or counters."""

    operators = model.hetero_kv_injection.attention_operators()
    retrieving = {operator.layer_idx for operator in operators if getattr(operator, "budget", None) is not None}

    def state_of(layer):
        ids, pool, group = layer.block_ids(0), layer.pool, layer.group
        # A layer that attends to everything computes no representatives.
        finalized = group.finalized[layer.layout] if layer.layer_idx in retrieving else 0
        context = torch.from_numpy(ids[layer.layout.sink_blocks : finalized].astype(np.int64))
        arrays = [*pool.read(ids, 0, group.length), pool.representatives[context]]
        if pool.accumulated is not None:
            arrays += [pool.accumulated[context], layer.state.accumulated]
        if layer.state.candidates is not None:
            arrays.append(torch.from_numpy(layer.state.candidates))
        counters = (finalized, group.prompt_length, group.length, layer.state.open_start, layer.state.preselected_end)
        return [*arrays, torch.tensor(counters)]

    def differs(layer, other):
        return not all(torch.equal(a, b) for a, b in zip(state_of(layer), state_of(other), strict=True))

    pairs = enumerate(zip(actual.layers, expected.layers, strict=True))
    return [index for index, (a, b) in pairs if isinstance(b, RetrievalLayer) and differs(a, b)]


_models: dict[str, object] = {}


@pytest.fixture
def model(request):
    architecture = getattr(request, "param", "llama")
    model = _models.setdefault(architecture, tiny_model(architecture))
    yield model
    if getattr(model, "hetero_kv_injection", None) is not None:
        eject(model)


@pytest.mark.parametrize(
    ("model", "recipe"),
    # Heads of other dims have kernels of their own: every architecture is below.
    with_few(
        itertools.product(["llama", "qwen2", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3"], RECIPES),
        list(zip(["llama", "qwen2", "llama", "gemma3_text", "gpt_oss", "llama", "qwen2"], RECIPES, strict=True)),
    ),
    indirect=["model"],
)
def test_decoding_after_a_shared_prefill_is_bit_for_bit_that_after_a_real_one(model, recipe):
    prompt, answer = random_tokens(PROMPT), random_tokens(DECODED, 1)
    recording = record_prefill(model, prompt, observation_len=40, chunk_size=CHUNK)
    # Blocks of one token in one architecture: a kernel is compiled for each size, group and dimension.
    of_one = recipe == "snapkv" and model.config.model_type == "llama"
    inject(model, recipe, command_line=small(recipe, block_size=1 if of_one else 4) | stored(model))
    expected_cache, expected_first = prefilled(model, prompt)
    cache = recording.cache_for(model)
    assert torch.equal(recording.logits, expected_first)
    assert differing(model, cache, expected_cache) == []
    assert torch.equal(decoded_logits(model, cache, answer), decoded_logits(model, expected_cache, answer))
    assert differing(model, cache, expected_cache) == []


# Groups of one query have kernels of their own, which test_exactness.py has.
@pytest.mark.parametrize(
    "model", with_few(list(ARCHITECTURES), quick=["gemma3_text", "deepseek_v3", "gpt_oss"]), indirect=True
)
def test_every_architecture_shares_its_prefill(model):
    prompt, answer = random_tokens(PROMPT), random_tokens(DECODED, 1)
    recording = record_prefill(model, prompt, chunk_size=CHUNK)
    inject(model, "kvretrieval", command_line=small("kvretrieval") | stored(model) | {"dense_layer_num": 0})
    expected = decoded_logits(model, prefilled(model, prompt)[0], answer)
    assert torch.equal(decoded_logits(model, recording.cache_for(model), answer), expected)


@pytest.mark.parametrize(
    "model", with_few(list(ARCHITECTURES), quick=["llama", "gemma3_text", "deepseek_v3"]), indirect=True
)
def test_the_untouched_model_goes_on_from_the_recording(model):
    prompt, answer = random_tokens(PROMPT), random_tokens(DECODED, 1)
    with torch.no_grad():
        expected = model(torch.cat([prompt, answer], dim=1)).logits[:, PROMPT:]
    actual = decoded_logits(model, record_prefill(model, prompt).untouched_cache(model), answer)
    assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize(
    "model", with_slow(["llama", "gemma3_text", "deepseek_v3"], slow=["deepseek_v3"]), indirect=True
)
def test_layers_left_as_they_are_load_the_prefill_too(model):
    prompt, answer = random_tokens(PROMPT), random_tokens(DECODED, 1)
    recording = record_prefill(model, prompt, chunk_size=CHUNK)
    left = {"match": {"name": r"layers\.[02]\.self_attn$"}, "replace": {"class": "default"}}
    inject(
        model,
        parse_rules({"extends": "quest.yaml", "rules": [left]}),
        command_line={**small("quest"), "kv_type": "FP32"},
    )
    expected = decoded_logits(model, prefilled(model, prompt)[0], answer)
    actual = decoded_logits(model, recording.cache_for(model), answer)
    # Their prefill is the model's own, which rounds in another order.
    assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize(
    "recipes",
    [("dense", "snapkv", "dense"), pytest.param((*RECIPES, *RECIPES[:2]), marks=pytest.mark.slow)],
    ids=["a few", "all"],
)
def test_one_recording_serves_one_recipe_after_another_and_a_second_turn(model, recipes):
    prompt, answer, turn = random_tokens(PROMPT), random_tokens(5, 1), random_tokens(12, 2)
    recording = record_prefill(model, prompt, chunk_size=CHUNK)
    for recipe in recipes:
        inject(model, recipe, command_line=small(recipe))
        caches = recording.cache_for(model), prefilled(model, prompt)[0]
        with torch.no_grad():
            for part in (*answer.split(1, dim=1), turn, *answer.split(1, dim=1)):
                actual, expected = (model(part, past_key_values=cache).logits for cache in caches)
                assert torch.equal(actual, expected)
        eject(model)


@pytest.mark.parametrize(
    ("model", "question"),
    with_few(itertools.product(["llama", "deepseek_v3", "gemma3_text"], [9, 30])),
    indirect=["model"],
)
def test_a_recording_that_goes_on_from_another_is_that_of_the_whole_prompt(model, question):
    prompt, answer = random_tokens(2 * CHUNK + question), random_tokens(DECODED, 1)
    text = record_prefill(model, prompt[:, : 2 * CHUNK], observation_len=20, chunk_size=CHUNK)
    for _ in range(2):
        recording = record_prefill(
            model, prompt[:, 2 * CHUNK :], after=text, observation_len=20, chunk_size=CHUNK, max_seq_len=128
        )
        inject(model, "kvretrieval", command_line=small("kvretrieval") | stored(model))
        expected_cache, expected_first = prefilled(model, prompt)
        cache = recording.cache_for(model)
        assert torch.equal(recording.input_ids, prompt)
        assert torch.equal(recording.logits, expected_first)
        assert differing(model, cache, expected_cache) == []
        assert torch.equal(decoded_logits(model, cache, answer), decoded_logits(model, expected_cache, answer))
        eject(model)
        with torch.no_grad():
            untouched = model(torch.cat([prompt, answer], dim=1)).logits[:, prompt.shape[1] :]
        actual = decoded_logits(model, recording.untouched_cache(model), answer)
        assert float((actual - untouched).abs().max() / untouched.abs().max()) < 1e-5


def test_recording_leaves_an_injected_model_and_its_caches_as_they_were(model):
    prompt, answer = random_tokens(PROMPT), random_tokens(DECODED, 1)
    injection = inject(model, "quest", command_line=small("quest"))
    modules = dict(model.named_modules())
    expected = decoded_logits(model, prefilled(model, prompt)[0], answer)
    cache = prefilled(model, prompt)[0]
    begun = decoded_logits(model, cache, answer[:, :10])
    recording = record_prefill(model, random_tokens(50, 7))
    assert model.hetero_kv_injection is injection
    assert dict(model.named_modules()) == modules
    assert torch.equal(torch.cat([begun, decoded_logits(model, cache, answer[:, 10:])], dim=1), expected)
    assert recording.cache_for(model).get_seq_length() == 50


def test_the_chunk_size_defaults_to_that_of_the_injected_rules(model):
    reports = []
    inject(model, "dense", command_line=small("dense"))
    record_prefill(model, random_tokens(70), on_progress=lambda *report: reports.append(report))
    assert [tokens for layers, _, tokens, _ in reports[:4]] == [0, 32, 64, 70]


def test_an_operator_that_does_not_prefill_exactly_is_named(model, monkeypatch):
    recording = record_prefill(model, random_tokens(20))
    injection = inject(model, "dense", command_line=small("dense"))
    assert shares_prefill(model)
    assert shares_prefill(injection)
    injection.operators["model.layers.1.self_attn"].prefills_exactly = False
    assert not shares_prefill(model)
    with pytest.raises(HeteroKVError, match=r"model\.layers\.1\.self_attn \(RetrievalAttention\) does not prefill"):
        recording.cache_for(model)


def test_an_operator_shares_only_if_it_says_so(model):
    recording = record_prefill(model, random_tokens(20))
    operator = next(inject(model, "dense", command_line=small("dense")).attention_operators())
    assert AttentionOperator.prefills_exactly is False
    with pytest.raises(HeteroKVError, match=r"self_attn \(RetrievalAttention\) cannot load a recorded prefill"):
        AttentionOperator.load_prefill(operator, operator.new_cache_layer(), None, recording.layers[0])


def test_too_few_recorded_queries_are_an_error_that_says_how_many_are_needed(model):
    recording = record_prefill(model, random_tokens(60), observation_len=10)
    inject(model, "snapkv", command_line={**small("snapkv"), "observation": 30})
    with pytest.raises(HeteroKVError, match="record it with observation_len=30"):
        recording.cache_for(model)


def test_a_prompt_shorter_than_the_observation_window_is_recorded_whole(model):
    prompt, answer = random_tokens(40), random_tokens(5, 1)
    recording = record_prefill(model, prompt, observation_len=50, chunk_size=CHUNK)
    inject(model, "snapkv", command_line={**small("snapkv"), "observation": UNKNOWN_QUESTION})
    expected = decoded_logits(model, prefilled(model, prompt)[0], answer)
    assert torch.equal(decoded_logits(model, recording.cache_for(model), answer), expected)


def test_misuse_is_refused_by_name(model):
    recording = record_prefill(model, random_tokens(20), max_seq_len=10)
    with pytest.raises(HeteroKVError, match="LlamaForCausalLM has no rules injected"):
        recording.cache_for(model)
    with pytest.raises(HeteroKVError, match="recorded with another model"):
        recording.untouched_cache(tiny_model("llama", seed=1))
    with pytest.raises(HeteroKVError, match="recorded with another model"):
        record_prefill(tiny_model("llama", seed=1), random_tokens(5), after=recording)
    for shape in ([2, 20], [1, 1], [20]):
        with pytest.raises(HeteroKVError, match=r"input_ids has the shape \["):
            record_prefill(model, torch.ones(shape, dtype=torch.long))
    inject(model, "dense", command_line=small("dense"))
    with pytest.raises(HeteroKVError, match=r"call hetero_kv\.eject\(model\) before untouched_cache"):
        recording.untouched_cache(model)
    with pytest.raises(CacheFullError, match="max_seq_len is 10"):
        recording.cache_for(model)


def test_a_failing_recording_puts_the_rules_back(model):
    injection = inject(model, "dense", command_line=small("dense"))

    def stop(*report):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_prefill(model, random_tokens(20), on_progress=stop)
    assert model.hetero_kv_injection is injection
    assert prefilled(model, random_tokens(20))[0].get_seq_length() == 20


SHADOWKV = {
    "rank": 12,
    "landmark_chunk_size": 4,
    "outlier_chunks": 2,
    "local_chunks": 2,
    "sparse_budget": 16,
    "chunk_size": CHUNK,
    "max_seq_len": 128,
}


@pytest.mark.parametrize(
    ("model", "recipe"),
    with_few(
        list(itertools.product(["llama", "qwen2", "phi3", "glm"], ["shadowkv", "shadowkv_plus"])),
        quick=[("qwen2", "shadowkv_plus")],
    ),
    indirect=["model"],
)
def test_shadowkv_goes_on_from_a_recording_bit_for_bit(model, recipe):
    prompt, answer = random_tokens(PROMPT), random_tokens(DECODED, 1)
    recording = record_prefill(model, prompt, chunk_size=CHUNK)
    inject(model, recipe, command_line=SHADOWKV)
    expected = decoded_logits(model, prefilled(model, prompt)[0], answer)
    cache = recording.cache_for(model)
    assert len({id(layer.factors.rotary) for layer in cache.layers}) == 1
    assert torch.equal(decoded_logits(model, cache, answer), expected)


def test_shadowkv_knows_the_rotations_of_a_recording_that_goes_on_from_another(model):
    prompt, answer = random_tokens(PROMPT), random_tokens(DECODED, 1)
    beginning = record_prefill(model, prompt[:, :40], chunk_size=CHUNK)
    recording = record_prefill(model, prompt[:, 40:], after=beginning, chunk_size=CHUNK)
    exact = {"rank": 32, "sparse_budget": "all", "value_type": "FP32"}
    inject(model, "shadowkv", command_line={**SHADOWKV, **exact})
    expected = decoded_logits(model, prefilled(model, prompt)[0], answer)
    torch.testing.assert_close(decoded_logits(model, recording.cache_for(model), answer), expected)
