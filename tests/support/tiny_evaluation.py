"""A tiny random byte-level model that runs every task quickly, and a task of two turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hetero_kv.evals.sample import Sample, Score
from hetero_kv.evals.tasks.registry import Task, TaskRequest, register
from hetero_kv.models.loading import LoadedModel
from tests.support.tiny_models import tiny_model

WINDOW = 2048
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

#: Settings with which 2 blocks of 8 tokens are chosen from a prompt of a few hundred.
SPARSE = {"block_size": 8, "sink_tokens": 8, "local_windows_len": 16, "top_k_blocks": 2, "kv_type": "FP32"}
#: Full attention through the engine.
DENSE = {**SPARSE, "top_k_blocks": "all"}


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    bytes_ = Tokenizer(models.BPE({token: i for i, token in enumerate((*SPECIAL, *ALPHABET))}, []))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    bytes_.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_, eos_token=SPECIAL[0], pad_token=SPECIAL[0], chat_template=template
    )


def tiny_loaded(**overrides: object) -> LoadedModel:
    """A random Llama of three layers, made for `WINDOW` tokens, which ends no answer of a few tokens by itself."""
    vocabulary = {"vocab_size": len(SPECIAL) + len(ALPHABET), "pad_token_id": 0, "eos_token_id": 0}
    model = tiny_model("llama", max_position_embeddings=WINDOW, **{**vocabulary, **overrides})
    return LoadedModel(model, byte_tokenizer(), "tiny", WINDOW)


def save_tiny(folder: Path) -> Path:
    loaded = tiny_loaded()
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


class Recite(Task):
    """Asks for a word that stands in the question, in two turns; scored by the share of turns that say it."""

    name = "recite"
    meaning = "a word that stands in the question"
    uses_depth = True

    def generate(self, request: TaskRequest) -> Iterator[Sample]:
        for length in request.lengths:
            for depth in request.depths:
                for number in range(request.samples):
                    word = f"w{request.seed}-{length}-{depth:g}-{number}"
                    text = word.rjust(length // 2, ".").ljust(length - 10, ".")
                    name = f"{self.name}/{length}/{depth:g}/{number}"
                    yield Sample(name, self.name, (text, "Again?"), ((word,), (word,)), length, depth, 6)

    def score(self, sample: Sample, predictions: Sequence[str]) -> Score:
        turns = [float(word in text) for text, (word,) in zip(predictions, sample.answers, strict=True)]
        return Score(sum(turns) / len(turns), {"first": turns[0], "last": turns[-1]})


register(Recite())
