"""GGML's quantized formats: groups of 32 numbers that share a scale in half precision.

The bytes are those of GGUF files (https://github.com/ggml-org/ggml, docs/gguf.md): a group is a scale followed by the
numbers as integers, exactly as GGML writes them. A group is part of one vector, so tokens are encoded as they are
written.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetero_kv.errors import HeteroKVError
from hetero_kv.store.storage.plain import FP16
from hetero_kv.store.storage.registry import StorageType, register

if TYPE_CHECKING:
    import torch

GROUP = 32
_BLOCK_MULTIPLE = 16
_SCALE_BYTES = 2


@dataclass(frozen=True)
class QuantizedType(StorageType):
    """A storage type of groups of 32 numbers; stored elements are bytes.

    Attributes:
        group_bytes: bytes of one group, scale included.
    """

    group_bytes: int = 0

    @abstractmethod
    def quantize(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Groups [..., 32] float32 -> scales [..., 1] float16 and integers [..., group_bytes - 2] uint8."""

    @abstractmethod
    def dequantize(self, scales: torch.Tensor, integers: torch.Tensor) -> torch.Tensor:
        """Scales [..., 1] float32 and integers [..., group_bytes - 2] uint8 -> groups [..., 32] float32."""

    @property
    def is_plain(self) -> bool:
        """False: stored elements are bytes of groups."""
        return False

    @property
    def for_representatives(self) -> StorageType:
        """FP16, because the choice of blocks should not be the coarsest part of the method."""
        return FP16

    @property
    def block_multiple(self) -> int:
        """16 tokens, so that every head's part of a block, which is read separately, begins on a cache line of 64 bytes
        if the head dimension is a multiple of 64, and on half a line if it is 32 or 96."""
        return _BLOCK_MULTIPLE

    def takes(self, dim: int) -> bool:
        """Whether `dim` is a multiple of the group size."""
        return dim % GROUP == 0

    def elements(self, dim: int) -> int:
        if not self.takes(dim):
            raise HeteroKVError(
                f"kv_type {self.name} stores numbers in groups of {GROUP}, but this model's heads have dimension "
                f"{dim}; set kv_type (or the key_type or value_type in use) to FP16 or BF16"
            )
        return dim // GROUP * self.group_bytes

    def encode(self, vectors: torch.Tensor) -> torch.Tensor:
        import torch

        if not vectors.shape[-1]:
            # A pool may store values alone.
            return vectors.to(self.dtype)
        scales, integers = self.quantize(vectors.float().unflatten(-1, (vectors.shape[-1] // GROUP, GROUP)))
        return torch.cat([scales.view(torch.uint8), integers], dim=-1).flatten(-2)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Returns float32; see StorageType."""
        import torch

        groups = stored.unflatten(-1, (stored.shape[-1] // self.group_bytes, self.group_bytes))
        scales = groups[..., :_SCALE_BYTES].contiguous().view(torch.float16)
        return self.dequantize(scales.float(), groups[..., _SCALE_BYTES:]).flatten(-2)

    def write(self, target: torch.Tensor, vectors: torch.Tensor) -> None:
        # As in StorageType, never directly from another device into a pool.
        target.copy_(self.encode(vectors).to(target.device))


def _scaled(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """groups / scales as GGML divides: by the unrounded scales, and 0 where a scale is 0."""
    inverse = 1.0 / scales
    # This includes scales whose inverse exceeds float32; they are stored as 0.
    return groups * inverse.masked_fill_(inverse.isinf(), 0.0)


class Q8(QuantizedType):
    """Each number is scale * int8."""

    def quantize(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        scales = groups.abs().amax(dim=-1, keepdim=True) / 127
        scaled = _scaled(groups, scales)
        # Rounds halves away from zero, as C's roundf does.
        size = scaled.abs()
        whole = size.floor()
        rounded = (whole + (size.sub_(whole) * 2).floor_()).copysign_(scaled)
        return scales.half(), rounded.to(torch.int8).view(torch.uint8)

    def dequantize(self, scales: torch.Tensor, integers: torch.Tensor) -> torch.Tensor:
        import torch

        return scales * integers.view(torch.int8)


class Q4(QuantizedType):
    """Each number is scale * (nibble - 8); byte i holds number i in its low and i + 16 in its high nibble."""

    @property
    def is_coarse(self) -> bool:
        return True

    def quantize(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        # The number of largest magnitude becomes -8, which has no positive counterpart.
        largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
        scales = largest / -8
        nibbles = (_scaled(groups, scales) + 8.5).clamp_(0, 15).to(torch.uint8)
        return scales.half(), nibbles[..., : GROUP // 2] | nibbles[..., GROUP // 2 :] << 4

    def dequantize(self, scales: torch.Tensor, integers: torch.Tensor) -> torch.Tensor:
        import torch

        nibbles = torch.cat([integers & 15, integers >> 4], dim=-1)
        return scales * (nibbles.to(torch.int8) - 8)


# `largest` is that of the representatives, which are stored in half precision.
Q8_0 = register(
    Q8(
        "Q8_0", "q8_0", "uint8", 1, "8 bits and a scale for every 32 elements: 1.06 bytes per element",
        largest=FP16.largest, group_bytes=34,
    )
)  # fmt: skip
Q4_0 = register(
    Q4(
        "Q4_0", "q4_0", "uint8", 1, "4 bits and a scale for every 32 elements: 0.56 bytes per element, with some loss",
        largest=FP16.largest, group_bytes=18,
    )
)  # fmt: skip
