"""Preselection: the question restricts an answer's candidates until the next turn and while tokens remain."""

from __future__ import annotations

from tests.operators.retrieval_models import injected, logits, random_tokens, recorded


def test_preselection_restricts_the_answer_and_is_repeated_for_the_next_turn(deep_llama, monkeypatch):
    record = recorded(monkeypatch)
    cache = injected(
        deep_llama, representative_type="MEAN", top_k_blocks=2, preselect_block=True, preselect_block_count=4
    )
    seen = []
    for turn in range(2):
        logits(deep_llama, cache, random_tokens(80, turn))
        candidates = [set(layer.state.candidates[0, 0].tolist()) for layer in cache.layers]
        end = cache.layers[0].context_blocks
        record.clear()
        logits(deep_llama, cache, *random_tokens(30, turn + 5).split(1, dim=1))
        for layer_idx, _, positions, *_ in record:
            assert all(p in candidates[layer_idx] or p >= end for p in positions[0, 0].tolist())
        seen.append(candidates)
    assert seen[0] != seen[1]


def test_blocks_that_leave_local_after_preselection_are_candidates_from_the_first_one_on(deep_llama, monkeypatch):
    record = recorded(monkeypatch)
    # As many are chosen as were preselected, and the one that entered.
    cache = injected(
        deep_llama, representative_type="MEAN", top_k_blocks=5, preselect_block=True, preselect_block_count=5
    )
    logits(deep_llama, cache, random_tokens(80))
    end = cache.layers[0].context_blocks
    candidates = [set(layer.state.candidates[0, 0].tolist()) for layer in cache.layers]
    for operator in deep_llama.hetero_kv_injection.attention_operators():
        operator.budget = 6
    for token in random_tokens(4, 5).split(1, dim=1):
        record.clear()
        logits(deep_llama, cache, token)
    assert cache.layers[0].context_blocks == end + 1
    assert [set(positions[0, 0].tolist()) for _, _, positions, *_ in record] == [each | {end} for each in candidates]


def test_a_crop_into_the_preselection_makes_all_blocks_candidates(deep_llama, monkeypatch):
    record = recorded(monkeypatch)
    cache = injected(
        deep_llama, representative_type="MEAN", top_k_blocks=3, preselect_block=True, preselect_block_count=4
    )
    logits(deep_llama, cache, random_tokens(83))
    cache.crop(-3)
    whole = [layer.state.candidates is None for layer in cache.layers]
    cache.crop(-40)
    blocks = cache.layers[0].context_blocks
    record.clear()
    logits(deep_llama, cache, random_tokens(1, 3))
    assert all(positions.max() < blocks for _, _, positions, *_ in record)
    assert [whole, [layer.state.candidates is None for layer in cache.layers]] == [[False] * 4, [True] * 4]
