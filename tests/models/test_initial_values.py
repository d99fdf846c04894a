"""Modules on the meta device are built without values; others get theirs, and the generator is left where it was."""

from __future__ import annotations

import torch
from torch import nn

from hetero_kv.models.initial_values import NothingDrawn


def test_nothing_is_drawn_on_the_meta_device_alone():
    torch.manual_seed(1)
    expected = nn.Embedding(3, 4), nn.Linear(4, 5)
    torch.manual_seed(1)
    with NothingDrawn():
        empty = nn.Embedding(3, 4, device="meta"), nn.Linear(4, 5, device="meta")
        assert empty[0].weight.normal_() is empty[0].weight
        found = nn.Embedding(3, 4), nn.Linear(4, 5)
        drawn = torch.ones(2).uniform_(2, 3)
    assert empty[1].weight.shape == (5, 4)
    assert empty[1].weight.requires_grad
    assert torch.equal(found[0].weight, expected[0].weight)
    assert torch.equal(found[1].weight, expected[1].weight)
    assert (drawn >= 2).all()
