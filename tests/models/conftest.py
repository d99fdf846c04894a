"""A tiny random Qwen2 model with a chat template, as a directory and as a GGUF file with the same weights."""

from __future__ import annotations

import gguf
import pytest
import torch
from tiny_qwen2 import CHAT_TEMPLATE, END_OF_TEXT, GGUF_NAMES, SPECIAL_TOKENS, TOKENS, tiny_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory):
    """The tiny model in Hugging Face format."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT,
    )
    directory = tmp_path_factory.mktemp("tiny")
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def write_tiny_gguf(tiny_directory):
    """Write the tiny model as a GGUF file: `change(writer)` may add metadata, `without` names tensors to leave out,
    `kind` is what matrices are quantised to."""

    def write(path, change=lambda writer: None, without=(), kind=None):
        model = Qwen2ForCausalLM.from_pretrained(tiny_directory)
        writer = gguf.GGUFWriter(path, "qwen2")
        writer.add_context_length(512)
        writer.add_embedding_length(32)
        writer.add_block_count(2)
        writer.add_feed_forward_length(64)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(TOKENS)
        writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in TOKENS])
        writer.add_token_merges(["h e"])
        writer.add_eos_token_id(END_OF_TEXT)
        writer.add_chat_template(CHAT_TEMPLATE)
        change(writer)
        for name, tensor in model.state_dict().items():
            for theirs, ours in GGUF_NAMES.items():
                name = name.replace(theirs, ours)
            if name in without:
                continue
            if kind is None or tensor.dim() == 1:
                writer.add_tensor(name, tensor.numpy())
            else:
                writer.add_tensor(name, gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(scope="session")
def tiny_gguf(write_tiny_gguf, tmp_path_factory):
    """The tiny model as a GGUF file in a directory of its own."""
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")
