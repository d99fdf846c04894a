"""The meaning of a model's name, and the error for an unknown one."""

from __future__ import annotations

import os

import huggingface_hub
import pytest

from hetero_kv.models import DEFAULT_MODEL, NAMED_MODELS, ModelError
from hetero_kv.models.locating import Location, locate


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}"
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))


def test_the_table_has_the_default_model_and_every_entry_is_complete():
    assert DEFAULT_MODEL in NAMED_MODELS
    for name, model in NAMED_MODELS.items():
        assert model.name == name
        assert model.licence
        assert model.context_length > 0
        assert model.files[0].name.endswith(".gguf")
        assert all(len(file.sha256) == 64 and file.size > 0 and file.sources for file in model.files)


def test_a_directory_is_itself(tiny_directory):
    assert locate(tiny_directory, None, None) == Location(tiny_directory.name, str(tiny_directory), None)


def test_a_gguf_file_brings_everything(tiny_gguf):
    assert locate(tiny_gguf, None, None) == Location("tiny", None, tiny_gguf)


def test_weights_may_come_from_a_gguf_file_or_the_folder_of_it(tiny_directory, tiny_gguf):
    expected = Location(tiny_directory.name, str(tiny_directory), tiny_gguf)
    assert locate(tiny_directory, tiny_gguf, None) == expected
    assert locate(tiny_directory, tiny_gguf.parent, None) == expected


@pytest.mark.parametrize(("count", "listed"), [(0, ""), (2, r" \(0\.gguf, 1\.gguf\)")])
def test_a_folder_of_weights_must_have_exactly_one_file(tiny_directory, tmp_path, count, listed):
    for number in range(count):
        (tmp_path / f"{number}.gguf").touch()
    with pytest.raises(ModelError, match=f"has {count} .gguf files{listed}; it must have exactly one"):
        locate(tiny_directory, tmp_path, None)


@pytest.mark.parametrize("name", [DEFAULT_MODEL, "some.gguf"])
def test_a_model_with_its_own_weights_takes_no_others(name):
    with pytest.raises(ModelError, match=f"'{name}' includes weights, and gguf_path is 'x.gguf' as well"):
        locate(name, "x.gguf", None)


def test_a_misspelt_name_is_answered_with_the_nearest():
    with pytest.raises(ModelError, match=r"no model is called 'smolm2-135m-instruct'; did you mean 'smollm2-135m-ins"):
        locate("smolm2-135m-instruct", None, None)


def test_a_name_that_is_like_no_other_is_answered_with_all():
    with pytest.raises(ModelError, match=rf"no model is called 'zzz'; give one of {DEFAULT_MODEL}, "):
        locate("zzz", None, None)


def test_a_directory_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json, .*; give a model's directory"):
        locate(tmp_path, None, None)
    (tmp_path / "w.gguf").touch()
    with pytest.raises(ModelError, match=r"has no config\.json, .*; give one of its GGUF files: w\.gguf"):
        locate(tmp_path, None, None)


@pytest.mark.parametrize("name", ["./absent", "/absent/model", "~/absent-model", "a/b/c"])
def test_a_path_to_nothing_is_refused(name):
    with pytest.raises(ModelError, match=f"there is no directory or file '{name}'"):
        locate(name, None, None)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"model\.bin' is neither a directory nor a GGUF file"):
        locate(tmp_path / "model.bin", None, None)


def test_a_hub_id_that_cannot_be_reached_is_refused_with_what_else_there_is(no_hub):
    with pytest.raises(ModelError, match=f"no directory 'some/model', .*the hub cannot be reached.*{DEFAULT_MODEL}"):
        locate("some/model", None, None)


def test_a_hub_id_in_the_hub_cache_serves_without_a_hub(no_hub, tmp_path):
    snapshot = tmp_path / "models--some--model" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0")
    assert locate("some/model", None, None) == Location("some/model", "some/model", None, offline=True)


def test_a_gguf_file_without_an_ending_is_one_by_its_first_bytes(tiny_gguf, tmp_path):
    blob = tmp_path / "sha256-0123456789abcdef"
    blob.symlink_to(tiny_gguf)
    assert locate(blob, None, None) == Location(blob.name, None, blob)
    with pytest.raises(ModelError, match="includes weights, and gguf_path"):
        locate(blob, "x.gguf", None)


def test_a_file_without_an_ending_that_is_no_gguf_file_is_refused(tmp_path):
    (tmp_path / "sha256-0").write_bytes(b"GGU")
    with pytest.raises(ModelError, match="is neither a directory nor a GGUF file"):
        locate(tmp_path / "sha256-0", None, None)


@pytest.mark.parametrize("ending", ["", ".gguf"])
def test_a_pipe_is_no_model(tiny_directory, tmp_path, ending):
    os.mkfifo(pipe := tmp_path / f"pipe{ending}")
    for names in ((pipe, None), (tiny_directory, pipe)):
        with pytest.raises(ModelError, match="is a pipe or a device"):
            locate(*names, None)
    with pytest.raises(ModelError, match="is a pipe or a device"):
        locate("/dev/null", None, None)
