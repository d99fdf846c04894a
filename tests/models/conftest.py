"""A tiny random Qwen2 model with a chat template, as a directory and as a GGUF file with the same weights."""

from __future__ import annotations

import pytest
from transformers import Qwen2ForCausalLM

from tests.support.tiny_qwen2 import tiny_qwen2, tiny_tokenizer, write_gguf


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory):
    """The tiny model in Hugging Face format."""
    directory = tmp_path_factory.mktemp("tiny")
    tiny_qwen2().save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def write_tiny_gguf(tiny_directory):
    """Write the tiny model as a GGUF file: `change(writer)` may add metadata, `without` names tensors to leave out,
    `kind` is what matrices are quantized to."""

    def write(path, change=lambda writer: None, without=(), kind=None):
        return write_gguf(path, Qwen2ForCausalLM.from_pretrained(tiny_directory), change, without, kind)

    return write


@pytest.fixture(scope="session")
def tiny_gguf(write_tiny_gguf, tmp_path_factory):
    """The tiny model as the only GGUF file of a directory."""
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")
