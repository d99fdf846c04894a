"""A model's files are data: their code runs only if the user trusts it."""

from __future__ import annotations

import json
import pickle
import shutil
from contextlib import suppress

import pytest
import torch
from transformers import Qwen2ForCausalLM

from hetero_kv.models import ModelError, load_model

MARK = "import pathlib; pathlib.Path({mark!r}).touch()"


@pytest.fixture
def folder(tiny_directory, tmp_path):
    """A copy of the tiny model, for a file of somebody else's."""
    return shutil.copytree(tiny_directory, tmp_path / "model")


class Running:
    """What runs a text of Python when it is unpickled."""

    def __init__(self, text):
        self.text = text

    def __reduce__(self):
        return exec, (self.text,)


@pytest.mark.parametrize("form", ["torch's archive", "torch's old file", "a pickle"])
def test_weights_that_would_run_code_are_refused_and_run_none(folder, tmp_path, form):
    mark = tmp_path / "ran"
    weights = {**Qwen2ForCausalLM.from_pretrained(folder).state_dict(), "more": Running(MARK.format(mark=str(mark)))}
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    if form == "a pickle":
        path.write_bytes(pickle.dumps(weights))
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=form == "torch's archive")
    with pytest.raises(ModelError, match=r"contains code, .* give the model's \.safetensors files"):
        load_model(str(folder))
    assert not mark.exists()
    with suppress(Exception):
        torch.load(path, weights_only=False)
    assert mark.exists(), "the file runs nothing at all"


@pytest.mark.parametrize("name", ["AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"])
def test_python_files_of_a_model_run_only_if_they_are_trusted(folder, tmp_path, name):
    mark = tmp_path / "ran"
    (folder / "foreign.py").write_text(MARK.format(mark=str(mark)))
    named = ["foreign.Theirs", None] if name == "AutoTokenizer" else "foreign.Theirs"
    for file in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / file).read_text())
        content["auto_map"] = {name: named}
        (folder / file).write_text(json.dumps(content))
    # It is loaded without them, or refused.
    with suppress(ModelError):
        load_model(str(folder))
    assert not mark.exists()
    with pytest.raises(ModelError):
        load_model(str(folder), trust_remote_code=True)
    assert mark.exists()
