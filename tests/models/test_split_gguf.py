"""A GGUF model that is split into several files, as llama.cpp's `gguf-split` writes them."""

from __future__ import annotations

import hashlib

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType

from hetero_kv import inject, load_model, open_model
from hetero_kv.models import ModelError, ModelFile, NamedModel, named
from hetero_kv.models.gguf.file import GGUFFile
from hetero_kv.models.gguf.tensor_reader import numbers_of, tensor_data
from hetero_kv.models.locating import locate
from hetero_kv.models.sources import HubSource
from tests.support.file_server import FileServer, use_hub
from tests.support.gguf_models.container import Layout, scalar
from tests.support.gguf_models.splitting import part_names, split

IDS = torch.tensor([[5, 9, 77, 31, 200, 8]])


@pytest.fixture(scope="module")
def whole(write_tiny_gguf, tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("whole") / "whole.gguf", kind=GGMLQuantizationType.Q8_0)


@pytest.fixture
def parts(whole, tmp_path):
    """Paths of three parts."""
    return split(whole, tmp_path, "tiny", 3)


def change(path, key, value):
    layout = Layout.of(path)
    layout.entries = [entry for entry in layout.entries if entry[0] != key] + [(key, value)]
    layout.write(path)


def test_any_part_stands_for_all(whole, parts):
    one = GGUFFile.read(whole)
    for path in parts:
        file = GGUFFile.read(path)
        assert file.tensor_names == one.tensor_names
        assert {key: file.get(key) for key in file.metadata if not key.startswith("split.")} == {
            key: one.get(key) for key in one.metadata
        }
        assert [numbers_of(file, info.name) for info in file.tensors] == [
            numbers_of(one, info.name) for info in file.tensors
        ]
        assert locate(path, None, None).name == "tiny"


def test_a_model_in_parts_computes_what_it_does_in_one_file(whole, parts):
    with torch.inference_mode():
        expected = load_model(whole, dtype="float32").model(IDS).logits
        assert torch.equal(load_model(parts[1], dtype="float32").model(IDS).logits, expected)
        answers = []
        for path in (whole, parts[2]):
            opened = open_model(path, dtype="float32", device="cpu")
            inject(opened.model, "dense", command_line={"max_seq_len": 64, "kv_type": "FP32"})
            answers.append(opened.load().model(IDS).logits)
    assert torch.equal(*answers)


def test_a_first_part_may_have_no_tensors(whole, tmp_path):
    paths = split(whole, tmp_path, "tiny", 2, empty_first=True)
    assert GGUFFile.read(paths[0]).tensor_names == GGUFFile.read(whole).tensor_names


def test_a_missing_part_is_named(parts):
    parts[1].unlink()
    for path in (parts[0], parts[2]):
        with pytest.raises(ModelError, match=r"1 of them are not beside it \(tiny-00002-of-00003\.gguf\); download"):
            GGUFFile.read(path)


def test_a_renamed_part_is_refused_with_its_number(parts, tmp_path):
    path = parts[2].rename(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"other\.gguf' is part 3 of the 3 parts.*ends in -00003-of-00003\.gguf"):
        GGUFFile.read(path)


def test_a_part_under_the_name_of_another_is_refused(parts):
    parts[0].write_bytes(parts[1].read_bytes())
    with pytest.raises(ModelError, match=r"00001-of-00003\.gguf' is part 2 of 3 parts by its metadata, which its name"):
        GGUFFile.read(parts[0])
    with pytest.raises(ModelError, match=r"00001-of-00003\.gguf' is not part 1 of 3 by its metadata \(split\.no 1"):
        GGUFFile.read(parts[2])


def test_a_part_with_other_metadata_is_of_another_model(parts):
    change(parts[1], "qwen2.block_count", scalar(4, 7))
    with pytest.raises(ModelError, match=r"parts of different models: qwen2\.block_count is 7 and 2"):
        GGUFFile.read(parts[0])


def test_fewer_tensors_than_stated_are_refused(parts):
    layout = Layout.of(parts[2])
    layout.tensors.pop()
    layout.write(parts[2])
    with pytest.raises(ModelError, match=r"its parts have 26 tensors, and split\.tensors\.count is 27"):
        GGUFFile.read(parts[0])


def test_a_tensor_in_two_parts_is_refused(parts):
    layout, other = Layout.of(parts[2]), Layout.of(parts[1])
    layout.tensors[0].name = other.tensors[0].name
    layout.write(parts[2])
    with pytest.raises(ModelError, match=r"two of its parts have the tensor"):
        GGUFFile.read(parts[0])


def test_a_part_that_changes_is_named(parts):
    file = GGUFFile.read(parts[0])
    parts[1].write_bytes(parts[1].read_bytes() + bytes(32))
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf' was changed"):
        list(tensor_data(file))


def test_a_folder_with_the_parts_and_the_encoder_of_one_model_is_that_model(parts, tmp_path, tiny_directory, caplog):
    (tmp_path / "mmproj-tiny-f16.gguf").write_bytes(b"GGUF")
    assert locate(tiny_directory, tmp_path, None).gguf == parts[0]
    assert load_model(parts[0]).name == "tiny"
    assert "the encoder of images or sounds beside it is left out: mmproj-tiny-f16.gguf" in caplog.text


def test_a_named_model_may_be_in_parts(parts, monkeypatch, tmp_path):
    server, files = FileServer(), []
    use_hub(monkeypatch, server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HETERO_KV_HOME", str(tmp_path / "home"))
    for path in parts:
        content = path.read_bytes()
        server.files[f"/some/tiny/resolve/main/{path.name}"] = content
        digest = hashlib.sha256(content).hexdigest()
        files.append(ModelFile(path.name, len(content), digest, (HubSource("some/tiny", path.name),)))
    monkeypatch.setitem(named.NAMED_MODELS, "tiny", NamedModel("tiny", "a test", "MIT", 512, tuple(files)))
    location = locate("tiny", None, None)
    assert sorted(path.name for path in location.gguf.parent.glob("*.gguf")) == part_names("tiny", 3)
    assert load_model("tiny").name == "tiny"
    server.close()


def test_an_encoder_is_no_model(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "mmproj-tiny.gguf", "clip")
    writer.add_type("mmproj")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"general\.type 'mmproj' \(the encoder of images or sounds beside a model\)"):
        load_model(tmp_path / "mmproj-tiny.gguf")


def test_parts_whose_names_are_in_capitals_are_found(parts, tmp_path):
    upper = [part.rename(tmp_path / part.name.upper()) for part in parts]
    assert len(GGUFFile.read(upper[-1]).parts) == len(parts)
