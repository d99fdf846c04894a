"""A tiny model on disk whose tokens are words, so that chats are fast and answers readable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tests.chat.chat_server import ChatServer
from tests.chat.tiny_conversations import new_model
from tests.support.slow_variants import with_few

SPECIAL = ("<unknown>", "<begin>", "<end>")
WORDS = ("user", "assistant", "system", *(f"word{number}" for number in range(90)))
TEMPLATE = (
    "{% for message in messages %}<begin> {{ message.role }} {{ message.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<begin> assistant {% endif %}"
)


#: A template that has a model think, unless it is told not to.
THINKING_TEMPLATE = TEMPLATE.replace(
    "assistant {% endif %}",
    "assistant {% if enable_thinking is defined and not enable_thinking %}<think> </think> "
    "{% else %}<think> {% endif %}{% endif %}",
)
#: What the thinking model says: behind each of these words the next one.
THOUGHT = ("<think>", "hm", "well", "</think>", "yes", "indeed", "<end>")


def save_tokenizer(folder: Path, words: Sequence[str], template: str) -> dict[str, int]:
    """Write a tokenizer whose tokens are these words and the special ones; returns their numbers."""
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unknown>", bos_token="<begin>", eos_token="<end>",
        chat_template=template,
    ).save_pretrained(folder)  # fmt: skip
    return vocabulary


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers for 65,536 tokens, which never ends an answer by itself, and its tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    vocabulary = save_tokenizer(folder, WORDS, TEMPLATE)
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


@pytest.fixture(scope="session")
def thinking_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose next token the last one alone decides, as `THOUGHT` has them, and its tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "thinking"
    vocabulary = save_tokenizer(folder, ("user", "assistant", *THOUGHT[:-1]), THINKING_TEMPLATE)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    layer = model.model.layers[0]
    for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj, model.model.embed_tokens, model.lm_head):
        torch.nn.init.zeros_(matrix.weight)
    # A token's channel is its number's, and the next token reads it.
    model.model.embed_tokens.weight.data.fill_diagonal_(1)
    for word, following in pairwise(THOUGHT):
        model.lm_head.weight.data[vocabulary[following], vocabulary[word]] = 1
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chat_server() -> Iterator[ChatServer]:
    """Starts chats without their imports; some tests start theirs without it, as users do."""
    server = ChatServer()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _settings_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_KV_CONFIG", str(tmp_path / "settings.yaml"))


# What a conversation does with its model depends little on the rules.
@pytest.fixture(params=with_few([None, "ktransformers", "h2o"], quick=["ktransformers"]), scope="module")
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model of random numbers, untouched and under rules."""
    return new_model(request.param)
