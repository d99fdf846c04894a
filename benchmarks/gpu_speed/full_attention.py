"""The untouched model over transformers' static cache in GPU memory, a decoded token as one CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, StaticCache

from benchmarks.gpu_checks.setting import Setting, random_tokens, relative_error
from benchmarks.gpu_speed.attention_peers import AttentionPeer, CacheShape, FlashDecode, FlexDecode
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.gpu_ops.graph_segments import GraphSegments

#: transformers' own attention, with a mask over the whole cache.
STATIC = "untouched, static cache, one graph"
FLASH = "full attention by flash decoding, one graph"
FLEX = "full attention by flex attention, one graph"
#: Row's name -> its attention; None for transformers' own.
FULL_ATTENTION: dict[str, type[AttentionPeer] | None] = {STATIC: None, FLASH: FlashDecode, FLEX: FlexDecode}
#: Tokens that run before a capture.
WARMING = 2
_NAME = "gpu_bench_peer"
# Tokens, and room, of the comparison with torch's plain attention; the error of half precision.
_COMPARED, _COMPARED_IN, _ERROR = 300, 390, 2e-2


class FullAttention:
    """Decodes the likeliest tokens after random keys and values, in each row of a static cache.

    Args:
        setting: the device.
        model: an untouched model with full attention in all layers.
        name: of `FULL_ATTENTION`.
        rows, tokens: of the cache before the first token.
        decoded: tokens that will be decoded.

    Raises PeerUnavailable, and RuntimeError where the attention is another one than torch's.
    """

    def __init__(self, setting: Setting, model: Any, name: str, rows: int, tokens: int, decoded: int) -> None:
        self._setting, self._model = setting, model
        kind, shape = FULL_ATTENTION[name], kv_shape(model)
        capacity = tokens + decoded + WARMING
        self.attention: AttentionPeer | None = None
        if kind is not None:
            _require_equal(setting, model, kind, shape)
            self.attention = kind(CacheShape(rows, shape.kv_heads, capacity, shape.k_dim), setting.device)
        self.cache = StaticCache(config=model.config, max_cache_len=capacity)
        self.cache.early_initialization(rows, shape.kv_heads, shape.k_dim, model.dtype, setting.device)
        for layer in self.cache.layers:
            layer.keys[:, :, :tokens].normal_()
            layer.values[:, :, :tokens].normal_()
            layer.cumulative_length.fill_(tokens)
        self._length = torch.full((), tokens, device=setting.device)
        self._ids = random_tokens(setting, rows, 2, model.config.vocab_size).view(rows, 1)
        self._graph: GraphSegments | None = None

    def prepare(self) -> None:
        """Decode `WARMING` tokens, and capture one on a GPU."""
        for _ in range(WARMING):
            self._logits = self._forward()
        if self._setting.on_gpu:
            graph = GraphSegments(self._setting.device)
            with graph.captured():
                self._logits = self._forward()
            self._graph = graph

    def decode(self) -> torch.Tensor:
        """The next token's logits [rows, 1, vocabulary]."""
        if self._graph is None:
            self._logits = self._forward()
        else:
            self._graph.launch(0)
            self._graph.launched()
        return self._logits

    def _forward(self) -> torch.Tensor:
        self._length.add_(1)
        if self.attention is not None:
            self.attention.begin(self._length)
        with called(self._model, self.attention):
            logits: torch.Tensor = self._model(self._ids, past_key_values=self.cache, logits_to_keep=1).logits
        self._ids.copy_(logits.argmax(dim=-1))
        return logits


def kv_shape(model: Any) -> KVShape:
    """The shape of a layer's keys and values."""
    return KVShape.of_attention(model.model.layers[0].self_attn, model.config)


def bytes_per_row(model: Any, capacity: int) -> int:
    """Bytes of the keys and values of a row of `capacity` tokens in a static cache."""
    of_token = kv_shape(model).bytes_per_token(model.dtype.itemsize)
    return int(of_token * capacity * model.config.num_hidden_layers)


@contextmanager
def called(model: Any, attention: AttentionPeer | None) -> Iterator[None]:
    """Within this context the model's attention is `attention`; None leaves its own."""
    if attention is None:
        yield
        return
    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, attention)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _require_equal(setting: Setting, model: Any, kind: type[AttentionPeer], shape: KVShape) -> None:
    """Raise RuntimeError where the attention of two short rows differs from torch's."""
    small = CacheShape(2, shape.kv_heads, _COMPARED_IN, shape.k_dim)
    made = {"device": setting.device, "dtype": model.dtype}
    q = torch.randn(2, model.config.num_attention_heads, 1, shape.k_dim, **made)
    k, v = (torch.randn(*small, **made) for _ in range(2))
    attention, scale = kind(small, setting.device), shape.k_dim**-0.5
    attention.begin(torch.full((), _COMPARED, device=setting.device))
    found = attention(None, q, k, v, None, scaling=scale)[0].transpose(1, 2)
    group = q.shape[1] // shape.kv_heads
    k, v = (each[:, :, :_COMPARED].float().repeat_interleave(group, dim=1) for each in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k, v, scale=scale)
    if not (error := relative_error(found, expected)) <= _ERROR:
        raise RuntimeError(f"{kind.__name__} differs from torch's attention by {error:.1e}; at most {_ERROR:.0e}")
