"""A model is opened without weights, rules are injected, then weights load: nothing is unpacked in between."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from hetero_kv import HeteroCache, HeteroKVError, eject, inject, load_model, open_model
from hetero_kv.adapter.quantized_matrix import QuantizedEmbedding, QuantizedLinear
from hetero_kv.contexts.identity import Identity
from hetero_kv.models.gguf.file import GGUFFile
from hetero_kv.models.gguf.tensor_reader import tensor_data
from hetero_kv.weights import quantized_weight
from tests.support.slow_variants import with_few
from tests.support.tiny_models import tiny_model

SMALL = {"block_size": 4, "max_seq_len": 256, "kv_type": "FP32"}
IDS = torch.tensor([[5, 9, 77, 31, 200, 8]])


@pytest.fixture(scope="session")
def quantized_file(write_tiny_gguf, tmp_path_factory):
    """The tiny model in one of GGML's types."""
    folder = tmp_path_factory.mktemp("quantized")
    return lambda kind: write_tiny_gguf(folder / f"{kind}.gguf", kind=GGMLQuantizationType[kind])


def quantized(model):
    return {
        path: module.quantized.name
        for path, module in model.named_modules()
        if isinstance(module, QuantizedLinear | QuantizedEmbedding) and module.quantized is not None
    }


def logits_of(model, ids):
    return model(ids, past_key_values=HeteroCache(model, 256)).logits


@pytest.mark.parametrize(
    "kind", with_few(["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"], quick=["Q4_0", "Q8_0", "MXFP4"])
)
def test_matrices_stay_as_the_file_stores_them(quantized_file, kind, monkeypatch):
    monkeypatch.setattr(quantized_weight, "dot_instruction", lambda: "generic")
    path = quantized_file(kind)
    opened = open_model(path, dtype="float32")
    assert all(parameter.is_meta for parameter in opened.model.parameters())
    inject(opened.model, "dense", command_line=SMALL)
    model = opened.load().model
    assert len(quantized(model)) == 2 * 7 + 2
    assert set(quantized(model).values()) == {kind}
    unpacked = load_model(path, dtype="float32").model
    long = IDS.repeat(1, 20)
    # A long prompt multiplies the same numbers, without dot products of bytes; a short one quantizes its activations.
    torch.testing.assert_close(logits_of(model, long), unpacked(long).logits, rtol=1e-4, atol=1e-4)
    short, expected = logits_of(model, IDS), unpacked(IDS).logits
    assert 0 < (short - expected).norm() / expected.norm() < 0.02


def test_parts_of_a_prompt_whose_logits_nobody_wants_give_none(quantized_file):
    opened = open_model(quantized_file("Q8_0"), dtype="float32")
    inject(opened.model, "streaming_llm", command_line={"stride": 16, "budget": 24, "max_seq_len": 256})
    model, long = opened.load().model, IDS.repeat(1, 10)
    with torch.no_grad():
        last = model(long, past_key_values=HeteroCache(model, 256), logits_to_keep=1).logits
    torch.testing.assert_close(last, logits_of(model, long)[:, -1:], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_numbers_of_16_bits_stay_so(quantized_file, kind, caplog):
    path = quantized_file(kind)
    opened = open_model(path, dtype="float32")
    inject(opened.model, "dense", command_line=SMALL)
    model = opened.load().model
    assert set(quantized(model).values()) == {kind}
    assert len(quantized(model)) == 2 * 7 + 2
    unpacked = load_model(path, dtype="float32").model
    # Activations are not rounded, whatever the number of rows.
    for ids in (IDS, IDS.repeat(1, 10), IDS[:, :1]):
        torch.testing.assert_close(logits_of(model, ids), unpacked(ids).logits, rtol=1e-4, atol=1e-4)
    eject(model)
    for name, numbers in unpacked.state_dict().items():
        assert torch.equal(model.state_dict()[name], numbers), name
    assert not caplog.text


def test_a_model_opened_without_rules_for_weights_is_a_loaded_one(quantized_file):
    path = quantized_file("Q8_0")
    opened = open_model(path, dtype="float32").load().model
    assert torch.equal(opened(IDS).logits, load_model(path, dtype="float32").model(IDS).logits)


def test_eject_gives_the_modules_back_with_their_numbers(quantized_file):
    path = quantized_file("Q5_0")
    opened = open_model(path, dtype="float32")
    inject(opened.model, "quest", command_line=SMALL)
    model = opened.load().model
    eject(model)
    expected = load_model(path, dtype="float32").model
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, numbers in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], numbers), name


@pytest.mark.parametrize("settings", [{}, {"weights": "q8_0"}])
def test_tied_matrices_are_one_packed_and_unpacked(settings):
    model = tiny_model("qwen2", tie_word_embeddings=True)
    inject(model, "dense", command_line={**SMALL, "weights": "q4_0", **settings})
    assert model.lm_head.quantized is model.model.embed_tokens.quantized is not None
    eject(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.shape == (97, 64)


def test_a_type_without_kernels_is_kept_as_q8_0_and_said(quantized_file, caplog, monkeypatch):
    path = quantized_file("Q5_1")
    monkeypatch.delitem(__import__("hetero_kv.cpu_ops.weight_formats", fromlist=["FORMATS"]).FORMATS, "Q5_1")
    opened = open_model(path, dtype="float32")
    inject(opened.model, "dense", command_line=SMALL)
    model = opened.load().model
    assert set(quantized(model).values()) == {"Q8_0"}
    assert "tensors of types without kernels are converted: 16 of Q5_1 to Q8_0" in caplog.text
    expected = load_model(path, dtype="float32").model(IDS.repeat(1, 10)).logits
    assert (logits_of(model, IDS.repeat(1, 10)) - expected).norm() / expected.norm() < 0.02


@pytest.mark.parametrize(
    ("weights", "kinds", "dtype"),
    with_few(
        [
            ("q4_0", {"Q4_0"}, None),
            ("q8_0", {"Q8_0"}, None),
            ("fp32", set(), torch.float32),
            ("bf16", set(), torch.bfloat16),
        ],
        quick=[("q8_0", {"Q8_0"}, None), ("bf16", set(), torch.bfloat16)],
    ),
)
def test_weights_have_the_requested_type(quantized_file, tiny_directory, weights, kinds, dtype):
    for source in (quantized_file("Q8_0"), tiny_directory):
        opened = open_model(source, dtype="float32")
        inject(opened.model, "dense", command_line={**SMALL, "weights": weights})
        model = opened.load().model
        assert set(quantized(model).values()) == kinds
        if dtype is not None:
            assert model.model.layers[0].mlp.gate_proj.weight.dtype is dtype
        expected = load_model(source, dtype="float32").model(IDS).logits
        assert (logits_of(model, IDS) - expected).norm() / expected.norm() < 0.2


def test_weights_stay_unpacked_by_default(tiny_directory):
    model = load_model(tiny_directory, dtype="float32").model
    inject(model, "dense", command_line=SMALL)
    assert not any(isinstance(module, QuantizedLinear | QuantizedEmbedding) for module in model.modules())


def test_a_file_leaves_memory_as_its_tensors_are_taken(tmp_path):
    path, size = tmp_path / "large.gguf", 1 << 18
    writer = gguf.GGUFWriter(path, "qwen2")
    for number in range(8):
        writer.add_tensor(f"blk.{number}.attn_q.weight", np.full(size, number, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.read(path)
    tracemalloc.start()
    try:
        for number, (_, data) in enumerate(tensor_data(file)):
            assert (data == number).all()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The one before is there until the next one is.
    assert 4 * size <= peak < 3.5 * 4 * size


def test_a_models_identity_is_known_before_its_weights_except_for_these(quantized_file, tiny_directory):
    for source in (quantized_file("Q8_0"), tiny_directory):
        opened = open_model(source, dtype="float32")
        injection = inject(opened.model, "quest", command_line=SMALL)
        before = Identity.of(opened.model, injection.attention_operators())
        opened.load()
        without = {"weights": "", "active": {}}
        assert replace(before, **without) == replace(injection.identity, **without)


def test_an_unknown_kind_of_weights_is_refused(tiny_directory):
    model = load_model(tiny_directory, dtype="float32").model
    with pytest.raises(HeteroKVError, match="q8_0"):
        inject(model, "dense", command_line={**SMALL, "weights": "q8"})


def test_weights_that_are_missing_are_named(write_tiny_gguf, tmp_path):
    path = write_tiny_gguf(tmp_path / "cut.gguf", without=("blk.1.ffn_up.weight",))
    with pytest.raises(HeteroKVError, match=r"layers\.1\.mlp\.up_proj"):
        open_model(path, dtype="float32").load()


@pytest.mark.slow
@pytest.mark.model
def test_the_small_real_model_is_as_large_as_its_file(smollm2):
    opened = open_model("smollm2-135m-instruct", dtype="float32")
    inject(opened.model, "dense", command_line={"max_seq_len": 256})
    model = opened.load().model
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    assert sum(tensor.nbytes for tensor in tensors) < 1.05 * 98_362_432
    # The head is the embedding.
    assert model.lm_head.quantized is model.model.embed_tokens.quantized
    unpacked = smollm2.model
    prompt = opened.tokenizer("The capital of France is", return_tensors="pt").input_ids
    answer = unpacked.generate(prompt, max_new_tokens=12, do_sample=False)
    cache = HeteroCache(model, 256)
    # Token by token, as in decoding, where activations are quantized.
    mine = torch.cat([model(token[None, None], past_key_values=cache).logits for token in answer[0]], dim=1)
    expected = unpacked(answer).logits
    divergence = torch.nn.functional.kl_div(
        mine.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="none"
    )
    assert divergence.sum(-1).mean() < 0.01
