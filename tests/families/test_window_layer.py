"""The cache of a sliding-window layer: its contents, its memory, and going back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.families.window.layer import WindowLayer
from tests.support.caches import new_cache, prefill
from tests.support.devices import simulated_cuda


def tokens(start, count):
    """Keys that are their own position, [1, 1, count, 2]; values are their negative."""
    keys = torch.arange(start, start + count, dtype=torch.float32)[None, None, :, None].expand(1, 1, count, 2)
    return keys, -keys


@settings(max_examples=60, deadline=None)
@given(window=st.integers(1, 9), pieces=st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_new_tokens_are_shown_with_the_window_before_them(window, pieces):
    layer, seen = WindowLayer(window), 0
    for count in pieces:
        keys, values = layer.extend(*tokens(seen, count))
        first = max(0, seen - (window - 1))
        assert keys[0, 0, :, 0].tolist() == list(range(first, seen + count))
        assert torch.equal(values, -keys)
        seen += count
    assert layer.get_seq_length() == seen


@given(before=st.integers(1, 12), after=st.lists(st.integers(1, 12), max_size=6))
def test_restore_brings_back_the_windows_content(before, after):
    layer = WindowLayer(5)
    layer.extend(*tokens(0, before))
    checkpoint, seen = layer.snapshot(), before
    for count in after:
        layer.extend(*tokens(seen, count))
        seen += count
    layer.rollback(checkpoint)
    keys, _ = layer.extend(*tokens(before, 1))
    assert keys[0, 0, :, 0].tolist() == list(range(max(0, before - 4), before + 1))


def test_a_long_prompt_leaves_a_buffer_of_twice_the_window():
    cache = new_cache(lambda: WindowLayer(8))
    layer = cache.layers[0]
    prefill(cache, *(tokens(start, 100)[0] for start in range(0, 1000, 100)))
    assert layer.keys.shape[2] <= 16
    keys, _ = layer.extend(*tokens(1000, 1))
    assert keys[0, 0, :, 0].tolist() == list(range(993, 1001))


def test_the_mask_sizes_are_those_of_the_window():
    layer = WindowLayer(8)
    layer.extend(*tokens(0, 20))
    assert layer.get_mask_sizes(3) == (7 + 3, 20 - 7)


@pytest.mark.cuda
def test_a_buffer_on_a_gpu_is_no_dram():
    with simulated_cuda():
        sizes = {}
        for device in ("cpu", "cuda"):
            layer = WindowLayer(4)
            layer.extend(*(part.to(device) for part in tokens(0, 10)))
            sizes[device] = layer.dram_bytes, layer.device_bytes
            del layer
    assert sizes["cpu"] == sizes["cuda"][::-1]
    assert sizes["cpu"][0] > sizes["cpu"][1] == 0
