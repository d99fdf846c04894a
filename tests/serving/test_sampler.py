"""A sampler draws from the distribution that transformers' processors leave; penalties are as the APIs define them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hetero_kv import SamplingParams
from hetero_kv.errors import ConfigError, HeteroKVError
from hetero_kv.serving.sampler import LogitsError, Sampler

VOCAB = 50
PROMPT = (3, 4, 4, 9)


def random_logits(seed, vocab=VOCAB, spread=3.0):
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def theirs(logits, params):
    """The distribution that transformers samples from."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors(torch.tensor([PROMPT]), logits[None].clone())[0].softmax(dim=-1)


def ours(logits, params):
    """The distribution that a sampler draws from: the tokens' weights, before the draw."""
    sampler = Sampler(params, PROMPT, len(logits))
    own = logits.clone()
    sampler._penalize(own)
    weights = torch.from_numpy(sampler._weights(own)).double()
    return weights / weights.sum()


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 7, VOCAB, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    penalty=st.sampled_from([1.0, 1.3, 0.8]),
)
def test_the_distribution_is_that_of_transformers(seed, temperature, top_k, top_p, min_p, penalty):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
    logits = random_logits(seed)
    torch.testing.assert_close(ours(logits, params).float(), theirs(logits, params), atol=1e-6, rtol=1e-4)


def test_a_large_vocabulary_is_cut_as_a_small_one():
    flat = random_logits(1, 30_000, spread=0.5)
    for top_p in (0.2, 0.9, 0.999):
        params = SamplingParams(temperature=1.0, top_p=top_p)
        torch.testing.assert_close(ours(flat, params).float(), theirs(flat, params), atol=1e-6, rtol=1e-3)


def test_tokens_are_drawn_as_often_as_their_probability_says():
    params = SamplingParams(temperature=0.9, top_k=6, seed=1)
    logits, draws = random_logits(5), 20_000
    sampler = Sampler(params, PROMPT, VOCAB)
    counts = Counter(sampler.choose(logits).token for _ in range(draws))
    expected = ours(logits, params).numpy() * draws
    kept = expected > 0
    assert set(counts) <= set(np.flatnonzero(kept))
    chi_square = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in np.flatnonzero(kept))
    # Of five degrees of freedom, exceeded once in 100,000 times.
    assert chi_square < 30.9


def test_a_seed_repeats_itself_and_another_does_not():
    logits = random_logits(2, spread=0.1)

    def drawn(seed):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), PROMPT, VOCAB)
        return [sampler.choose(logits).token for _ in range(20)]

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
    assert drawn(None) != drawn(None)


def test_greedy_takes_the_likeliest_token_of_what_penalties_leave():
    logits = torch.zeros(VOCAB)
    logits[[10, 11, 12]] = torch.tensor([3.0, 2.5, 2.0])
    plain = Sampler(SamplingParams(), PROMPT, VOCAB)
    assert [plain.choose(logits).token for _ in range(3)] == [10, 10, 10]
    frequent = Sampler(SamplingParams(frequency_penalty=0.4), PROMPT, VOCAB)
    assert [frequent.choose(logits).token for _ in range(6)] == [10, 10, 11, 10, 11, 12]
    present = Sampler(SamplingParams(presence_penalty=0.8), PROMPT, VOCAB)
    assert [present.choose(logits).token for _ in range(5)] == [10, 11, 10, 10, 10]
    repeated = Sampler(SamplingParams(repetition_penalty=2.0), (10,), VOCAB)
    assert [repeated.choose(logits).token for _ in range(3)] == [11, 12, 10]
    biased = Sampler(SamplingParams(logit_bias={12: 5.0, 10: -100}), PROMPT, VOCAB)
    assert biased.choose(logits).token == 12
    suppressed = Sampler(SamplingParams(logit_bias={10: 100}), PROMPT, VOCAB, suppressed=(10, VOCAB + 3))
    assert suppressed.choose(logits).token == 11
    assert logits[10] == 3.0


def test_log_probabilities_are_the_models_whatever_is_drawn():
    logits = random_logits(3)
    expected = logits.log_softmax(dim=-1)
    params = SamplingParams(temperature=0.5, top_k=1, logit_bias={7: 100.0}, logprobs=3)
    choice = Sampler(params, PROMPT, VOCAB).choose(logits)
    assert choice.token == 7
    assert choice.logprob == pytest.approx(float(expected[7]))
    best = expected.topk(3)
    assert list(choice.alternatives) == best.indices.tolist()
    assert list(choice.alternatives.values()) == pytest.approx(best.values.tolist())
    alone = Sampler(SamplingParams(logprobs=0), PROMPT, VOCAB).choose(logits)
    assert alone.logprob == pytest.approx(float(expected.max()))
    assert alone.alternatives == {}


class Alternating:
    """Allows even and odd tokens in turn."""

    def __init__(self):
        self.accepted = []

    def apply(self, logits):
        logits[1 - len(self.accepted) % 2 :: 2] = -torch.inf

    def accept(self, token):
        self.accepted.append(token)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_a_mask_decides_what_may_come(temperature):
    mask = Alternating()
    sampler = Sampler(SamplingParams(temperature=temperature, mask=mask), PROMPT, VOCAB)
    tokens = [sampler.choose(random_logits(seed)).token for seed in range(8)]
    assert [token % 2 for token in tokens] == [0, 1] * 4
    assert mask.accepted == tokens


def test_logits_that_allow_no_token_are_errors():
    class Forbidding(Alternating):
        def apply(self, logits):
            logits[:] = -torch.inf

    samplers = [
        Sampler(params, PROMPT, VOCAB)
        for params in (
            SamplingParams(),
            SamplingParams(temperature=1.0),
            SamplingParams(mask=Forbidding()),
            SamplingParams(temperature=1.0, mask=Forbidding()),
            SamplingParams(),
        )
    ]
    logits = torch.stack([random_logits(seed) for seed in range(5)])
    logits[0, 3], logits[1, 3] = torch.nan, torch.inf
    for sampler, row, named in zip(
        samplers, logits, ("is nan", "is inf", *["every token is forbidden"] * 2), strict=False
    ):
        with pytest.raises(LogitsError, match=named):
            sampler.choose(row)
    assert samplers[-1].choose(logits[-1]).token == int(logits[-1].argmax())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", float("nan")),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: 1e39}),
        ("presence_penalty", -1e39),
        ("repetition_penalty", 1e-39),
        ("seed", -1),
        ("stop", ("", "a")),
        ("logprobs", 21),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"{name} is "):
        SamplingParams(**{name: value})


def test_a_bias_of_a_token_that_the_model_has_not_is_refused():
    with pytest.raises(HeteroKVError, match="token 50; the model has tokens 0 to 49"):
        Sampler(SamplingParams(logit_bias={VOCAB: 1.0}), PROMPT, VOCAB)
