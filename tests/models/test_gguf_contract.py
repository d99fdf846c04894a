"""The requirements on a GGUF file, point by point: each violation is refused by name before anything is allocated."""

from __future__ import annotations

import math
import os
import struct

import gguf
import numpy as np
import pytest

from hetero_kv.models import ModelError, load_model, model_config, open_model
from hetero_kv.models.gguf.contract import stored_bytes
from hetero_kv.models.gguf.file import GGUFFile
from hetero_kv.models.gguf.finite_check import all_finite
from hetero_kv.models.gguf.header import GGUFTensorEntry, MalformedHeaderError
from hetero_kv.models.weightless import weightless_model
from hetero_kv.weights.block_numbers import numbers_of_blocks
from hetero_kv.weights.tensor_types import BLOCK_SIZES, type_named
from tests.support.gguf_models.container import ARRAY, STRING, Layout, Tensor, array, scalar

U32, F32 = 4, 6


@pytest.fixture
def layout(tiny_gguf):
    return Layout.of(tiny_gguf)


def put(key, value):
    def change(layout):
        layout.entries = [(name, old) for name, old in layout.entries if name != key] + [(key, value)]

    return change


def of_tensor(number, **parts):
    def change(layout):
        for name, value in parts.items():
            setattr(layout.tensors[number], name, value)

    return change


def repeat_last(layout):
    layout.tensors.append(layout.tensors[-1])


def overlap(layout):
    layout.tensors[3].offset = layout.tensors[2].offset


def leave_a_hole(layout):
    for tensor in layout.tensors[3:]:
        tensor.offset += 32
    layout.tensors[2].data += bytes(32)


def append_bytes(layout):
    layout.tensors[-1].data += bytes(64)


def name_blocks(layout):
    put("qwen2.block_count", scalar(U32, 3))(layout)


CASES = {
    "alignment 0": (put("general.alignment", scalar(U32, 0)), r"general\.alignment is 0; it must be from 8 to 65,536"),
    "alignment 48": (put("general.alignment", scalar(U32, 48)), r"general\.alignment is 48; it must be a power of two"),
    "alignment text": (
        put("general.alignment", scalar(STRING, "x")),
        r"general\.alignment is 'x'; it must be a whole number",
    ),
    "split text": (put("split.count", scalar(STRING, "2")), r"split\.count is '2'; it must be a whole number"),
    "split array": (put("split.count", array(U32, [1])), r"split\.count is an array of 1; it must be a whole number"),
    "many blocks": (
        put("qwen2.block_count", scalar(U32, 65_536)),
        r"block_count is 65,536; it must be from 1 to 1,024",
    ),
    "other blocks": (name_blocks, r"block_count is 3, and the file has tensors of 2 blocks, 0 to 1"),
    "context": (put("qwen2.context_length", scalar(F32, 1.5)), r"context_length is 1\.5; it must be a whole number"),
    "heads": (
        put("qwen2.attention.head_count", array(U32, [4])),
        "head_count has 1 numbers; it must be one, or one",
    ),
    "epsilon": (
        put("qwen2.attention.layer_norm_rms_epsilon", scalar(F32, math.nan)),
        "epsilon is nan; it must be a number",
    ),
    "not finite": (
        put("qwen2.rope.scaling.factor", scalar(F32, math.inf)),
        r"scaling\.factor is inf; it must be finite",
    ),
    "template": (put("tokenizer.chat_template", scalar(U32, 1)), r"tokenizer\.chat_template is 1; it must be text"),
    "token id": (
        put("tokenizer.ggml.eos_token_id", scalar(U32, 9999)),
        r"eos_token_id is 9,999; it must be from 0 to 259",
    ),
    "token types": (put("tokenizer.ggml.token_type", array(5, [1])), "token_type has 1 elements for 260 tokens"),
    "key twice": (lambda layout: layout.entries.append(layout.entries[3]), r"has the key '.+' twice"),
    "tensor twice": (repeat_last, r"has the tensor '.+' twice"),
    "nested": (
        put("x", struct.pack("<IIQ", ARRAY, ARRAY, 1) * 9),
        "x is of type 9; numbers, strings and",
    ),
    "long array": (
        put("x", struct.pack("<IIQ", ARRAY, 0, 1 << 40)),
        "x has 1,099,511,627,776 elements; the limit is 1,048",
    ),
    "truth": (put("x", struct.pack("<IB", 7, 2)), "x is neither true nor false"),
    "many tensors": (
        lambda layout: layout.counts.update(tensors=1 << 40),
        r"its header counts 1,099,511,627,776 tensors and \d+",
    ),
    "no dimension": (of_tensor(1, dims=[]), "has 0 dimensions; 1 to 4 are possible"),
    "65 dimensions": (of_tensor(1, dims=[1] * 65), "has 65 dimensions; 1 to 4 are possible"),
    "empty": (of_tensor(0, dims=[0, 260]), "is 260 by 0; dimensions must be from 1"),
    "huge": (of_tensor(0, dims=[1 << 33, 1 << 33]), "dimensions must be from 1 to 16,777,216"),
    "odd rows": (of_tensor(0, dims=[33, 260], kind=8), "its rows must be whole blocks of 32 Q8_0 weights"),
    "no type": (of_tensor(0, kind=128), "has type 128, which does not exist"),
    "integers": (of_tensor(0, kind=26), "has the type I32, which no weights have"),
    "misaligned": (of_tensor(1, offset=7), "begins at byte 7 of the data; after"),
    "overlap": (overlap, r"begins at byte [\d,]+ of the data; after the tensors before it, it must begin at [\d,]+"),
    "hole": (leave_a_hole, r"begins at byte [\d,]+ of the data; after the tensors before it, it must begin at [\d,]+"),
    "left over": (append_bytes, "has 64 bytes after the last of its tensors"),
    "text of a key": (
        put("general.type", scalar(STRING, b"a\xff")),
        r"general\.type is b'a\\xff', which is not UTF-8",
    ),
    "text in an array": (
        put("tokenizer.ggml.tokens", array(STRING, ["a", b"\xc3"])),
        r"tokenizer\.ggml\.tokens is b'\\xc3', which is not UTF-8",
    ),
    "kind of a file": (
        put("general.type", array(STRING, ["model"])),
        r"general\.type is an array of 1; it must be text",
    ),
    "base of a rotation": (
        put("qwen2.rope.freq_base", scalar(F32, 1.0)),
        r"freq_base is 1\.0; it must be a number between 1 and 1e\+12",
    ),
    "beta": (
        put("qwen2.rope.scaling.yarn_beta_slow", scalar(F32, 0.0)),
        r"yarn_beta_slow is 0\.0; it must be a number",
    ),
    "tiny factor": (
        put("qwen2.rope.scaling.factor", scalar(F32, 1e-30)),
        r"scaling\.factor is 1\..*e-30; it must be 0, or of a magnitude from 1e-09 to 1e\+09",
    ),
    "huge scale": (
        put("qwen2.residual_scale", scalar(F32, -3e38)),
        r"residual_scale is -.*; it must be 0, or of a magn",
    ),
    "control characters": (of_tensor(0, name="\x1b[2J"), r"a tensor's name is '\\x1b\[2J'; a name has printable"),
}


@pytest.mark.parametrize("case", CASES)
def test_impossible_metadata_is_refused_with_its_value(layout, tmp_path, case):
    change, message = CASES[case]
    change(layout)
    layout.write(tmp_path / "bad.gguf")
    with pytest.raises(
        ModelError, match=rf"bad\.gguf' \([\d,]+ bytes\) is damaged or cut short: .*{message}.*; download"
    ):
        GGUFFile.read(tmp_path / "bad.gguf")


def test_descriptions_may_be_in_any_encoding(layout, tmp_path):
    layout.entries += [("general.author", scalar(STRING, b"Andr\xe9")), ("general.tags", array(STRING, [b"\xff"]))]
    layout.write(tmp_path / "latin.gguf")
    assert GGUFFile.read(tmp_path / "latin.gguf").get("general.author") == "Andr\ufffd"
    open_model(tmp_path / "latin.gguf", device="cpu")


def test_a_table_of_sequences_of_tokens_may_have_more_rows_than_other_tensors():
    name, kind = "per_layer_token_embd.weight", type_named("Q8_0")
    assert stored_bytes(GGUFTensorEntry(name, (320_000_000, 128), kind, 0)) == 320_000_000 * 136
    with pytest.raises(MalformedHeaderError, match=r"dimensions must be from 1 to 2,147,483,647"):
        stored_bytes(GGUFTensorEntry(name, (1 << 31, 128), kind, 0))


def test_a_header_longer_than_usual_is_read_to_its_end(layout, tmp_path, monkeypatch):
    layout.entries.insert(1, ("general.notes", array(STRING, ["a" * 1000] * 5000)))
    layout.write(tmp_path / "long.gguf")
    whole = GGUFFile.read(tmp_path / "long.gguf")
    monkeypatch.setattr("hetero_kv.models.gguf.file.USUAL_HEADER_BYTES", 4000)
    assert GGUFFile.read(tmp_path / "long.gguf") == whole


def test_taking_apart_and_putting_together_is_the_same_file(layout, tiny_gguf, tmp_path):
    layout.write(tmp_path / "same.gguf")
    assert (tmp_path / "same.gguf").read_bytes() == tiny_gguf.read_bytes()


@pytest.mark.parametrize("key", ["context_length", "block_count", "embedding_length", "attention.head_count"])
def test_missing_required_keys_are_reported_unless_a_configuration_has_them(layout, tiny_directory, tmp_path, key):
    layout.entries = [entry for entry in layout.entries if entry[0] != f"qwen2.{key}"]
    path = tmp_path / "silent.gguf"
    layout.write(path)
    for load in (load_model, open_model, model_config, weightless_model):
        with pytest.raises(ModelError, match=rf"silent\.gguf' has no qwen2\.{key} in its metadata; .* as gguf_path"):
            load(path)
    assert load_model(tiny_directory, gguf_path=path, device="cpu").context_length == 512


def test_a_tensor_that_no_model_has_is_refused(layout, tmp_path):
    layout.tensors[-1].name = "outptu.weight"
    layout.write(tmp_path / "odd.gguf")
    with pytest.raises(ModelError, match=r"has 1 tensors that this version has no place for in \w+ \(outptu\.weight\)"):
        open_model(tmp_path / "odd.gguf")


TYPES = [
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "Q1_0",
    "Q2_0",
    "TQ1_0",
    "TQ2_0",
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "F16",
    "BF16",
    "F32",
]


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("name", TYPES)
def test_numbers_are_told_to_be_finite_as_unpacking_tells_it(name):
    kind = type_named(name)
    _, size = BLOCK_SIZES[kind]
    random, told = np.random.default_rng(0), set()
    for _ in range(400):
        data = random.integers(0, 256, 4 * size, np.uint8)
        told.add(all_finite(data, kind))
        assert all_finite(data, kind) == np.isfinite(numbers_of_blocks(data, kind)).all()
    assert told == {True, False}


@pytest.mark.parametrize("kind", [None, "Q8_0"])
@pytest.mark.parametrize("load", [load_model, lambda path: open_model(path, device="cpu").load()])
def test_a_number_that_is_not_finite_is_refused_with_its_tensor(write_tiny_gguf, tmp_path, kind, load):
    path = write_tiny_gguf(tmp_path / "nan.gguf", kind=kind and gguf.GGMLQuantizationType[kind])
    layout = Layout.of(path)
    tensor: Tensor = next(tensor for tensor in layout.tensors if tensor.name == "blk.1.ffn_up.weight")
    tensor.data[68:72] = struct.pack("<f", math.nan) if kind is None else struct.pack("<HH", 0x7C00, 0)
    layout.write(path)
    with pytest.raises(
        ModelError, match=r"tensor 'blk\.1\.ffn_up\.weight' of '.*nan\.gguf' has numbers that are not finite"
    ):
        load(path)


def test_a_file_that_is_cut_short_while_it_is_loaded_is_an_error_and_not_the_end(tiny_gguf, tmp_path):
    path = tmp_path / "shrinking.gguf"
    path.write_bytes(tiny_gguf.read_bytes())
    opened = open_model(path, device="cpu")
    os.truncate(path, 20_000)
    with pytest.raises(ModelError, match=r"shrinking\.gguf' was changed while it was read; load it again"):
        opened.load()


def test_a_file_that_shrinks_between_two_tensors_is_an_error_and_not_the_end(tiny_gguf, tmp_path):
    path = tmp_path / "shrinking.gguf"

    def shrink(activity, done, total):
        if done:
            os.truncate(path, 20_000)

    for load in (load_model, lambda path, **kwargs: open_model(path, **kwargs).load()):
        path.write_bytes(tiny_gguf.read_bytes())
        with pytest.raises(ModelError, match=r"shrinking\.gguf' was changed while it was read; load it again"):
            load(path, device="cpu", progress=shrink)


def test_whatever_a_library_raises_over_a_file_is_an_error_of_ours(tiny_gguf, monkeypatch):
    def fail(file):
        return {}["tokens"]

    monkeypatch.setattr("hetero_kv.models.loading.tokenizer_parts", fail)
    with pytest.raises(ModelError, match=r"tiny cannot be loaded from '.*tiny\.gguf': \w+: "):
        load_model(tiny_gguf, device="cpu")


def test_a_file_without_tokens_is_refused(layout, tmp_path):
    layout.entries = [entry for entry in layout.entries if entry[0] != "tokenizer.ggml.tokens"]
    layout.write(tmp_path / "wordless.gguf")
    with pytest.raises(ModelError, match=r"wordless\.gguf' has no tokens \(tokenizer\.ggml\.tokens\)"):
        load_model(tmp_path / "wordless.gguf", device="cpu")


def test_a_type_that_this_version_cannot_read_is_said_to_be_one(layout, tmp_path):
    layout.tensors[0].kind = 43
    layout.write(tmp_path / "new.gguf")
    with pytest.raises(ModelError, match=r"new\.gguf': tensor '.+' has type 43, which this version cannot read; give"):
        GGUFFile.read(tmp_path / "new.gguf")


@pytest.mark.parametrize("none", [scalar(U32, (1 << 32) - 1), scalar(5, -1)])
def test_a_special_token_of_the_id_minus_one_is_none(layout, tmp_path, none):
    put("tokenizer.ggml.padding_token_id", none)(layout)
    layout.write(tmp_path / "unpadded.gguf")
    assert model_config(tmp_path / "unpadded.gguf").pad_token_id is None


def test_a_threshold_of_minus_infinity_is_sound(layout, tmp_path):
    put("qwen2.activation_sparsity_scale", array(F32, [1.6, -math.inf]))(layout)
    layout.write(tmp_path / "sparse.gguf")
    assert GGUFFile.read(tmp_path / "sparse.gguf").get("qwen2.activation_sparsity_scale")[1] == -math.inf
