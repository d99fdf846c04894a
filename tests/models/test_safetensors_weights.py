"""A model in Hugging Face format is opened without weights and quantized tensor by tensor."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_kv import HeteroCache, inject, load_model, open_model
from hetero_kv.adapter.quantized_matrix import QuantizedEmbedding, QuantizedLinear
from hetero_kv.weights import quantized_weight
from hetero_kv.weights.quantized_weight import most_rows_of_codes
from tests.support.tiny_models import tiny_model

SMALL = {"block_size": 4, "max_seq_len": 256, "kv_type": "FP32"}
IDS = torch.tensor([[5, 9, 77, 31, 200, 8]])


def logits_of(model):
    return model(IDS, past_key_values=HeteroCache(model, 256)).logits


def quantized(model):
    kinds = QuantizedLinear | QuantizedEmbedding
    return {path: m.quantized for path, m in model.named_modules() if isinstance(m, kinds) and m.quantized is not None}


def changed(folder, tmp_path, change):
    """A copy of a model's folder whose tensors `change` has had in hand."""
    copy = shutil.copytree(folder, tmp_path / "changed")
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_weights_are_quantized_as_they_come(tiny_directory, monkeypatch):
    opened = open_model(tiny_directory, dtype="float32")
    assert all(parameter.is_meta for parameter in opened.model.parameters())
    inject(opened.model, "dense", command_line={**SMALL, "weights": "q8_0"})
    taken = QuantizedLinear.load_numbers
    most = []

    def take(module, numbers, dtype):
        taken(module, numbers, dtype)
        most.append(sum(p.numel() for p in opened.model.parameters() if p.dim() > 1 and not p.is_meta))

    monkeypatch.setattr(QuantizedLinear, "load_numbers", take)
    model = opened.load().model
    assert len(most) == 2 * 7 + 1
    assert max(most) == 0  # no matrix ever was in memory as numbers
    after = load_model(tiny_directory, dtype="float32").model
    inject(after, "dense", command_line={**SMALL, "weights": "q8_0"})
    assert quantized(model).keys() == quantized(after).keys()
    torch.testing.assert_close(logits_of(model), logits_of(after), rtol=0, atol=0)


def test_logits_of_few_tokens_are_not_rounded(tiny_directory):
    model = load_model(tiny_directory, dtype="bfloat16").model
    inject(model, "dense", command_line={**SMALL, "weights": "q8_0"})
    cache = HeteroCache(model, 256)
    model(IDS[:, :-1], past_key_values=cache)
    hidden = []
    model.lm_head.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    logits = model(IDS[:, -1:], past_key_values=cache).logits
    assert (logits.dtype, hidden[0].dtype) == (torch.float32, torch.bfloat16)
    assert not torch.equal(logits, logits.bfloat16().float())
    head = model.lm_head.quantized
    torch.testing.assert_close(logits[0], head.multiply(hidden[0][0].float()), rtol=0, atol=0)
    assert model.model.layers[0].mlp.up_proj(hidden[0]).dtype is torch.bfloat16


@pytest.fixture
def few(tiny_directory, monkeypatch):
    """A packed model in bfloat16, and the most tokens that are multiplied with its codes."""
    monkeypatch.setattr(quantized_weight, "dot_instruction", lambda: "generic")
    model = load_model(tiny_directory, dtype="bfloat16").model
    inject(model, "dense", command_line={**SMALL, "weights": "q8_0"})
    return model, most_rows_of_codes("Q8_0", torch.bfloat16)


@pytest.mark.parametrize("more", [0, 1])
def test_logits_are_not_rounded_as_long_as_their_sums_are_those_of_one_token(few, more):
    model, most = few
    logits = model(torch.arange(most + more)[None] % 90, past_key_values=HeteroCache(model, 256)).logits
    assert logits.dtype is (torch.bfloat16 if more else torch.float32)


def test_logits_of_a_whole_prompt_take_no_more_memory_than_the_models_dtype(tiny_directory, monkeypatch):
    monkeypatch.setattr(quantized_weight, "most_rows_of_codes", lambda name, dtype: 1000)
    model = load_model(tiny_directory, dtype="bfloat16").model
    inject(model, "dense", command_line={**SMALL, "weights": "q8_0"})
    of = [model(torch.arange(rows)[None] % 90, past_key_values=HeteroCache(model, 256)).logits for rows in (96, 97)]
    assert [each.dtype for each in of] == [torch.float32, torch.bfloat16]
    torch.testing.assert_close(of[0].bfloat16(), of[1][:, :96], rtol=0, atol=0)


@pytest.mark.parametrize("order", [1, -1])
def test_rows_of_several_lengths_keep_the_logits_of_few_tokens(few, order):
    model, most = few
    prompts = [torch.arange(count) % 90 for count in (7, most + 20)][::order]
    ids = torch.zeros(2, most + 20, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, -len(prompt) :], mask[row, -len(prompt) :] = prompt, 1
    together = model(ids, attention_mask=mask, past_key_values=HeteroCache(model, 256)).logits
    row = int(len(prompts[0]) > 7)
    alone = model(prompts[row][None], past_key_values=HeteroCache(model, 256)).logits
    assert alone.dtype is torch.float32
    torch.testing.assert_close(together[row, -7:], alone[0], rtol=0, atol=0)


def test_numbers_stay_numbers_and_have_no_operators(tiny_directory):
    opened = open_model(tiny_directory, dtype="bfloat16")
    inject(opened.model, "dense", command_line=SMALL)
    assert not any(isinstance(module, QuantizedLinear | QuantizedEmbedding) for module in opened.model.modules())
    model, expected = opened.load().model, load_model(tiny_directory, dtype="bfloat16").model
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    mine, theirs = dict(model.state_dict()), expected.state_dict()
    assert {name.replace(".wrapped.", ".") for name in mine} == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype is torch.bfloat16
        assert torch.equal(tensor, theirs[name.replace(".wrapped.", ".")])


@pytest.mark.parametrize("weights", ["auto", "q8_0"])
def test_tied_matrices_are_one(tmp_path, tiny_directory, weights):
    copy = changed(tiny_directory, tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    opened = open_model(copy, dtype="float32")
    inject(opened.model, "dense", command_line={**SMALL, "weights": weights})
    model = opened.load().model
    if weights == "q8_0":
        assert model.lm_head.quantized is model.model.embed_tokens.quantized
    else:
        assert model.lm_head.weight is model.model.embed_tokens.weight
    expected = load_model(copy, dtype="float32").model(IDS).logits
    assert (logits_of(model) - expected).norm() / expected.norm() < 0.05


def test_shards_are_read_one_after_the_other(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    from hetero_kv.models.safetensors_weights import TensorFiles

    with torch.device("meta"):
        bare = type(model)(model.config)
    files = TensorFiles.of(bare, str(tmp_path), offline=True)
    seen = []
    files.load(bare, torch.float32, lambda activity, done, total: seen.append((done, total)))
    for name, tensor in bare.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert all(0 < done <= total for done, total in seen)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.update(extra=torch.zeros(2)),
        lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].double()}),
    ],
    ids=["a tensor too many", "numbers of another kind"],
)
def test_files_with_other_tensor_names_are_left_to_transformers(tiny_directory, tmp_path, change):
    opened = open_model(changed(tiny_directory, tmp_path, change), dtype="float32")
    assert not any(parameter.is_meta for parameter in opened.model.parameters())
    torch.testing.assert_close(
        opened.load().model(IDS).logits, load_model(tiny_directory, dtype="float32").model(IDS).logits
    )


def test_models_that_transformers_converts_are_left_to_it(tmp_path):
    tiny_model("mixtral").save_pretrained(tmp_path)
    from hetero_kv.models.safetensors_weights import TensorFiles

    with torch.device("meta"):
        bare = type(tiny_model("mixtral"))(tiny_model("mixtral").config)
    assert TensorFiles.of(bare, str(tmp_path), offline=True) is None
