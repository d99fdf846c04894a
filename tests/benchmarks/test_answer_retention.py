"""`python -m benchmarks.answer_retention`: where the digits are, and which of them the kept set contains."""

from __future__ import annotations

import torch

from benchmarks.answer_retention import mention_positions, retained


def test_every_mention_of_a_key_is_found():
    tokens = [9, 4, 5, 7, 9, 4, 5, 4, 5, 7]
    assert mention_positions(tokens, [4, 5, 7]).tolist() == [[1, 2, 3], [7, 8, 9]]
    assert len(mention_positions(tokens, [7, 7])) == 0


def test_a_digit_counts_for_the_heads_that_keep_its_position():
    digits = torch.tensor([[1, 2, 3], [7, 8, 9]])
    positions = torch.tensor([[0, 1, 2, 3, 8], [2, 4, 5, 7, 9]])
    assert retained(positions, digits).tolist() == [
        [[True, True, True], [False, True, False]],
        [[False, True, False], [True, False, True]],
    ]
