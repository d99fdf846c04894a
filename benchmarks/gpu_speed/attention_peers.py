"""torch's kernels of a decoded token's full attention, over transformers' static cache, as functions of transformers.

The number of stored tokens is memory on the GPU, so that one captured graph serves all tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

# Keys that flex attention masks together.
_FLEX_BLOCK = 128


class PeerUnavailable(Exception):
    """What a peer needs is not on this machine; the message says what."""


class CacheShape(NamedTuple):
    """The static cache of one layer, [rows, kv_heads, capacity, dim]."""

    rows: int
    kv_heads: int
    capacity: int
    dim: int


class AttentionPeer(ABC):
    """An attention function of transformers for one decoded token per row; all rows have the same length.

    Args:
        shape: of a layer's keys, and of its values.
        device: of the model.

    Raises PeerUnavailable.
    """

    @abstractmethod
    def __init__(self, shape: CacheShape, device: torch.device) -> None: ...

    @abstractmethod
    def begin(self, length: torch.Tensor) -> None:
        """Prepare a token, before the first layer: kernels alone. length: tokens, this one included, on the device."""

    @abstractmethod
    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Attention of query [rows, heads, 1, dim] to a layer's stored tokens; returns [rows, 1, heads, dim]."""


class FlashDecode(AttentionPeer):
    """torch's flash attention, which splits a row's keys among blocks of threads (flash decoding)."""

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        if device.type != "cuda":
            raise PeerUnavailable("torch's flash attention with lengths on the device needs a GPU")
        self._shape = shape
        rows = torch.arange(shape.rows + 1, dtype=torch.int32, device=device)
        # The first key of each row, in keys of a kv head.
        self._queries, self._starts = rows, rows * (shape.kv_heads * shape.capacity)
        self._used = torch.zeros(shape.rows, dtype=torch.int32, device=device)

    def begin(self, length: torch.Tensor) -> None:
        self._used.copy_(length.expand_as(self._used))

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        rows, kv_heads, capacity, dim = self._shape
        # As one sequence of keys, in which a row's are followed by those of its other heads.
        size, stride = ((rows - 1) * kv_heads * capacity + capacity, kv_heads, dim), (dim, capacity * dim, 1)
        packed = (each.as_strided(size, stride) for each in (key, value))
        out = torch.ops.aten._flash_attention_forward(
            query.reshape(rows, -1, dim), *packed, self._queries, self._starts, 1, capacity, 0.0, False, False,
            scale=kwargs["scaling"], seqused_k=self._used,
        )[0]  # fmt: skip
        return out.view(rows, 1, -1, dim), None


class FlexDecode(AttentionPeer):
    """torch's flex attention, compiled on a GPU, with a block mask of the stored tokens."""

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        count = -(-shape.capacity // _FLEX_BLOCK)
        made = {"dtype": torch.int32, "device": device}
        self._length = torch.zeros((), **made)
        self._whole = torch.zeros(1, 1, 1, **made)
        self._last = torch.zeros(1, 1, 1, count, **made)
        self._mask = BlockMask.from_kv_blocks(
            torch.ones(1, 1, 1, **made), self._last, self._whole, torch.arange(count, **made).view(1, 1, 1, count),
            BLOCK_SIZE=_FLEX_BLOCK, mask_mod=self._is_stored, seq_lengths=(1, shape.capacity),
        )  # fmt: skip
        self._attend = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention

    def _is_stored(self, row: Any, head: Any, query: Any, key: torch.Tensor) -> torch.Tensor:
        return key < self._length

    def begin(self, length: torch.Tensor) -> None:
        self._length.copy_(length)
        # Tokens of the last block, which may be whole, are masked one by one; those before it are not.
        last = (length - 1).div(_FLEX_BLOCK, rounding_mode="floor")
        self._whole.copy_(last.expand_as(self._whole))
        self._last[..., :1].copy_(last.expand(1, 1, 1, 1))

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        try:
            out = self._attend(query, key, value, block_mask=self._mask, scale=kwargs["scaling"], enable_gqa=True)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise PeerUnavailable(
                f"torch does not compile flex attention here: {str(error).splitlines()[0]}"
            ) from error
        return out.transpose(1, 2), None
