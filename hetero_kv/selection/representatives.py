"""Representative vectors of a block: what a query is scored against instead of the block's keys.

KTransformers' sparse-attention framework, "Context Block Partitioning". A new kind is one registered function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetero_kv.errors import HeteroKVError

if TYPE_CHECKING:
    import torch

#: keys [blocks, kv_heads, block_size, k_dim] float32 -> [blocks, kv_heads, representative_num, k_dim] float32.
Compute = Callable[["torch.Tensor", int], "torch.Tensor"]


@dataclass(frozen=True)
class RepresentativeType:
    """One way to represent a block.

    Attributes:
        name: as written in YAML (`representative_type`).
        meaning: one line for the documentation.
        compute: (keys, representative_num) -> representatives, shapes as `Compute` says.
        score: how a query is scored against them: "dot" is max_i q·r_i, "quest" is Σ_d max(q_d·r0_d, q_d·r1_d).
        counts: the `representative_num` that it allows, as (least, most); most is None for any number.
    """

    name: str
    meaning: str
    compute: Compute
    score: str
    counts: tuple[int, int | None]


_REGISTRY: dict[str, RepresentativeType] = {}


def register(
    name: str, *, meaning: str, score: str = "dot", counts: tuple[int, int | None] = (1, 1)
) -> Callable[[Compute], Compute]:
    """Make the decorated function known as representative type `name`."""

    def keep(compute: Compute) -> Compute:
        _REGISTRY[name] = RepresentativeType(name, meaning, compute, score, counts)
        return compute

    return keep


def names() -> tuple[str, ...]:
    """The registered names, in order of registration."""
    return tuple(_REGISTRY)


def get(name: str) -> RepresentativeType:
    """The representative type called `name`. Raises HeteroKVError for an unknown one."""
    if name not in _REGISTRY:
        raise HeteroKVError(f"representative_type {name!r} is not known; known: {', '.join(_REGISTRY)}")
    return _REGISTRY[name]


@register("MEAN", meaning="the mean of the block's keys, per channel")
def mean(keys: torch.Tensor, representative_num: int) -> torch.Tensor:
    """The mean key of each block: [blocks, kv_heads, 1, k_dim]."""
    return keys.mean(dim=2, keepdim=True)
