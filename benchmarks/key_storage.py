"""The loss of storing a prompt's keys and values in four bits, by transform before storing.

    python -m benchmarks.key_storage FILE... [--model NAME] [--tokens 30]

Each text is a message to the model. The untouched model prefills it and answers; then the same tokens are decoded by
teacher forcing over keys and values that were stored and read back: unchanged, rotated by a Hadamard matrix along the
head's dimension, less the mean of all keys, or less that of their block. Prints next-token agreement with exact keys
and values, and the Kullback-Leibler divergence KL(exact || stored), as means over the texts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import DynamicCache

from hetero_kv.models import load_model
from hetero_kv.models.named import DEFAULT_MODEL
from hetero_kv.store.storage import Q4_0, Q8_0, StorageType

CHUNK = 1024
#: Keys or values [kv_heads, tokens, dim] float32 -> their values after storing and reading.
Stored = Callable[[torch.Tensor], torch.Tensor]


def hadamard(dim: int) -> torch.Tensor:
    """The orthonormal Hadamard matrix [dim, dim] of Sylvester; dim a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(dim)


def stored(kind: StorageType, block: int | None = None, rotated: bool = False) -> Stored:
    """Store and read: less the mean of each `block` tokens (0: of all; None: no mean), optionally rotated."""

    def through(vectors: torch.Tensor) -> torch.Tensor:
        offset = torch.zeros_like(vectors)
        if block is not None:
            parts = vectors.split(block or vectors.shape[1], dim=1)
            offset = torch.cat([part.mean(dim=1, keepdim=True).expand_as(part) for part in parts], dim=1)
        rotation = hadamard(vectors.shape[-1]) if rotated else torch.eye(vectors.shape[-1])
        return kind.decode(kind.encode((vectors - offset) @ rotation)).float() @ rotation.T + offset

    return through


def exact(vectors: torch.Tensor) -> torch.Tensor:
    """As they are."""
    return vectors


#: How keys and how values are stored.
WAYS: dict[str, tuple[Stored, Stored]] = {
    "exact": (exact, exact),
    "Q8_0": (stored(Q8_0), stored(Q8_0)),
    "Q4_0": (stored(Q4_0), stored(Q4_0)),
    "values alone in Q4_0": (exact, stored(Q4_0)),
    "keys alone in Q4_0": (stored(Q4_0), exact),
    "… rotated": (stored(Q4_0, rotated=True), exact),
    "… less the mean of all": (stored(Q4_0, 0), exact),
    "… less the mean of all, rotated": (stored(Q4_0, 0, rotated=True), exact),
    "… less the mean of their block of 128": (stored(Q4_0, 128), exact),
    "… less the mean of their block of 128, rotated": (stored(Q4_0, 128, rotated=True), exact),
    "… less the mean of their block of 32": (stored(Q4_0, 32), exact),
    "Q4_0, keys less the mean of their block of 32": (stored(Q4_0, 32), stored(Q4_0)),
}


@torch.inference_mode()
def answered(model: Any, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
    """The untouched model's next `count` tokens [1, count], and each layer's keys and values of the prompt."""
    cache = DynamicCache(config=model.config)
    for part in tokens.split(CHUNK, dim=1):
        out = model(part, past_key_values=cache, logits_to_keep=1)
    answer = [out.logits[:, -1:].argmax(-1)]
    for _ in range(count - 1):
        answer.append(model(answer[-1], past_key_values=cache).logits[:, -1:].argmax(-1))
    length = tokens.shape[1]
    layers = [(layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone()) for layer in cache.layers]
    return torch.cat(answer, dim=1), layers


@torch.inference_mode()
def forced(model: Any, answer: torch.Tensor, layers: list[tuple[torch.Tensor, ...]], way: str) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] behind each token of the answer, over keys and values stored this way."""
    cache = DynamicCache(config=model.config)
    for index, parts in enumerate(layers):
        read = (f(part[0].float())[None].to(part.dtype) for f, part in zip(WAYS[way], parts, strict=True))
        cache.update(*read, index)
    return model(answer, past_key_values=cache).logits[0].float().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", default=30, type=int, help="of the answer")
    flags = parser.parse_args()
    opened = load_model(flags.model, dtype=torch.float32)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for path in flags.texts:
        message = [{"role": "user", "content": path.read_text(encoding="utf-8")}]
        prompt = opened.tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answer, layers = answered(opened.model, prompt["input_ids"], flags.tokens)
        reference = forced(opened.model, answer, layers, "exact")
        for way in WAYS:
            actual = forced(opened.model, answer, layers, way)
            divergence = (reference.exp() * (reference - actual)).sum(-1).mean()
            agreement = (actual.argmax(-1) == reference.argmax(-1)).float().mean()
            found[way].append((float(agreement), float(divergence)))
    print("| | agreement | KL, nats |\n|---|---:|---:|")
    for way, each in found.items():
        agreement, divergence = (mean(column) for column in zip(*each, strict=True))
        print(f"| {way} | {agreement:.3f} | {divergence:.4f} |")


if __name__ == "__main__":
    main()
