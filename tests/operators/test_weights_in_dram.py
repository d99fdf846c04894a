"""Layer weights in DRAM for a model on a GPU: the same answers, and models larger than the GPU's memory."""

from __future__ import annotations

import copy

import pytest
import torch

from hetero_kv import eject
from hetero_kv.models.errors import ModelError
from hetero_kv.models.placing import decoder_layers, offloads_to_dram, placed, weight_bytes, with_layers_in_dram
from hetero_kv.planning.footprint import Footprint
from tests.support.devices import model_on, simulated_cuda
from tests.support.slow_variants import with_slow
from tests.support.small_recipes import injected, small_recipe
from tests.support.tiny_models import tiny_model

CUDA = torch.device("cuda")


def ids(tokens=100, seed=0):
    return torch.randint(2, 97, (1, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def answers(model, recipe="dense", later=(), **engine):
    cache = injected(model, small_recipe(recipe, **engine))
    parts = [ids(), *(ids(1, seed) for seed in range(3)), *later]
    # Embeddings lie where a model computes.
    device = model.get_input_embeddings().weight.device
    try:
        logits = [model(part.to(device), past_key_values=cache).logits.cpu() for part in parts]
        return torch.cat(logits, dim=1)
    finally:
        eject(model)


@pytest.mark.cuda
# Odd: then the last layer and the first take turns in one place. Tied: one matrix in two places.
@pytest.mark.parametrize(
    ("layers", "tied", "fetched"),
    with_slow([(3, False, 3 + 1 + 3 * 2), (2, True, 2)], slow=[(3, False, 3 + 1 + 3 * 2)]),
)
def test_answers_are_the_same_wherever_weights_lie(layers, tied, fetched):
    whole = tiny_model("llama", num_hidden_layers=layers, tie_word_embeddings=tied)
    with simulated_cuda() as gpu:
        expected = answers(model_on(CUDA, whole))
        model = with_layers_in_dram(copy.deepcopy(whole), CUDA)
        assert all(each.device.type == "cpu" for each in decoder_layers(model).parameters())
        gpu.record.clear()
        torch.testing.assert_close(answers(model), expected, rtol=1e-5, atol=1e-5)
        copies = [copied for copied in gpu.record.copies if copied.line.startswith("hetero_kv/gpu_ops/layer_stream")]
        # All layers for the prompt; then those that share a place in turn, the first of which is prefetched.
        assert len(copies) == fetched
        assert all(copied.is_pinned and not copied.is_blocking for copied in copies)
        # Without rules the model has its weights where they were.
        again = torch.cat([each.flatten() for each in decoder_layers(model).parameters()])
        assert torch.equal(again, torch.cat([each.flatten() for each in decoder_layers(whole).parameters()]))


@pytest.mark.cuda
def test_a_gpu_holds_two_layers_and_no_more_than_was_planned():
    whole = tiny_model("llama", num_hidden_layers=8)
    with simulated_cuda() as gpu:
        model = with_layers_in_dram(whole, CUDA)
        cache = injected(model, small_recipe("dense"))
        beside = weight_bytes(each for each in (*model.parameters(), *model.buffers()) if each.device.type == "cuda")
        planned = Footprint.of(model.hetero_kv_injection).memory(100)
        layer = weight_bytes(decoder_layers(model)[0].parameters())
        assert 2 * layer <= planned.weights < 3 * layer
        with torch.no_grad():
            model(ids().to(CUDA), past_key_values=cache, logits_to_keep=1)
        assert gpu.memory.peak[0] - beside <= planned.compute
        # What has come is no longer to come.
        assert Footprint.of(model.hetero_kv_injection).memory(100).weights == 0


@pytest.mark.cuda
@pytest.mark.parametrize(
    "recipe", with_slow(["dense", "ktransformers", "shadowkv", "h2o"], slow=("dense", "h2o", "shadowkv"))
)
def test_a_model_larger_than_its_gpu_answers_as_on_a_cpu(recipe):
    whole = tiny_model("llama", num_hidden_layers=5, intermediate_size=2048)
    small = {"later": (ids(20, 4), ids(1, 5)), "max_seq_len": 128, "chunk_size": 32}
    expected = answers(whole, recipe, **small)
    most = weight_bytes(whole.parameters()) * 2 // 3
    with simulated_cuda(total=most) as gpu:
        model = placed(copy.deepcopy(whole), CUDA, "auto")
        found = answers(model, recipe, **small)
        assert gpu.memory.peak[0] <= most
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.cuda
def test_a_model_goes_where_its_setting_says():
    with simulated_cuda(total=400_000) as gpu:
        small, large = tiny_model("llama"), tiny_model("llama", num_hidden_layers=8)
        assert weight_bytes(small.parameters()) < 0.9 * 400_000 < weight_bytes(large.parameters())
        where = [{each.device.type for each in placed(large, CUDA, "auto").parameters()}]
        where += [{each.device.type for each in placed(tiny_model("llama"), CUDA, "dram").parameters()}]
        assert where == [{"cpu", "cuda"}] * 2
        assert gpu.memory.peak[0] < weight_bytes(large.parameters())
    assert not offloads_to_dram("gpu", 100, 10)
    assert not offloads_to_dram("auto", 90, 100)
    assert offloads_to_dram("auto", 91, 100)


def test_a_model_without_a_list_of_layers_is_refused_by_name():
    model = tiny_model("llama")
    model.model.layers = torch.nn.Sequential(*model.model.layers)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has no list of its layers.*weights_device to gpu"):
        with_layers_in_dram(model, CUDA)
