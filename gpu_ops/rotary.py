"""Rotary position embedding of chosen channels of a head, and its inverse."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hetero_kv.gpu_ops.kernel_choice import runs_triton


class RotaryLayout(NamedTuple):
    """Which channels of a head are rotated together: `pairs` pairs, from channel `offset` on.

    Attributes:
        pairs: rotated pairs; 0 for a head without rotation.
        offset: the first rotated channel; channels before and after the pairs pass through.
        interleaved: pair i is (2i, 2i + 1), not (i, i + pairs).
    """

    pairs: int
    offset: int = 0
    interleaved: bool = False

    def channels(self) -> tuple[slice, slice]:
        """The first and the second channels of the pairs, as slices of a head's channels."""
        start, end = self.offset, self.offset + 2 * self.pairs
        if self.interleaved:
            return slice(start, end, 2), slice(start + 1, end, 2)
        return slice(start, start + self.pairs), slice(start + self.pairs, end)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: RotaryLayout) -> torch.Tensor:
    """Rotate pairs of channels: (a, b) becomes (a·cos - b·sin, b·cos + a·sin).

    Args:
        x: [..., dim].
        cos, sin: broadcastable to [..., pairs]; they include the model's attention scaling if it has one (YaRN).

    Returns [..., dim] float32.
    """
    out = x.float()
    if layout.pairs == 0:
        return out
    first, second = layout.channels()
    a, b, cos, sin = out[..., first], out[..., second], cos.float(), sin.float()
    turned = torch.empty_like(out)
    # Most heads are rotated in full; this avoids launches of empty copies.
    end = layout.offset + 2 * layout.pairs
    if layout.offset:
        turned[..., : layout.offset] = out[..., : layout.offset]
    if end < out.shape[-1]:
        turned[..., end:] = out[..., end:]
    # Written in place: keys of a whole cache are rotated at every step, and temporaries cost more than arithmetic.
    torch.mul(a, cos, out=turned[..., first]).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=turned[..., second]).addcmul_(a, sin)
    return turned


def rotate_into(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: RotaryLayout, out: torch.Tensor) -> None:
    """As `rotate_into_in_torch`, which defines the result, by one Triton kernel on a CUDA device."""
    if not (runs_triton(x) and all(part.stride(-1) == 1 for part in (x, cos, sin, out))):
        rotate_into_in_torch(x, cos, sin, layout, out)
        return
    from hetero_kv.gpu_ops.triton_kernels import rotary

    with torch.cuda.device(x.device):
        rotary.rotate_into(x, cos, sin, layout, out)


def rotate_into_in_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: RotaryLayout, out: torch.Tensor
) -> None:
    """Write rotated vectors, as from `rotate`, in the dtype of `out`.

    Args:
        x, out: [batch, heads, tokens, dim].
        cos, sin: [tokens, pairs].
    """
    out.copy_(rotate(x, cos, sin, layout))


def unrotate_into(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: RotaryLayout, out: torch.Tensor
) -> None:
    """As `unrotate_into_in_torch`, which defines the result, by one Triton kernel on a CUDA device."""
    if not (runs_triton(x) and all(part.stride(-1) == 1 for part in (x, cos, sin, out))):
        unrotate_into_in_torch(x, cos, sin, layout, out)
        return
    from hetero_kv.gpu_ops.triton_kernels import rotary

    with torch.cuda.device(x.device):
        rotary.rotate_into(x, cos, sin, layout, out, inverse=True)


def unrotate_into_in_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: RotaryLayout, out: torch.Tensor
) -> None:
    """Write the result of `unrotate` in the dtype of `out`; shapes as for `rotate_into_in_torch`."""
    out.copy_(unrotate(x, cos, sin, layout))


def unrotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: RotaryLayout) -> torch.Tensor:
    """The inverse of `rotate`, including attention scaling and the rounding of `cos` and `sin`: [..., dim] float32."""
    cos, sin = cos.float(), sin.float()
    # The matrix of a pair is [[c, -s], [s, c]]; its determinant is 1 only for exact, unscaled angles.
    determinant = cos * cos + sin * sin
    return rotate(x, cos / determinant, -sin / determinant, layout)
