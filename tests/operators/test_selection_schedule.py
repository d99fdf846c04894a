"""When blocks are chosen: the schedule of layers and tokens, dense layers, and per-layer budgets."""

from __future__ import annotations

import itertools

import pytest

from hetero_kv import eject
from hetero_kv.errors import HeteroKVError
from hetero_kv.operators import RetrievalAttention
from tests.operators.retrieval_models import injected, logits, random_tokens, recorded


@pytest.mark.parametrize(("layer_step", "token_step"), list(itertools.product([1, 2, 3], [1, 3])))
def test_blocks_are_reselected_by_the_schedule_and_reused_between(deep_llama, monkeypatch, layer_step, token_step):
    record, chosen = recorded(monkeypatch), []
    best = RetrievalAttention._best
    monkeypatch.setattr(
        RetrievalAttention, "_best", lambda self, *args: (chosen.append(self.layer_idx), best(self, *args))[1]
    )
    cache = injected(
        deep_llama, representative_type="MEAN", top_k_blocks=3, layer_step=layer_step, token_step=token_step
    )
    logits(deep_llama, cache, random_tokens(70))
    last = {}
    for index, token in enumerate(random_tokens(9, 1).split(1, dim=1)):
        record.clear()
        chosen.clear()
        logits(deep_llama, cache, token)
        due = [i for i in range(4) if i % layer_step == 0] if index % token_step == 0 else []
        assert chosen == due
        for layer_idx, decoded, positions, _, layer in record:
            assert decoded == index
            blocks = layer.layout.context_blocks(70 + index + 1)
            if layer_idx in due:
                last[layer_idx // layer_step] = positions, blocks
            chosen_last, seen = last[layer_idx // layer_step]
            # The blocks that have left Local since are attended to as well.
            assert positions[0, 0].tolist() == [*chosen_last[0, 0].tolist(), *range(seen, blocks)]


@pytest.mark.parametrize("head_select_mode", ["SHARED", "SEPARATE"])
def test_a_block_that_leaves_local_between_two_selections_is_attended_to(deep_llama, monkeypatch, head_select_mode):
    record = recorded(monkeypatch)
    settings = {"top_k_blocks": 1, "token_step": 12, "head_select_mode": head_select_mode}
    cache = injected(deep_llama, representative_type="MEAN", **settings)
    logits(deep_llama, cache, random_tokens(70), random_tokens(1, 1))
    selected = cache.layers[0].context_blocks
    logits(deep_llama, cache, *random_tokens(10, 2).split(1, dim=1))
    left = list(range(selected, cache.layers[0].context_blocks))
    assert len(left) == 3
    for _, _, positions, *_ in record[-4:]:
        assert all(each[1:].tolist() == left for each in positions[0])


def test_layers_behind_dense_ones_reselect_by_the_schedule_too(deep_llama, monkeypatch):
    chosen, best = [], RetrievalAttention._best
    monkeypatch.setattr(
        RetrievalAttention, "_best", lambda self, *args: (chosen.append(self.layer_idx), best(self, *args))[1]
    )
    settings = {"top_k_blocks": 2, "layer_step": 2, "token_step": 2, "dense_layer_num": 1}
    cache = injected(deep_llama, representative_type="MEAN", **settings)
    logits(deep_llama, cache, random_tokens(70), *random_tokens(6, 1).split(1, dim=1))
    assert chosen == [1, 2] * 3


def test_a_new_prompt_resets_the_count_of_token_step(deep_llama, monkeypatch):
    chosen, best = [], RetrievalAttention._best
    monkeypatch.setattr(
        RetrievalAttention, "_best", lambda self, *args: (chosen.append(self.layer_idx), best(self, *args))[1]
    )
    cache = injected(deep_llama, representative_type="MEAN", top_k_blocks=3, token_step=4)
    selecting = []
    for turn, answer in ((70, 6), (9, 6)):
        logits(deep_llama, cache, random_tokens(turn, turn))
        for token in random_tokens(answer, turn + 1).split(1, dim=1):
            chosen.clear()
            logits(deep_llama, cache, token)
            selecting.append(chosen == [0, 1, 2, 3])
    assert selecting == [True, False, False, False, True, False] * 2


def test_dense_layers_attend_to_everything(deep_llama, monkeypatch):
    record = recorded(monkeypatch)
    cache = injected(deep_llama, representative_type="MEAN", top_k_blocks=2, dense_layer_num=3)
    logits(deep_llama, cache, random_tokens(60), random_tokens(1, 1))
    assert [layer for layer, *_ in record] == [3]


def test_budgets_may_differ_by_layer(deep_llama, monkeypatch):
    record = recorded(monkeypatch)
    cache = injected(deep_llama, representative_type="MEAN", top_k_blocks="pyramid(1, 7)")
    logits(deep_llama, cache, random_tokens(90), random_tokens(1, 1))
    assert [positions.shape[2] for _, _, positions, *_ in record] == [7, 5, 3, 1]
    eject(deep_llama)
    with pytest.raises(HeteroKVError, match="top_k_blocks lists 2 numbers, but the model has 4 layers"):
        injected(deep_llama, top_k_blocks=[1, 2])
