"""Representatives of a block: the vectors that a query is scored against instead of the block's keys.

KTransformers' sparse-attention framework, "Context Block Partitioning". A new type is one registered function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetero_kv.errors import HeteroKVError

if TYPE_CHECKING:
    import torch

#: (keys [blocks, kv_heads, block_size, k_dim] float32, representative_num, received [blocks, kv_heads, block_size]
#: float32, the attention that each key received, or None) -> [blocks, kv_heads, representative_num, k_dim] float32.
Compute = Callable[["torch.Tensor", int, "torch.Tensor | None"], "torch.Tensor"]
#: Representatives of equally large blocks, [groups, blocks, kv_heads, representative_num, k_dim] float32 -> those of
#: each group as a whole, [groups, kv_heads, representative_num, k_dim].
Combine = Callable[["torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True)
class RepresentativeType:
    """One way to represent a block.

    Attributes:
        name: as written in YAML (`representative_type`).
        meaning: one line for the documentation.
        compute: keys and the attention they received -> representatives, see `Compute`.
        score: how a query is scored against them: "dot" is max_i q·r_i, "quest" is Σ_d max(q_d·r0_d, q_d·r1_d),
            "deviation" is q·r0 + sqrt(Σ_d (q_d·r1_d)²).
        counts: the allowed `representative_num`, as (least, most); most is None for any up to block_size.
        needs_attention: whether `compute` needs the attention that the keys received.
        has_mean: whether the first vector is the mean of the block's keys, and the second, if any, their standard
            deviation per channel. A block's attention mass can be estimated from these.
        combined: computes a group's representatives from its blocks'; None if they do not suffice.
    """

    name: str
    meaning: str
    compute: Compute
    score: str
    counts: tuple[int, int | None]
    needs_attention: bool
    has_mean: bool = False
    combined: Combine | None = None


@dataclass(frozen=True)
class Representing:
    """How an operator represents blocks; equal ones compute the same from the same keys.

    Attributes:
        type: the type of representatives.
        representative_num: as written in YAML.
        by_mean: whether a block has the mean of its representatives instead of each: the mean of all q·r_i equals
            q·(the mean of all r_i).
    """

    type: RepresentativeType
    representative_num: int
    by_mean: bool = False

    def __call__(self, keys: torch.Tensor, received: torch.Tensor | None = None) -> torch.Tensor:
        """The representatives of blocks with keys [blocks, kv_heads, block_size, k_dim] float32, on any device.

        received: [blocks, kv_heads, block_size], the attention that each key has received.

        Returns [blocks, kv_heads, vectors, k_dim].
        """
        vectors = self.type.compute(keys, self.representative_num, received)
        return vectors.mean(dim=2, keepdim=True) if self.by_mean else vectors


_REGISTRY: dict[str, RepresentativeType] = {}


def register(
    name: str,
    *,
    meaning: str,
    score: str = "dot",
    counts: tuple[int, int | None] = (1, 1),
    needs_attention: bool = False,
    has_mean: bool = False,
    combined: Combine | None = None,
) -> Callable[[Compute], Compute]:
    """Register the decorated function as representative type `name`."""

    def keep(compute: Compute) -> Compute:
        kept = name, meaning, compute, score, counts, needs_attention, has_mean, combined
        _REGISTRY[name] = RepresentativeType(*kept)
        return compute

    return keep


def names() -> tuple[str, ...]:
    """The registered names, in order of registration."""
    return tuple(_REGISTRY)


def get(name: str) -> RepresentativeType:
    """The representative type called `name`. Raises HeteroKVError for an unknown name."""
    if name not in _REGISTRY:
        raise HeteroKVError(f"representative_type {name!r} is not known; known: {', '.join(_REGISTRY)}")
    return _REGISTRY[name]


def _maxima(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.amax(dim=1)


def _means(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.mean(dim=1)


def _means_and_deviations(blocks: torch.Tensor) -> torch.Tensor:
    import torch

    means, deviations = blocks.unbind(dim=3)
    # The variance of all keys is the mean variance within blocks plus the variance of the blocks' means.
    variance = deviations.square().mean(dim=1) + means.var(dim=1, correction=0)
    return torch.stack([means.mean(dim=1), variance.sqrt()], dim=2)


def _extremes(blocks: torch.Tensor) -> torch.Tensor:
    import torch

    most, least = blocks.unbind(dim=3)
    return torch.stack([most.amax(dim=1), least.amin(dim=1)], dim=2)


@register("MAX", meaning="the maximum of the block's keys, per channel", combined=_maxima)
def maximum(keys: torch.Tensor, representative_num: int, received: torch.Tensor | None) -> torch.Tensor:
    """The channel-wise maximum of each block: [blocks, kv_heads, 1, k_dim]."""
    return keys.amax(dim=2, keepdim=True)


@register("MEAN", meaning="the mean of the block's keys, per channel", has_mean=True, combined=_means)
def mean(keys: torch.Tensor, representative_num: int, received: torch.Tensor | None) -> torch.Tensor:
    """The mean key of each block: [blocks, kv_heads, 1, k_dim]."""
    return keys.mean(dim=2, keepdim=True)


@register(
    "MEANSTD",
    meaning="the mean and the standard deviation of the block's keys, per channel: a score above the average key's",
    score="deviation",
    counts=(2, 2),
    has_mean=True,
    combined=_means_and_deviations,
)
def mean_and_deviation(keys: torch.Tensor, representative_num: int, received: torch.Tensor | None) -> torch.Tensor:
    """Channel-wise mean, then standard deviation (population: divided by n): [blocks, kv_heads, 2, k_dim]."""
    import torch

    return torch.stack([keys.mean(dim=2), keys.std(dim=2, correction=0)], dim=2)


@register(
    "QUEST",
    meaning="the maximum and the minimum of the block's keys, per channel: an upper bound of every score (Quest)",
    score="quest",
    counts=(2, 2),
    combined=_extremes,
)
def quest(keys: torch.Tensor, representative_num: int, received: torch.Tensor | None) -> torch.Tensor:
    """Channel-wise maximum, then minimum: [blocks, kv_heads, 2, k_dim] (Quest, arXiv:2406.10774, section 3.3)."""
    import torch

    return torch.stack([keys.amax(dim=2), keys.amin(dim=2)], dim=2)


@register(
    "DYNAMIC",
    meaning="the k keys of the block that received most attention from the prompt's end (InfLLM, simplified)",
    counts=(1, None),
    needs_attention=True,
)
def dynamic(keys: torch.Tensor, representative_num: int, received: torch.Tensor | None) -> torch.Tensor:
    """The k keys with the highest received attention, ties to the earlier key: [blocks, kv_heads, k, k_dim]."""
    assert received is not None
    order = received.argsort(dim=2, descending=True, stable=True)[:, :, :representative_num]
    return keys.gather(2, order.unsqueeze(-1).expand(-1, -1, -1, keys.shape[-1]))


@register("FIXED", meaning="k keys of the block at equal steps", counts=(1, None))
def fixed(keys: torch.Tensor, representative_num: int, received: torch.Tensor | None) -> torch.Tensor:
    """The keys at positions i·block_size/k of each block: [blocks, kv_heads, k, k_dim]."""
    block_size = keys.shape[2]
    return keys[:, :, [i * block_size // representative_num for i in range(representative_num)]]
