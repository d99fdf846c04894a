"""A decoded token attends to sliding windows and learned sinks in the forward's queue, as the modules do."""

from __future__ import annotations

import pytest
import torch

from hetero_kv import HeteroCache, inject
from hetero_kv.cpu_ops.kernel_queue import KernelQueue
from hetero_kv.cpu_ops.parallel_region import all_threads
from hetero_kv.cpu_ops.window_step import window_region, window_step
from hetero_kv.families.window.attention import SlidingWindowAttention
from hetero_kv.gpu_ops.attention import sliding_window_attention
from hetero_kv.weights.kernel_arrays import NAMES, bits
from tests.operators.test_fused_decode import SETTINGS, decoded, layers, relative, without_native_way
from tests.support.gguf_models.variants import tiny_model


@pytest.mark.parametrize(
    ("dtype", "softcap", "has_sink"),
    [(torch.float32, 0.0, True), (torch.float32, 3.0, False), (torch.bfloat16, 0.0, True)],
)
def test_the_kernel_stores_a_token_and_attends_to_its_window(dtype, softcap, has_sink):
    rows, heads, kv_heads, dim, start, end, scale = 2, 6, 3, 32, 5, 150, 0.3
    generator = torch.Generator().manual_seed(0)
    q, k, v, keys, values = (
        torch.randn(rows, number, tokens, dim, generator=generator).to(dtype)
        for number, tokens in ((heads, 1), (kv_heads, 1), (kv_heads, 1), (kv_heads, 200), (kv_heads, 200))
    )
    # Only the window is read.
    keys[:, :, :start], keys[:, :, end:] = float("nan"), float("nan")
    sink = torch.randn(heads, generator=generator) * has_sink
    seen = [torch.cat([part[:, :, start : end - 1], new], dim=2) for part, new in ((keys, k), (values, v))]
    exact = [each.float() for each in (q, *seen)]
    expected, _ = sliding_window_attention(*exact, 1000, scale, softcap or None, sink if has_sink else None)
    out, name = torch.empty_like(q), NAMES[bits(q).dtype]
    region = window_region(name, heads // kv_heads, dim, dim)
    sinks = sink.numpy() if has_sink else sink[:0].numpy()
    arrays = [bits(each) for each in (q, k, v, keys, values)]
    window_step(name)(all_threads(), region, *arrays, start, end, scale, softcap, sinks, bits(out), 2)
    assert relative(out.float(), expected) < (1e-5 if dtype is torch.float32 else 1e-2)
    assert torch.equal(keys[:, :, end - 1], k[:, :, 0])
    assert torch.equal(values[:, :, end - 1], v[:, :, 0])


def windowed(architecture):
    model = tiny_model(architecture)
    inject(model, "dense", command_line=SETTINGS)
    return model


@pytest.mark.parametrize(("architecture", "rows"), [("gemma3", 1), ("gpt-oss", 2)])
def test_windows_are_attended_to_in_one_call_of_the_queue(architecture, rows, monkeypatch):
    model, runs, run = windowed(architecture), [], KernelQueue.run
    # Enough tokens to replace the windows' buffers several times.
    native = decoded(model, tokens=40, rows=rows)
    assert any(isinstance(layer.self_attn, SlidingWindowAttention) for layer in layers(model))
    cache = HeteroCache(model, 256)
    # The first token prepares what later ones use.
    for tokens in (torch.arange(2, 42)[None, :], torch.tensor([[3]])):
        model(tokens, past_key_values=cache)
    monkeypatch.setattr(KernelQueue, "run", lambda queue: (runs.append(len(queue._arguments)), run(queue)))
    model(torch.tensor([[3]]), past_key_values=cache)
    assert sum(count > 0 for count in runs) == 1
    monkeypatch.undo()
    without_native_way(model)
    assert relative(native, decoded(model, tokens=40, rows=rows)) < 5e-3
