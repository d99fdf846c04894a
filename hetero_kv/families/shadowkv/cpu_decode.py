"""Decode on the CPU: kernels over the arrays of a layer's tensors replace many small torch calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hetero_kv.adapter.bridge import AttentionCall
from hetero_kv.cpu_ops import chunk_slots, contiguous_decode, landmark_choice
from hetero_kv.cpu_ops.chunk_slots import KeyFactorArrays
from hetero_kv.cpu_ops.contiguous_decode import TokenRange, attend_ranges
from hetero_kv.cpu_ops.storage import BFLOAT16
from hetero_kv.engine.step import Step
from hetero_kv.families.shadowkv.layer import LowRankLayer
from hetero_kv.store.growing_tensor import GrowingTensor

_KINDS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def supports(layer: LowRankLayer, call: AttentionCall) -> bool:
    """Whether the kernels support this layer's tensors: in DRAM, and all of one dtype."""
    rotary = layer.factors.rotary
    if call.k.device.type != "cpu" or call.k.dtype not in _KINDS or rotary is None:
        return False
    return call.k.dtype == call.v.dtype == rotary.cos.dtype == rotary.sin.dtype


def arrays_of(*tensors: torch.Tensor) -> Sequence[np.ndarray]:
    """Array views of contiguous tensors of one dtype, with the dtypes that kernels use."""
    if tensors[0].dtype is torch.bfloat16:
        return [tensor.view(torch.uint16).numpy().view(BFLOAT16) for tensor in tensors]
    return list(map(torch.Tensor.numpy, tensors))


def queries(call: AttentionCall) -> np.ndarray:
    """The single query position of a call, [batch, kv_heads, group, k_dim] float32."""
    batch, heads, _, k_dim = call.q.shape
    kv_heads = call.k.shape[1]
    return call.q.reshape(batch, kv_heads, heads // kv_heads, k_dim).to(torch.float32).contiguous().numpy()


def chosen(layer: LowRankLayer, call: AttentionCall, q: np.ndarray, count: int, threads: int) -> np.ndarray:
    """The `count` best chunks by landmarks, outliers excluded: [batch, kv_heads, count] int64."""
    outliers = layer.context.outliers
    assert outliers is not None
    (landmarks,), ids = arrays_of(_buffer(layer.landmarks)[0]), outliers.ids.numpy()
    arguments = ids, layer.chunks, count, call.scale, call.softcap or 0.0, threads
    return landmark_choice.best_chunks(q, landmarks, *arguments)


def load_chunks(layer: LowRankLayer, step: Step, chunks: np.ndarray, threads: int) -> int:
    """Load chosen chunks [batch, kv_heads, n] int64 into the slots; returns how many were resident, over all heads."""
    outliers, pool, rotary, basis = layer.context.outliers, layer.pool, layer.factors.rotary, layer.factors.basis
    assert outliers is not None
    assert pool is not None
    assert rotary is not None
    assert basis is not None
    residents = outliers.residents
    residents.provide(chunks.shape[2])
    if not chunks.size:
        return 0
    tensors = *residents.buffers, _buffer(layer.factors.coefficients)[0], basis, rotary.cos, rotary.sin
    keys, values, coefficients, vectors, cos, sin = arrays_of(*tensors)
    table = step.blocks(layer.layout).table
    if pool.read_ahead is not None and pool.reads_ahead():
        pool.read_ahead.request(table[np.arange(len(table))[:, None, None], chunks])
    factors = KeyFactorArrays(coefficients, vectors, cos, sin, *rotary.rotation.layout)
    arrays = factors, table, pool.value_array
    return chunk_slots.hold_chunks(chunks, residents.ids.numpy(), keys, values, *arrays, layer.chunks, threads)


def attention(
    layer: LowRankLayer, call: AttentionCall, q: np.ndarray, threads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to outliers, slots and Recent: out [batch, heads, 1, v_dim] float32 and lse [batch, heads, 1]."""
    buffer, start, stop = _buffer(layer.recent_keys)
    keys, values = arrays_of(buffer, _buffer(layer.recent_values)[0])
    recent = TokenRange(keys, values, start, stop - start)
    # Without a Context the resident range is empty.
    resident = recent._replace(length=0)
    if layer.context.outliers is not None:
        residents = layer.context.outliers.residents
        keys, values = arrays_of(*(part.flatten(2, 3) for part in residents.buffers))
        resident = TokenRange(keys, values, 0, residents.tokens)
    out, lse = attend_ranges(q, resident, recent, call.scale, call.softcap or 0.0, threads)
    shape = call.q.shape[:3]
    return torch.from_numpy(out).view(*shape, out.shape[3]), torch.from_numpy(lse).view(shape)


def _buffer(growing: GrowingTensor) -> tuple[torch.Tensor, int, int]:
    """The buffer of entries, which is contiguous even if the entries are not, and their first and end index."""
    buffer, start, stop = growing.extent
    assert buffer is not None
    return buffer, start, stop


def compile_kernels(dtype: torch.dtype, storage: str, group: int, k_dim: int, v_dim: int, chunk_size: int) -> None:
    """Compile the kernels for a model's compute dtype and a storage type of values."""
    if dtype in _KINDS:
        landmark_choice.compile_for(group, k_dim, _KINDS[dtype])
        chunk_slots.compile_for(k_dim, chunk_size, _KINDS[dtype], storage)
        contiguous_decode.compile_for(group, k_dim, v_dim, _KINDS[dtype])
