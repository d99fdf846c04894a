"""PyramidKV: every layer keeps its own budget of entries, as the dense reference does."""

from __future__ import annotations

import pytest
import torch

from tests.eviction import dense_policies as dense
from tests.eviction.bounded_runs import BUDGET, GENERATED, MODELS, PROMPT, bounded, passes, tokens
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model

WINDOW, KERNEL = 12, 5


def pyramid(layers, beta):
    """Section 3.2 without the cases of the authors' code: the top layer has 1/beta of the mean, the fall is linear."""
    mean = BUDGET - WINDOW
    top = mean / beta
    step = 2 * (mean - top) / (layers - 1)
    return [WINDOW + round(top + step * above) for above in reversed(range(layers))]


@pytest.mark.parametrize(
    ("architecture", "layers", "beta", "budgets"),
    with_few([("llama", 3, 20, [67, 40, 13]), ("qwen3", 4, 2, [54, 45, 35, 26]), ("phi", 2, 4, [61, 19])]),
)
def test_every_layer_keeps_what_the_reference_keeps_with_its_budget(recorded, architecture, layers, beta, budgets):
    assert pyramid(layers, beta) == budgets
    assert sum(budgets) == layers * BUDGET
    model = tiny_model(architecture, **MODELS[architecture], num_hidden_layers=layers)
    cache = bounded(model, policy="pyramidkv", budget=BUDGET, recent_tokens=WINDOW, kernel_size=KERNEL, beta=beta)
    kept = []
    with torch.no_grad():
        for part in (tokens(PROMPT), *tokens(GENERATED, 1).split(1, dim=1)):
            model(part, past_key_values=cache)
            assert cache.statistics["cached_entries"] == budgets
            kept.append([layer.entries.positions[0] for layer in cache.layers])
    for index, budget in enumerate(budgets):
        calls = recorded[index]
        reference = dense.SnapKV(WINDOW, KERNEL)
        sets = dense.kept_positions(reference, passes(calls, [PROMPT] + [1] * GENERATED), budget, calls[0][2])
        for step, (mine, expected) in enumerate(zip(kept, sets, strict=True)):
            assert mine[index].equal(expected), f"layer {index}: after {step} generated tokens"
