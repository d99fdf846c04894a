"""Beams over layers that drop entries have the logits of their tokens alone."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import HeteroCache
from hetero_kv.families.bounded import eviction
from tests.operators.bounded_models import ANY_STORED, Letters, bounded, logits, positions, tokens
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model

PROMPT, NEW, BEAMS, BATCH, BUDGET = 50, 9, 3, 2, 24
LAYERS = 2


@pytest.mark.parametrize("policy", with_few(eviction.names(), ("infinipot",)))
def test_every_beam_has_the_logits_of_its_tokens_alone_while_entries_are_dropped(policy):
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    cache = bounded(model, policy=policy, budget=BUDGET)
    prompts = tokens(PROMPT, batch=BATCH)
    found = model.generate(
        prompts,
        past_key_values=cache,
        max_new_tokens=NEW,
        num_beams=BEAMS,
        num_return_sequences=BEAMS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert sum(cache.statistics["cached_entries"]) <= LAYERS * BUDGET
    assert cache.get_seq_length() == PROMPT + NEW - 1
    # Else no beam ever went on as another, and nothing was reordered.
    assert (found.beam_indices[:, 1:NEW] != found.beam_indices[:, : NEW - 1]).any()

    for beam, (sequence, rows) in enumerate(zip(found.sequences, found.beam_indices, strict=True)):
        assert sequence[:PROMPT].equal(prompts[beam // BEAMS])
        alone = HeteroCache(model, tokenizer=Letters())
        answer = sequence[None, PROMPT : PROMPT + NEW - 1].split(1, dim=1)
        forced = logits(model, alone, sequence[None, :PROMPT], *answer)[0, PROMPT - 1 :]
        at_its_rows = torch.stack([step[row] for step, row in zip(found.logits, rows[:NEW], strict=True)])
        torch.testing.assert_close(at_its_rows, forced, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", ANY_STORED)
def test_a_beam_takes_its_entries_with_it(policy):
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    prompts, answers = tokens(PROMPT, batch=BEAMS), tokens(6, 1, batch=BEAMS).split(1, dim=1)
    cache = bounded(model, policy=policy, budget=BUDGET)
    logits(model, cache, prompts)
    # Where each row's tokens came from, after every step's reordering.
    history, orders = list(prompts), [[1, 1, 0], [2, 0, 1], [0, 0, 2], [1, 2, 0], [2, 2, 2], [0, 1, 2]]
    for order, answer in zip(orders, answers, strict=True):
        cache.reorder_cache(torch.tensor(order))
        logits(model, cache, answer)
        history = [torch.cat([history[row], answer[i]]) for i, row in enumerate(order)]
    for row, sequence in enumerate(history):
        alone = HeteroCache(model, tokenizer=Letters())
        logits(model, alone, sequence[None, :PROMPT], *sequence[None, PROMPT:].split(1, dim=1))
        for together, one in zip(positions(cache), positions(alone), strict=True):
            assert together[row].equal(one[0])
