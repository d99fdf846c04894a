"""Planned bytes of weights, compared with the loaded weights."""

from __future__ import annotations

import json

import pytest
import torch
from gguf import GGMLQuantizationType

from hetero_kv import inject, load_model, open_model
from hetero_kv.adapter.loaded_weights import LoadedWeights
from hetero_kv.cli import main
from hetero_kv.models.weightless import weightless_model
from hetero_kv.planning.plan import Footprint
from tests.support.slow_variants import with_few

SMALL = {"block_size": 4, "max_seq_len": 256}


def planned(source, weights, **where):
    weightless = weightless_model(source)
    injection = inject(weightless.model, "dense", command_line={**SMALL, "weights": weights})
    return Footprint.of(injection, dtype=torch.float32, stored=weightless.stored, **where).weights


def loaded(source, weights):
    opened = open_model(source, dtype="float32")
    inject(opened.model, "dense", command_line={**SMALL, "weights": weights})
    return LoadedWeights.of(opened.load().model).size


@pytest.fixture
def tied(write_tiny_gguf, tmp_path):
    """Q5_0, the head being the embedding."""
    path = tmp_path / "tied.gguf"
    return write_tiny_gguf(path, kind=GGMLQuantizationType.Q5_0, without=("output.weight",))


def test_a_loaded_models_weights_are_counted_once_and_named(tied, tiny_directory):
    opened = open_model(tied, dtype="float32")
    inject(opened.model, "dense", command_line=SMALL)
    model = opened.load().model
    weights = LoadedWeights.of(model)
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    assert weights == (sum(tensors.values()), ("Q5_0",))
    assert weights.in_short == "Q5_0"
    assert LoadedWeights.of(load_model(tiny_directory, dtype="bfloat16").model).types == ("bfloat16",)


@pytest.mark.parametrize("weights", with_few(["auto", "fp32", "bf16", "q8_0", "q4_0"], quick=["auto", "q8_0"]))
def test_weights_take_the_planned_bytes(tiny_directory, tiny_gguf, tied, weights):
    for source in (tiny_directory, tiny_gguf, tied):
        assert planned(source, weights) == loaded(source, weights)


@pytest.mark.parametrize("weights", ["auto", "q8_0"])
def test_16_bits_are_planned_as_they_are_kept(write_tiny_gguf, tmp_path, weights):
    path = write_tiny_gguf(tmp_path / "short.gguf", kind=GGMLQuantizationType.F16)
    assert planned(path, weights) == loaded(path, weights) < planned(path, "fp32")


def test_a_type_without_kernels_is_planned_as_it_is_kept(tied, monkeypatch):
    from hetero_kv.cpu_ops.weight_formats import FORMATS

    monkeypatch.delitem(FORMATS, "Q5_0")
    assert planned(tied, "auto") == loaded(tied, "auto") > planned(tied, "q4_0")


def test_a_gpu_takes_what_a_cpu_takes_and_room_to_unpack_in(tied):
    weightless = weightless_model(tied)
    injection = inject(weightless.model, "dense", command_line={**SMALL, "weights": "auto"})
    on_gpu = Footprint.of(injection, dtype=torch.bfloat16, stored=weightless.stored, on_gpu=True)
    assert on_gpu.weights == Footprint.of(injection, dtype=torch.bfloat16, stored=weightless.stored).weights
    # The embedding, which is the head as well, is the largest.
    assert on_gpu.memory(100).unpacked == weightless.model.lm_head.weight.numel() * 2
    assert Footprint.of(injection, stored=weightless.stored, on_gpu=False).memory(100).unpacked == 0


def test_the_command_says_so(tied, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HETERO_KV_CONFIG", str(tmp_path / "settings.yaml"))
    words = ["plan", "--model", str(tied), "--dtype", "float32", "--device", "cpu", "--max_seq_len", "256", "--json"]
    assert main(words) == 0
    at_4k = json.loads(capsys.readouterr().out)["lengths"]["4096"]
    assert at_4k["cpu"]["weights"] == at_4k["gpu"]["weights"] == loaded(tied, "auto")
