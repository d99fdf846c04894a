"""A GGUF file's packed weights on a GPU: the same answers, no more bytes, one launch per product."""

from __future__ import annotations

import gc

import pytest
import torch
from gguf import GGMLQuantizationType

from hetero_kv import HeteroCache, eject, inject, load_model, open_model
from hetero_kv.adapter.loaded_weights import LoadedWeights
from hetero_kv.adapter.quantized_matrix import QuantizedMatrix
from hetero_kv.models.placing import decoder_layers, weight_bytes
from hetero_kv.models.weightless import weightless_model
from hetero_kv.planning.plan import Footprint
from hetero_kv.weights import device_weight
from hetero_kv.weights.device_weight import DeviceWeight, UnpackRoom
from tests.support.devices import simulated_cuda
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.cuda
SMALL = {"block_size": 8, "max_seq_len": 256, "kv_type": "FP32", "chunk_size": 64}
PROMPT = torch.randint(2, 250, (1, 90), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def tied(write_tiny_gguf, tmp_path_factory):
    """Q5_0, the head being the embedding."""
    path = tmp_path_factory.mktemp("tied") / "tied.gguf"
    return write_tiny_gguf(path, kind=GGMLQuantizationType.Q5_0, without=("output.weight",))


def loaded(path, **settings):
    """On the GPU, under rules."""
    opened = open_model(path, dtype="float32", device="cuda", weights_device=settings.get("weights_device", "gpu"))
    inject(opened.model, "dense", command_line={**SMALL, **settings})
    return opened.load().model


@torch.no_grad()
def answers(model, cache):
    """Logits of a prompt that is unpacked for, and of tokens that are multiplied with what is packed."""
    device = model.device
    parts = [PROMPT, *PROMPT[:, :3].split(1, dim=1)]
    return torch.cat([model(part.to(device), past_key_values=cache).logits.cpu() for part in parts], dim=1)


def tensors_of(model):
    return {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()


@pytest.mark.parametrize("where", with_few(["gpu", "dram"]))
def test_answers_are_those_of_the_numbers(tied, where):
    numbers = load_model(tied, dtype="float32").model
    with torch.no_grad():
        expected = numbers(torch.cat([PROMPT, PROMPT[:, :3]], dim=1)).logits
    with simulated_cuda():
        model = loaded(tied, weights_device=where)
        torch.testing.assert_close(answers(model, HeteroCache(model)), expected, rtol=1e-4, atol=1e-4)
        assert LoadedWeights.of(model).types == ("Q5_0",)
        head, embedding = model.lm_head, model.model.embed_tokens
        assert isinstance(head.quantized, DeviceWeight)
        assert head.quantized is embedding.quantized
        assert head.packed is embedding.packed
        assert {each.device.type for each in decoder_layers(model).buffers()} == {"cpu" if where == "dram" else "cuda"}
        eject(model)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor.cpu(), numbers.state_dict()[name]), name


def test_a_gpu_holds_what_was_planned_and_no_more(tied):
    weightless = weightless_model(tied)
    injection = inject(weightless.model, "dense", command_line=SMALL)
    planned = Footprint.of(injection, dtype=torch.float32, on_gpu=True, stored=weightless.stored).memory(95)
    with simulated_cuda() as gpu:
        model = loaded(tied)
        weights = sum(tensor.nbytes for tensor in tensors_of(model))
        assert weights == planned.weights < 0.3 * weight_bytes(load_model(tied, dtype="float32").model.parameters())
        cache = HeteroCache(model)
        gc.collect()
        assert gpu.memory.live[0] == weights
        now = Footprint.of(model.hetero_kv_injection).memory(95)
        assert (now.weights, now.unpacked) == (0, planned.unpacked)
        answers(model, cache)
        assert UnpackRoom.on(model.device).nbytes == planned.unpacked
        assert gpu.memory.peak[0] <= planned.compute


def test_layers_in_dram_hold_their_bytes_once_on_a_gpu_and_in_dram(tied):
    weightless = weightless_model(tied)
    injection = inject(weightless.model, "dense", command_line={**SMALL, "weights_device": "dram"})
    planned = Footprint.of(injection, dtype=torch.float32, on_gpu=True, stored=weightless.stored).memory(95)
    with simulated_cuda() as gpu:
        model = loaded(tied, weights_device="dram")
        assert planned.weights_in_dram == weight_bytes(tensors_of(decoder_layers(model)))
        answers(model, HeteroCache(model))
        # Tensors begin on 256 bytes in a slot.
        assert gpu.memory.peak[0] <= planned.compute + 2 * 256 * len(tensors_of(decoder_layers(model)[0]))
        # Nobody holds the bytes that were copied to page-locked memory.
        for module in decoder_layers(model).modules():
            if isinstance(module, QuantizedMatrix):
                assert gpu.pinned.covers(module.packed)
                assert module._quantized.data.device.type == "cuda"


def test_a_decoded_token_takes_the_launches_of_a_model_of_numbers(tied):
    launches = {}
    with simulated_cuda() as gpu:
        for weights in ("auto", "fp32"):
            # Launches that are captured are one.
            model = loaded(tied, weights=weights, cuda_graphs="off")
            cache = HeteroCache(model)
            answers(model, cache)
            token = PROMPT[:, :1].to("cuda")
            gpu.record.clear()
            with torch.no_grad():
                model(token, past_key_values=cache)
            names = [launch.name for launch in gpu.record.launches]
            launches[weights] = len(names)
            counts = names.count("_multiply_packed"), names.count("_rows_of_packed"), names.count("_unpack_packed")
            assert counts == ((15, 1, 0) if weights == "auto" else (0, 0, 0))
            assert not gpu.record.pageable
    # An addition of the bias is within the kernel.
    assert launches["auto"] <= launches["fp32"]


def test_a_matrix_larger_than_a_piece_is_unpacked_in_several(tied, monkeypatch):
    with simulated_cuda():
        model = loaded(tied)
        expected = answers(model, HeteroCache(model))
        monkeypatch.setattr(device_weight, "_PIECE_BYTES", 48 * 64 * 4)
        torch.testing.assert_close(answers(model, HeteroCache(model)), expected, rtol=1e-5, atol=1e-5)


def test_weights_go_where_the_model_goes(tied):
    opened = open_model(tied, dtype="float32")
    inject(opened.model, "dense", command_line=SMALL)
    model = opened.load().model
    packed = model.lm_head.packed
    with simulated_cuda() as gpu:
        model.to("cuda")
        assert model.lm_head.packed is model.model.embed_tokens.packed
        assert gpu.memory.live[0] == sum(tensor.nbytes for tensor in tensors_of(model))
        on_gpu = answers(model, HeteroCache(model))
        model.to("cpu")
    assert model.lm_head.packed is model.model.embed_tokens.packed
    assert torch.equal(model.lm_head.packed, packed)
    # Few rows are multiplied with activations of 8 bits on a CPU.
    mine = answers(model, HeteroCache(model))
    assert (mine - on_gpu).norm() / on_gpu.norm() < 0.02


@pytest.mark.parametrize("model_type", with_few(["mixtral", "gpt_oss"]))
def test_experts_stay_packed_and_a_token_waits_for_none_of_them(model_type):
    model = tiny_model(model_type)
    ids = PROMPT % 97
    with simulated_cuda() as gpu:
        model.to("cuda")
        inject(model, "dense", command_line={**SMALL, "weights": "q8_0"})
        experts = [module for module in model.modules() if type(module).__name__ == "QuantizedExperts"]
        cache = HeteroCache(model)
        with torch.no_grad():
            mine = [model(part.to("cuda"), past_key_values=cache).logits.cpu() for part in (ids, ids[:, :1])]
            generator = torch.Generator().manual_seed(1)
            x, shares = torch.randn(3, 64, generator=generator), torch.rand(3, 2, generator=generator)
            arguments = [each.to("cuda") for each in (x, torch.tensor([[2, 0], [1, 3], [3, 2]]), shares)]
            gpu.record.clear()
            few = experts[0](*arguments).cpu()
            # The last is the test's own.
            assert len(gpu.record.waits) == 1
        assert all(weights.data.is_cuda for module in experts for weights in module.packed_weights())
        eject(model)
        with torch.no_grad():
            expected = model(torch.cat([ids, ids[:, :1]], dim=1).to("cuda")).logits.cpu()
            plain = model.model.layers[0].mlp.experts(*arguments).cpu()
    torch.testing.assert_close(few, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat(mine, dim=1), expected, rtol=1e-3, atol=1e-3)
