"""Retrieval of single tokens with a GPU: the CPU's answers, with one wait and two copies a layer."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import eject, inject
from tests.support.devices import model_on
from tests.support.launch_counts import counts_of
from tests.support.small_recipes import injected, new_cache, small_recipe
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.cuda

SMALLER = {"block_size": 4, "sink_tokens": 4, "local_windows_len": 8}
COVERING = {"token_budget": 1.0, "alpha": 1e9}
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("loki", "magicpig", "retroinfer")]


def tokens_of(rows=2, count=76):
    return torch.randint(2, 97, (rows, count), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def answers(model, cache, tokens):
    """Logits of a prompt, 16 tokens one by one and another prompt."""
    parts = [tokens[:, :50], *tokens[:, 50:66].split(1, dim=1), tokens[:, 66:]]
    return torch.cat([model(part.to(model.device), past_key_values=cache).logits.cpu() for part in parts], dim=1)


# Any budget is compared with a CPU's below, and one that covers everything with the model's there.
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["infinigen", "sparq"])
def test_a_budget_that_covers_everything_is_full_attention(gpu, recipe, monkeypatch):
    model, tokens = model_on(torch.device("cuda", 0), tiny_model("llama")), tokens_of()
    with torch.no_grad():
        expected = model(tokens.to("cuda")).logits.cpu()
    settings = COVERING if recipe == "infinigen" else {"token_budget": 1.0}
    inject(model, small_recipe(recipe, **SMALLER), command_line={**settings, "dense_layer_num": 0})
    for operator in model.hetero_kv_injection.attention_operators():
        monkeypatch.setattr(operator.chooser, "covers", lambda tokens: False)
    torch.testing.assert_close(answers(model, new_cache(model), tokens), expected, rtol=1e-3, atol=1e-3)
    eject(model)


@pytest.mark.parametrize("recipe", ["infinigen", pytest.param("sparq", marks=pytest.mark.slow), *OTHERS])
def test_a_token_waits_once_in_a_layer_and_is_copied_down_and_back(recipe):
    counts = counts_of((recipe,), as_shipped=False, tokens=8)[recipe]
    assert (counts.waits, counts.pageable) == (1, 0)
    # Of three layers the last alone has one before it that guesses what it will ask for.
    assert counts.pinned == pytest.approx(2 + 1 / 3 if recipe == "infinigen" else 2)


def test_infinigen_chooses_as_on_a_cpu(gpu):
    plain, found = tiny_model("llama"), []
    for model in (plain, model_on(torch.device("cuda", 0), plain)):
        cache = injected(model, small_recipe("infinigen", **SMALLER))
        found.append((answers(model, cache, tokens_of()), cache.statistics["attended_tokens"]))
        eject(model)
    (expected, counted), (actual, mine) = found
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    assert mine == counted
