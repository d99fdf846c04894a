"""How far the logits of a file's model are from its original's."""

from __future__ import annotations

import torch

#: Of the logits' standard deviation.
TOLERANCE = 1e-3
#: Packed weights are multiplied with activations of 8 bits; what a file loses costs a whole deviation and more.
PACKED_TOLERANCE = 0.25
#: Of 46 layers.
SLOWEST = "gemma2: layers of 27B"
IDS = torch.randint(5, 250, (1, 56), generator=torch.Generator().manual_seed(0))


def relative_error(found, expected):
    """The largest error of each token, in deviations of all expected logits."""
    return (found - expected).abs().amax(-1)[0] / expected.std()
