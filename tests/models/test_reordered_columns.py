"""A matrix whose columns a file has in another order stays packed, and its inputs are reordered instead."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from hetero_kv import eject, inject
from hetero_kv.adapter.chunked_decoder_layer import ChunkedDecoderLayer
from hetero_kv.adapter.fused_decode_layer import FusedDecodeLayer
from tests.support.tiny_models import tiny_model

Q8_0 = GGMLQuantizationType.Q8_0


@pytest.fixture
def reordered():
    """(model, its first output projection, the weights that the projection's blocks stand for)."""
    model = tiny_model("llama")
    inject(model, "dense", command_line={"max_seq_len": 256, "weights": "q8_0"})
    projection = model.model.layers[0].wrapped.self_attn.wrapped.o_proj
    shape = projection.out_features, projection.in_features
    random = np.random.default_rng(0)
    blocks = gguf.quantize(random.standard_normal(shape).astype(np.float32), Q8_0)
    columns = random.permutation(shape[1])
    assert projection.load_blocks(blocks, Q8_0, shape, columns) is None
    return model, projection, torch.from_numpy(gguf.dequantize(blocks, Q8_0)[:, columns])


@pytest.mark.parametrize("rows", [1, 120])
def test_products_are_those_of_the_reordered_weights(reordered, rows):
    _, projection, weights = reordered
    x = torch.randn(rows, weights.shape[1], generator=torch.Generator().manual_seed(0))
    expected = x @ weights.T
    assert (projection(x) - expected).norm() < 0.02 * expected.norm()


def test_the_weights_are_read_and_restored_in_the_models_order(reordered):
    model, projection, weights = reordered
    assert torch.equal(projection.weight, weights)
    eject(model)
    assert torch.equal(model.model.layers[0].self_attn.o_proj.weight, weights)


def test_a_fused_layer_does_not_take_such_a_matrix(reordered):
    model, *_ = reordered
    model(torch.arange(2, 9)[None])
    layers = [module for module in model.modules() if isinstance(module, ChunkedDecoderLayer)]
    assert [isinstance(layer._fused_decode(), FusedDecodeLayer) for layer in layers] == [False, True, True]
