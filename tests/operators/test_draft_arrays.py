"""Guesses, and the forwards that verify them, take arrays, and compute what each token's own decode step does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_kv import inject
from hetero_kv.cpu_ops.step_contract import LONG
from hetero_kv.engine.draft_blocks import DraftBlocks
from hetero_kv.families.retrieval import attention, draft_attention
from hetero_kv.serving.forward import ModelForward
from tests.operators.test_ragged_arrays import SETTINGS
from tests.support.ragged_rows import prompt
from tests.support.tiny_models import tiny_model

#: More than the tokens from which on consecutive tokens share a reading; within a block, and at its end.
LENGTHS = (LONG + 61, LONG + 63)
TOKENS = [3, 90, 41, 17, 5]


def prefilled(recipe, length, shares=True):
    """A forward, and a cache behind a prompt and one decoded token."""
    model = tiny_model("qwen2")
    inject(model, recipe, command_line=SETTINGS | {"weights": "q8_0", "block_size": 64, "max_seq_len": 17000})
    # As where `speculation` is `sparse`.
    model.hetero_kv_injection.sparse_drafts = shares
    forward = ModelForward(model)
    cache = forward.new_cache(model.hetero_kv_injection.common_store(17000))
    with torch.no_grad():
        model(prompt(length - 1, 0)[None], past_key_values=cache)
    forward.decode([cache], [7])
    return forward, cache


@pytest.mark.parametrize("recipe", ["dense", pytest.param("quest", marks=pytest.mark.slow)])
def test_a_guess_by_arrays_is_that_of_the_wrapped_layer(recipe, monkeypatch):
    monkeypatch.setattr(draft_attention, "NEWEST", 64)
    monkeypatch.setattr(draft_attention, "CHOSEN", 128)
    forward, cache = prefilled(recipe, 803)

    def guesses():
        few = DraftBlocks()
        with forward.guessing([cache]):
            return [forward.guess([cache], [token], [few]) for token in (3, 90)]

    calls, attend = [], draft_attention.attend_natively
    monkeypatch.setattr(attention, "attend_natively", lambda *given: (calls.append(given), attend(*given)))
    by_arrays = guesses()
    assert len(calls) == 2 * forward.model.config.num_hidden_layers
    monkeypatch.setattr(attention.RetrievalAttention, "prepare_steps", lambda *given: None)
    own = guesses()
    assert len(calls) == 2 * forward.model.config.num_hidden_layers
    torch.testing.assert_close(by_arrays, own, rtol=0, atol=1e-4)


def test_without_sparse_guesses_a_long_sequence_is_verified_bit_by_bit():
    forward, cache = prefilled("dense", LENGTHS[0], shares=False)
    (logits,), (stored,) = forward.verify([cache], [TOKENS])
    stored.keep(1)
    one_by_one = [forward.decode([cache], [token])[0] for token in TOKENS[1:]]
    assert torch.equal(logits[1:], torch.stack(one_by_one))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("others", [0, 1])
def test_tokens_of_a_long_sequence_are_verified_as_if_decoded_one_by_one(length, others, monkeypatch):
    """In the first layer, whose inputs are the same; later ones round activations to eight bits. Others: short ones."""
    forward, cache = prefilled("dense", length)
    short = [forward.new_cache(cache.groups[0].store) for _ in range(others)]
    for each in short:
        forward.prompt(each, prompt(40, 1).tolist())
        forward.decode([each], [7])
    drafts = [TOKENS] + [TOKENS[:2]] * others
    found, attend = [], attention.RetrievalAttention.attend_steps

    def recorded(self, prepared, arrays, *rest):
        attend(self, prepared, arrays, *rest)
        *_, queue = rest
        queue.run()
        if self.layer_idx == 0:
            found.extend(arrays.attended.copy())

    monkeypatch.setattr(attention.RetrievalAttention, "attend_steps", recorded)
    _, stored = forward.verify([cache, *short], drafts)
    together = found.copy()
    found.clear()
    for each in stored:
        each.keep(1)
    for each, tokens in zip([cache, *short], drafts, strict=True):
        for token in tokens[1:]:
            forward.decode([each], [token])
    rows = [1, 2, 3, 4, 6][: len(found)]
    assert len(found) == 4 + others
    np.testing.assert_allclose(np.stack([together[row] for row in rows]), np.stack(found), rtol=5e-5, atol=1e-6)
