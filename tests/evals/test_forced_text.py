"""Divergence, likelihood and entropy of methods against full attention, at the same tokens."""

from __future__ import annotations

import pytest
import torch

from benchmarks.forced_text import DENSE, compared, log_probabilities
from hetero_kv.evals import ConfiguredModel, config_specs
from tests.support.tiny_evaluation import SPARSE, tiny_loaded

FED = 12


@pytest.fixture(scope="module")
def model():
    configs = config_specs([DENSE, "quest:top_k_blocks=all", "streaming"])
    return ConfiguredModel(tiny_loaded(), configs, baseline=False, share_baseline=True, settings=SPARSE)


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(3, 259, (150,), generator=torch.Generator().manual_seed(2)).tolist()


@torch.no_grad()
def test_the_baseline_has_the_models_own_likelihoods(model, tokens):
    own = model.loaded.model(torch.tensor([tokens])).logits[0, -FED - 1 : -1].log_softmax(-1)
    torch.testing.assert_close(log_probabilities(model, DENSE, tokens, FED), own, rtol=0, atol=1e-4)


def test_a_covering_budget_is_full_attention_and_a_window_is_not(model, tokens):
    covering, window = compared(model, ["quest:top_k_blocks=all", "streaming"], tokens, FED)
    assert covering == pytest.approx((0, 0, 0), abs=1e-5)
    assert window.divergence > 1e-4
    assert abs(window.likelihood) > 1e-4
    assert abs(window.entropy) > 1e-5
