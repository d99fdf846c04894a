"""A tiny model on disk whose tokens are words, so that whole chats take moments and answers are readable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<unknown>", "<begin>", "<end>")
WORDS = ("user", "assistant", "system", *(f"word{number}" for number in range(90)))
TEMPLATE = (
    "{% for message in messages %}<begin> {{ message.role }} {{ message.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<begin> assistant {% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers for 65,536 tokens, which never ends an answer by itself, and its tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unknown>",
        bos_token="<begin>",
        eos_token="<end>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=65_536,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    # A special token's logit is always 0, and some word's is always more.
    model.lm_head.weight.data[: len(SPECIAL)] = 0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _settings_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_KV_CONFIG", str(tmp_path / "settings.yaml"))
