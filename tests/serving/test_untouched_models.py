"""The forwards of an untouched model, on transformers' own cache."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hetero_kv.serving.forward import ModelForward
from tests.support.slow_variants import with_few
from tests.support.tiny_models import ARCHITECTURES, HYBRIDS, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

# Behind its cache transformers' Jamba takes one token at a time: several begin with an empty state.
CONTINUED = [name for name in (*ARCHITECTURES, *HYBRIDS) if name != "jamba"]


@pytest.mark.parametrize("architecture", with_few(CONTINUED, quick=["llama", "bamba"]))
def test_tokens_in_parts_have_the_logits_of_one_forward(architecture):
    model = tiny_model(architecture)
    tokens = torch.arange(40).mul(7).remainder(90).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens]), use_cache=False).logits[0]
    cache, forward = DynamicCache(config=model.config), ModelForward(model)
    first = forward.prompt(cache, tokens[:20])
    parts = [forward.every(cache, tokens[20:30])]
    parts += [forward.decode([cache], [token]) for token in tokens[30:]]
    torch.testing.assert_close(torch.cat([first[None], *parts]), expected[19:], rtol=1e-4, atol=1e-4)
