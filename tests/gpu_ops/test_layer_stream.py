"""Weights that stream to a GPU layer by layer are restored after any interruption."""

from __future__ import annotations

import functools
import gc
import sys

import pytest
import torch
from torch import nn

from hetero_kv.gpu_ops import layer_stream
from hetero_kv.gpu_ops.layer_stream import LayerStream
from tests.support.devices import simulated_cuda

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)
LAYERS, WIDTH = 4, 8


@pytest.fixture
def gpu():
    with simulated_cuda() as simulation, torch.no_grad():
        yield simulation
        gc.collect()


def layers_of():
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]


def through(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def interrupted_at(call, number, file):
    """Run `call` with Ctrl-C at line `number`, from 0, of all that it runs in `file`; whether there is one."""
    left = number

    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename != file or left < 0:
            return trace
        if event == "line":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_ctrl_c_in_a_streamed_layer_leaves_no_weight_on_the_gpu(gpu):
    layers, x = layers_of(), torch.ones(2, WIDTH)
    expected, weights = through(layers, x), [layer.weight.clone() for layer in layers]

    class Interrupted(nn.Linear):
        is_on = True

        def forward(self, x):
            out = super().forward(x)
            if self.is_on:
                raise KeyboardInterrupt
            return out

    layers[2].__class__ = Interrupted
    LayerStream(layers, DEVICE, lambda layer: None)
    with pytest.raises(KeyboardInterrupt):
        through(layers, x.to(DEVICE))
    assert [layer.weight.device.type for layer in layers] == ["cpu"] * LAYERS
    layers[2].is_on = False
    assert torch.allclose(through(layers, x.to(DEVICE)).cpu(), expected, atol=1e-6)
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(layers, weights, strict=True))


def test_a_forward_that_is_interrupted_anywhere_leaves_weights_in_dram_and_the_next_one_right(gpu):
    layers, x = layers_of(), torch.ones(2, WIDTH)
    expected, number = through(layers, x), 0
    LayerStream(layers, DEVICE, lambda layer: None)
    x = x.to(DEVICE)
    # Where the clean-up itself is interrupted nobody can do anything: Ctrl-C comes once.
    while interrupted_at(lambda: through(layers, x), number, layer_stream.__file__):
        assert [layer.weight.device.type for layer in layers] == ["cpu"] * LAYERS
        assert torch.allclose(through(layers, x).cpu(), expected, atol=1e-6)
        number += 1
    assert number > 20 * LAYERS


def test_a_stream_is_there_for_all_modules_or_for_none(gpu):
    x = torch.ones(2, WIDTH)
    expected = through(layers_of()[:2], x)
    for number in range(0, 1000, 3):
        layers = layers_of()[:2]
        stream = functools.partial(LayerStream, layers, DEVICE, lambda layer: None)
        is_interrupted = interrupted_at(stream, number, layer_stream.__file__)
        is_there = {LayerStream.streams(layer) for layer in layers}
        assert len(is_there) == 1
        if not is_there.pop():
            assert torch.allclose(through(layers, x), expected, atol=1e-6)
            stream()
        assert torch.allclose(through(layers, x.to(DEVICE)).cpu(), expected, atol=1e-6)
        if not is_interrupted:
            break
    assert not is_interrupted
    assert number > 40


def test_a_stream_that_was_not_made_has_no_room_on_the_gpu(gpu):
    layers, laid_out = layers_of(), []

    def interrupting(layer):
        laid_out.append(layer)
        if len(laid_out) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LayerStream(layers, DEVICE, interrupting)
    gc.collect()
    torch.cuda.synchronize()
    assert gpu.memory.live[0] == 0
    assert not any(LayerStream.streams(layer) or layer._forward_pre_hooks for layer in layers)
