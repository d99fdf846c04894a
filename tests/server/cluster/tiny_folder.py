"""A tiny model in a folder, as replicas load it."""

from __future__ import annotations

from pathlib import Path

from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizers import byte_level

#: The longest request, tokens.
CAPACITY = 2048


def tiny_folder(folder: Path) -> Path:
    """The folder, with a model whose tokens are bytes."""
    tokenizer = byte_level(add_prefix_space=False)
    # As many logits as a saved tokenizer may come to have tokens.
    model = tiny_model("qwen2", vocab_size=288, max_position_embeddings=CAPACITY)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
