"""Files with more in them than the model computes with."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from hetero_kv import HeteroCache, inject, load_model, open_model
from hetero_kv.models import ModelError
from hetero_kv.models.gguf.architectures import ARCHITECTURES
from tests.gguf.logit_errors import IDS, PACKED_TOLERANCE, TOLERANCE, relative_error
from tests.support.gguf_models.container import Layout, array, scalar
from tests.support.gguf_models.variants import VARIANTS

UINT32 = 4
#: One of each way to count the layers; the others are slow.
QUICK = ("glm4moe", "exaone-moe")
PREDICTING = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in VARIANTS
    if ":" not in name and ARCHITECTURES[name].predicts
]


@pytest.mark.parametrize("name", PREDICTING)
def test_blocks_that_predict_further_tokens_are_left_out_with_a_warning(written, tmp_path, caplog, name):
    file = written(name)
    layout, layers = Layout.of(file.path), file.original.config.num_hidden_layers
    for each in [each for each in layout.tensors if each.name.startswith(f"blk.{layers - 1}.")]:
        layout.add(each.name.replace(f"blk.{layers - 1}.", f"blk.{layers}."), each.dims, np.ones(each.dims))
    layout.add(f"blk.{layers}.nextn.eh_proj.weight", [64, 32], np.ones((64, 32)))
    for key, entry in gguf.GGUFReader(file.path).fields.items():
        if key.startswith(f"{name}.") and isinstance(values := entry.contents(), list) and len(values) == layers:
            layout.put(key, array(entry.types[-1], [*values, values[-1]]))
    layout.put(f"{name}.block_count", scalar(UINT32, layers + 1))
    layout.put(f"{name}.nextn_predict_layers", scalar(UINT32, 1))
    layout.write(tmp_path / "more.gguf")
    model = load_model(tmp_path / "more.gguf", dtype="float32", device="cpu").model
    assert relative_error(model(IDS).logits, file.original(IDS).logits).max() < TOLERANCE
    assert f"blocks that predict further tokens are left out: {layers}" in caplog.text


def test_a_file_of_blocks_that_predict_further_tokens_alone_is_refused_as_such(written, tmp_path):
    layout = Layout.of(written("qwen35").path)
    layout.tensors = [each for each in layout.tensors if not each.name.startswith(("blk.0.", "blk.1."))]
    layout.move_together()
    layout.put("qwen35.nextn_predict_layers", scalar(UINT32, 1))
    layout.write(tmp_path / "alone.gguf")
    with pytest.raises(
        ModelError, match=r"alone\.gguf' has no layers, only blocks that predict further tokens; give the file of the"
    ):
        load_model(tmp_path / "alone.gguf")


def test_a_vocabulary_with_fewer_tokens_than_the_embedding_has_rows(written, tmp_path):
    file = written("llama")
    layout, rows = Layout.of(file.path), 64
    for tensor in layout.tensors:
        if tensor.name in ("token_embd.weight", "output.weight"):
            tensor.dims[1] += rows
            tensor.data += bytes(4 * rows * tensor.dims[0])
    layout.move_together()
    layout.entries = [entry for entry in layout.entries if entry[0] != "llama.vocab_size"]
    layout.write(tmp_path / "padded.gguf")
    loaded = load_model(tmp_path / "padded.gguf", dtype="float32", device="cpu")
    found, expected = loaded.model(IDS).logits, file.original(IDS).logits
    assert found.shape[-1] == len(loaded.tokenizer) + rows
    assert relative_error(found[..., :-rows], expected).max() < TOLERANCE


def merge_queries_keys_and_values(layout):
    """As a converter does that is told to."""
    for suffix in ("weight", "bias"):
        for q in [each for each in layout.tensors if each.name.endswith(f".attn_q.{suffix}")]:
            k, v = (
                next((each for each in layout.tensors if each.name == q.name.replace("attn_q", part)), None)
                for part in ("attn_k", "attn_v")
            )
            if k is None or v is None:
                # Of latent attention.
                continue
            q.name = q.name.replace("attn_q", "attn_qkv")
            q.dims[-1] += k.dims[-1] + v.dims[-1]
            q.data += k.data + v.data
            layout.tensors.remove(k)
            layout.tensors.remove(v)
    layout.move_together()


@pytest.mark.parametrize("name", ["llama: biases", "chatglm", "mimo2", "qwen35", "kimi-linear", "bailingmoe3"])
@pytest.mark.parametrize("kind", [None, GGMLQuantizationType.Q8_0], ids=["F32", "Q8_0"])
def test_merged_queries_keys_and_values_are_separated(written, tmp_path, name, kind):
    file = written(name, kind)
    layout = Layout.of(file.path)
    merge_queries_keys_and_values(layout)
    layout.write(tmp_path / "merged.gguf")
    model = load_model(tmp_path / "merged.gguf", dtype="float32", device="cpu").model
    assert relative_error(model(IDS).logits, file.original(IDS).logits).max() < TOLERANCE


def test_merged_rows_of_other_heads_are_refused_by_name(written, tmp_path):
    layout = Layout.of(written("llama: biases").path)
    merge_queries_keys_and_values(layout)
    layout.put("llama.attention.head_count_kv", scalar(UINT32, 1))
    layout.write(tmp_path / "merged.gguf")
    with pytest.raises(
        ModelError, match=r"blk\.0\.attn_qkv\.\w+'.* has 128 rows, which are not those of 4 query heads and 1"
    ):
        load_model(tmp_path / "merged.gguf")


@pytest.mark.parametrize("part", ["gate", "up"])
def test_experts_of_which_one_matrix_is_not_packed(written, tmp_path, part):
    file = written("qwen3moe", GGMLQuantizationType.Q8_0)
    layout = Layout.of(file.path)
    for tensor in layout.tensors:
        if tensor.name.endswith(f"ffn_{part}_exps.weight"):
            blocks = np.frombuffer(tensor.data, np.uint8).reshape(*tensor.dims[:0:-1], -1)
            tensor.data = bytearray(gguf.dequantize(blocks, GGMLQuantizationType.Q8_0).tobytes())
            tensor.kind = GGMLQuantizationType.F32
    layout.move_together()
    layout.write(tmp_path / "mixed.gguf")
    opened = open_model(tmp_path / "mixed.gguf", dtype="float32", device="cpu")
    inject(opened.model, "dense", command_line={"max_seq_len": 128, "kv_type": "FP32"})
    model = opened.load().model
    found = model(IDS, past_key_values=HeteroCache(model)).logits
    # Attention's matrices are multiplied with activations of 8 bits, by which a token may choose another expert.
    assert relative_error(found, file.original(IDS).logits).median() < PACKED_TOLERANCE
