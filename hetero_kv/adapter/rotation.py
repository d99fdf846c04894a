"""Detection of how a model rotates its keys.

No model is known by name. An attention module is called with chosen rotations, and without one. The keys that it passes
to its attention function reveal which channels it rotates together, and where in `position_embeddings` it reads their
angles. A module whose keys fit no known layout is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from hetero_kv.gpu_ops.host_copies import on_device
from hetero_kv.gpu_ops.rotary import RotaryLayout, rotate, unrotate

#: (cos, sin), each [1, tokens, width] -> the keys [1, kv_heads, tokens, dim] that attention gets with them.
KeysUnder = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Rounding of the model's own rotation, in units of its dtype's precision; a wrong layout is off by tens of percent.
_TOLERANCE = 16
#: See `Rotation.doubled`.
WAYS_TO_DOUBLE = ("once", "halves", "neighbours")
# A factor on cos and sin, which must take effect as well, as YaRN's attention scaling does.
_SCALING = 1.25


class Rotation(NamedTuple):
    """How a module rotates its keys.

    Attributes:
        layout: the channels that are rotated together.
        doubled: how `position_embeddings` repeats the angle of a pair: "once" (its width is `pairs`), in two "halves",
            or twice in "neighbours".
    """

    layout: RotaryLayout
    doubled: str = "once"

    def angles(self, cos_or_sin: torch.Tensor) -> torch.Tensor:
        """One number per pair, [..., pairs], from `position_embeddings` [..., width]."""
        pairs = self.layout.pairs
        return cos_or_sin[..., : 2 * pairs : 2] if self.doubled == "neighbours" else cos_or_sin[..., :pairs]


def found_rotation(keys_under: KeysUnder, like: torch.Tensor) -> Rotation | None:
    """The rotation of a module; None for an unknown one.

    Args:
        keys_under: the module's keys for position embeddings, everything else unchanged.
        like: `cos` as the model passes it, [1, tokens, width], for its width, dtype and device.
    """
    width = like.shape[-1]
    plain = keys_under(torch.ones_like(like), torch.zeros_like(like)).float()
    generator = torch.Generator().manual_seed(0)
    for doubled in WAYS_TO_DOUBLE:
        if doubled != "once" and width % 2:
            continue
        pairs = width if doubled == "once" else width // 2
        angles = torch.rand(*like.shape[:-1], pairs, generator=generator) * 2 - 1
        parts = (part.to(like.dtype) for part in (angles.cos(), angles.sin()))
        cos, sin = (_SCALING * on_device(part, like.device) for part in parts)
        keys = keys_under(_doubled(cos, doubled), _doubled(sin, doubled))
        if _close(plain, keys.float(), keys.dtype):
            return Rotation(RotaryLayout(0))
        for layout in _layouts(pairs, keys.shape[-1]):
            # [1, tokens, pairs] to [1, 1, tokens, pairs], for all heads.
            turned = rotate(plain, cos[:, None], sin[:, None], layout)
            back = unrotate(keys, cos[:, None], sin[:, None], layout)
            if _close(turned, keys.float(), keys.dtype) and _close(back, plain, keys.dtype):
                return Rotation(layout, doubled)
    return None


def _layouts(pairs: int, dim: int) -> Iterator[RotaryLayout]:
    """The layouts of `pairs` pairs in a head: starting at its first channel, or ending at its last."""
    if 2 * pairs > dim:
        return
    for offset in dict.fromkeys((0, dim - 2 * pairs)):
        for interleaved in (False, True):
            yield RotaryLayout(pairs, offset, interleaved)


def _doubled(angles: torch.Tensor, how: str) -> torch.Tensor:
    if how == "halves":
        return torch.cat([angles, angles], dim=-1)
    return angles.repeat_interleave(2, dim=-1) if how == "neighbours" else angles


def _close(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> bool:
    return float((a - b).abs().max()) <= _TOLERANCE * torch.finfo(dtype).eps * float(b.abs().max())
