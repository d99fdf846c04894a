"""The quality loss of products of few rows with quantized weights, whose activations are rounded to int8.

    python -m benchmarks.quantized_quality [--model NAME] [--tokens 2048] [--answers 10] [--new_tokens 24] [--json FILE]

The same GGUF file is loaded twice: packed under `dense`, and unpacked to float32 by transformers. Figures: the
perplexity of a text in steps of 32 tokens, for which every product uses the codes; the divergence of the two models'
next-token distributions; and greedy answers to short prompts, with the unpacked model's margin where they diverge.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.peers import source_tokens
from hetero_kv import HeteroCache, inject, open_model
from hetero_kv.models import DEFAULT_MODEL, load_model
from hetero_kv.weights.packed_weight import FEW_ROWS

PROMPTS = (
    "def fibonacci(n):\n",
    "The capital of France is",
    "# Sort a list of tuples by the second element\n",
    "A binary tree is",
    "import numpy as np\n\ndef softmax(x):\n",
    "Once upon a time there was a",
    "SELECT name, COUNT(*) FROM",
    "The difference between a process and a thread is",
    "class Stack:\n    def __init__(self):\n",
    "To reverse a string in Python, you can",
)


@torch.no_grad()
def stepped_logits(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits [tokens, vocab] of ids [1, tokens], in steps of few tokens."""
    parts = ids.split(FEW_ROWS, dim=1)
    return torch.cat([model(part, past_key_values=cache).logits[0].float() for part in parts])


@torch.no_grad()
def text_quality(packed: Any, unpacked: Any, ids: torch.Tensor) -> dict[str, float]:
    """Perplexities, the mean divergence in nats, and the share of equal likeliest tokens."""
    mine = stepped_logits(packed, ids, HeteroCache(packed, ids.shape[1] + 64))[:-1].log_softmax(-1)
    theirs = unpacked(ids).logits[0, :-1].log_softmax(-1)
    following = ids[0, 1:, None]
    divergence = (theirs.exp() * (theirs - mine)).sum(-1)
    return {
        "perplexity, packed": float((-mine.gather(1, following)).mean().exp()),
        "perplexity, unpacked": float((-theirs.gather(1, following)).mean().exp()),
        "divergence, nats": float(divergence.mean()),
        "same likeliest token": float((mine.argmax(-1) == theirs.argmax(-1)).float().mean()),
    }


@torch.no_grad()
def parted(packed: Any, unpacked: Any, ids: torch.Tensor, new_tokens: int) -> tuple[int, float] | None:
    """The position where greedy answers diverge, and the unpacked model's margin there in nats; None if they do not."""
    cache = HeteroCache(packed, ids.shape[1] + new_tokens + 8)
    mine = packed.generate(ids, past_key_values=cache, max_new_tokens=new_tokens, do_sample=False)
    theirs = unpacked.generate(ids, max_new_tokens=new_tokens, do_sample=False)
    shared = min(mine.shape[1], theirs.shape[1])
    different = (mine[0, :shared] != theirs[0, :shared]).nonzero()
    if not len(different):
        return None
    at = int(different[0])
    scores = unpacked(theirs[:, :at]).logits[0, -1].log_softmax(-1)
    return at - ids.shape[1], float(scores[theirs[0, at]] - scores[mine[0, at]])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--answers", type=int, default=len(PROMPTS))
    parser.add_argument("--new_tokens", type=int, default=24)
    parser.add_argument("--json", default=None)
    flags = parser.parse_args(arguments)
    opened = open_model(flags.model, dtype="float32")
    inject(opened.model, "dense", command_line={"kv_type": "FP32", "max_seq_len": flags.tokens + 64})
    packed, unpacked = opened.load(), load_model(flags.model, dtype="float32")
    text = torch.tensor([source_tokens(flags.model, flags.tokens)[: flags.tokens]])
    found = text_quality(packed.model, unpacked.model, text)
    answers = {}
    for prompt in PROMPTS[: flags.answers]:
        ids = packed.tokenizer(prompt, return_tensors="pt").input_ids
        answers[prompt] = parted(packed.model, unpacked.model, ids, flags.new_tokens)
    table = Table("", "")
    for name, value in found.items():
        table.add_row(name, f"{value:.4f}")
    for prompt, where in answers.items():
        said = "the same answer" if where is None else f"parts at token {where[0]}, margin {where[1]:.3f} nats"
        table.add_row(repr(prompt), said)
    Console().print(table)
    if flags.json:
        Path(flags.json).write_text(json.dumps({"text": found, "answers": answers}, indent=1))


if __name__ == "__main__":
    main()
