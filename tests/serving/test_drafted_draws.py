"""Tokens that are drawn from the logits of a draft."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import SamplingParams
from hetero_kv.serving.sampler import Sampler
from hetero_kv.serving.speculation.burst import Burst

pytestmark = pytest.mark.usefixtures("one_thread")


def test_what_is_drawn_with_guesses_has_the_models_distribution():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, generator=generator) * 2
    params = [SamplingParams(temperature=0.8, top_k=5, min_p=0.05, seed=seed) for seed in range(4000)]
    likely = torch.tensor(Sampler(params[0], [], 7)._weights(logits[0])).double()
    second = torch.tensor(Sampler(params[0], [], 7)._weights(logits[1])).double()
    guess = int(likely.argmax())
    counts, behind = torch.zeros(7), torch.zeros(7)
    for each in params:
        burst, sampler = Burst(logits, [guess, 3]), Sampler(each, [], 7)
        first = burst.choose(sampler).token
        counts[first] += 1
        assert burst.is_over == (first != guess)
        if not burst.is_over:
            behind[burst.choose(sampler).token] += 1
    for found, weights in ((counts, likely), (behind, second)):
        expected = weights / weights.sum() * found.sum()
        allowed = expected > 0
        assert not found[~allowed].any()
        statistic = float(((found - expected)[allowed] ** 2 / expected[allowed]).sum())
        # One in a thousand samples of the distribution is further away, with 4 degrees of freedom at most.
        assert statistic < 18.5


def test_an_interrupted_end_of_a_burst_loses_no_token():
    class Stored:
        calls = 0

        def keep(self, tokens):
            self.calls += 1
            if self.calls == 1:
                raise KeyboardInterrupt

    logits, stored = torch.eye(3), Stored()
    burst, sampler = Burst(logits, [1, 1], stored), Sampler(SamplingParams(temperature=1.0, seed=1), [], 3)
    with pytest.raises(KeyboardInterrupt):
        [burst.choose(sampler) for _ in range(3)]
    again, other = Burst(logits, [1, 1]), Sampler(SamplingParams(temperature=1.0, seed=1), [], 3)
    expected = []
    while not again.is_over:
        expected.append(again.choose(other).token)
    assert burst.choose(sampler).token == expected[-1]
    assert (burst.is_over, stored.calls) == (True, 2)
