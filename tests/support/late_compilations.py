"""A program that prepares a tiny model under a recipe and prints, as JSON, the kernels compiled afterwards.

It needs a separate process, because compiled kernels serve all models of a process. Kernels loaded from disk count too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numba.core.dispatcher
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hetero_kv import HeteroCache, inject


def counted() -> list[str]:
    """Names of the functions that Numba makes from now on; those that are made for another, with it alone."""
    made: list[str] = []
    dispatcher: Any = numba.core.dispatcher.Dispatcher
    original, depth = dispatcher.compile, 0

    def compile_and_count(self: Any, signature: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            return original(self, signature)
        finally:
            depth -= 1
            if not depth:
                made.append(f"{self.py_func.__module__}.{self.py_func.__name__}")

    dispatcher.compile = compile_and_count
    return made


def tokens(rows: int, count: int) -> torch.Tensor:
    return torch.randint(5, 128, (rows, count), generator=torch.Generator().manual_seed(count))


def decode(model: Any, cache: HeteroCache, mask: torch.Tensor | None = None) -> None:
    """Two tokens per row."""
    for _ in range(2):
        kwargs = {}
        if mask is not None:
            mask = torch.cat([mask, torch.ones(len(mask), 1, dtype=torch.long)], dim=1)
            kwargs = {"attention_mask": mask}
        model(tokens(len(cache.lengths), 1), past_key_values=cache, **kwargs)


def uses(model: Any) -> dict[str, Callable[[], None]]:
    """What people do with a model, one thing after the other."""
    one, two, ragged = (HeteroCache(model, 1024, forks=forks) for forks in (1, 0, 0))
    mask = torch.ones(2, 320, dtype=torch.long)
    mask[0, :50] = 0

    def fork() -> None:
        other = one.fork()
        model(tokens(1, 4), past_key_values=other)
        decode(model, other)

    def turns(cache: HeteroCache, rows: int) -> None:
        for count in (2, 9, 150):
            model(tokens(rows, count), past_key_values=cache)

    return {
        "prompt": lambda: model(tokens(1, 500), past_key_values=one),
        "decode": lambda: decode(model, one),
        "turns": lambda: turns(one, 1),
        "decode behind them": lambda: decode(model, one),
        "fork": fork,
        "batch of 2": lambda: model(tokens(2, 300), past_key_values=two),
        "decode of a batch": lambda: decode(model, two),
        "turns of a batch": lambda: turns(two, 2),
        "ragged rows": lambda: model(tokens(2, 320), attention_mask=mask, past_key_values=ragged),
        "decode of ragged rows": lambda: decode(model, ragged, mask),
        "generate": lambda: model.generate(
            tokens(1, 100), past_key_values=HeteroCache(model, 256), max_new_tokens=3, do_sample=False
        ),
    }


def main(recipe: str, dtype: str) -> None:
    """Print use -> kernels that it had made."""
    made = counted()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(getattr(torch, dtype))
    # Quantized, so that tokens take the native way, as a GGUF file's do.
    inject(model, recipe, command_line={"max_seq_len": 1024, "chunk_size": 128, "weights": "q8_0", "threads_num": 1})
    model.hetero_kv_injection.compile_kernels()
    found = {"before": list(made)}
    with torch.no_grad():
        for use, call in uses(model).items():
            made.clear()
            call()
            found[use] = list(made)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
