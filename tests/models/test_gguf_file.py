"""The header of a GGUF file, intact and damaged."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from hetero_kv.models import ModelError
from hetero_kv.models.gguf.file import GGUFFile


def test_metadata_and_tensors_are_those_that_the_gguf_library_reads(tiny_gguf):
    file, reference = GGUFFile.read(tiny_gguf), gguf.GGUFReader(tiny_gguf)
    theirs = {key: field.contents() for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    ours = {key: file.get(key) for key in file.metadata}
    assert {key: list(value) if isinstance(value, tuple) else value for key, value in ours.items()} == theirs
    assert [(t.name, t.shape, t.offset, t.nbytes) for t in file.tensors] == [
        (t.name, tuple(reversed(t.shape.tolist())), t.data_offset, t.n_bytes) for t in reference.tensors
    ]
    assert file.architecture == "qwen2"


def test_a_quantized_tensor_is_as_long_as_its_blocks(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    blocks = gguf.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tensor,) = GGUFFile.read(tmp_path / "q.gguf").tensors
    assert tensor.shape == (4, 64)
    assert tensor.nbytes == blocks.nbytes == 4 * 2 * 34


def test_a_file_cut_at_any_length_is_refused(tiny_gguf, tmp_path):
    whole, cut = tiny_gguf.read_bytes(), tmp_path / "cut.gguf"
    for length in [*range(0, 400), *range(400, len(whole), 997), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GGUFFile.read(cut)


def test_a_file_cut_inside_its_tensors_is_said_to_be_cut_short(tiny_gguf, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_gguf.read_bytes()[:-64])
    with pytest.raises(ModelError, match=r"cut short: its tensors end at byte [\d,]+ and it has [\d,]+; download"):
        GGUFFile.read(cut)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<!DOCTYPE html>", "does not begin with the letters GGUF"),
        (b"GGUF\x63\x00\x00\x00", "GGUF version 99; versions 2 and 3"),
        (b"GGUF\x00\x00\x00\x03", "big-endian"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, "damaged or cut short"),
    ],
)
def test_a_file_that_is_no_usable_gguf_is_refused_with_the_reason(tmp_path, content, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        GGUFFile.read(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"there is no GGUF file '.*absent\.gguf'"):
        GGUFFile.read(tmp_path / "absent.gguf")
