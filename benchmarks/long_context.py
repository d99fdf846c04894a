"""Prefill and decode of a real model with and without the engine, in one run.

    python -m benchmarks.long_context [--model smollm2-135m-instruct] [--lengths 1000,7500] [--repeats 3]

Prefill: tokens/s of the engine against the untouched model fed in chunks of the same size.
Decode: time per token after each length, as a ratio to the first length.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from benchmarks.timing import interleaved_medians, seconds
from hetero_kv import HeteroCache, eject, inject
from hetero_kv.models import load_model

CHUNK = 512
DECODED = 16
#: name -> settings on top of injection_rules/ktransformers.yaml; None is the untouched model.
VARIANTS: dict[str, dict[str, Any] | None] = {
    "untouched": None,
    "hetero-kv, everything attended": {"top_k_blocks": "all"},
    "hetero-kv, 8 blocks of 128 + 512": {"top_k_blocks": 8, "local_windows_len": 512},
}


class VariantRun:
    """One variant of the model with a context of one length; `decode` may be timed again and again."""

    def __init__(self, model: Any, variant: str, context: torch.Tensor) -> None:
        self.model, self.settings, self.context = model, VARIANTS[variant], context

    def prefill(self) -> float:
        """Tokens per second of a prefill from nothing."""
        with self._model() as cache:
            if self.settings is not None:
                took = seconds(lambda: self.model(self.context, past_key_values=cache, logits_to_keep=1))
            else:
                took = seconds(lambda: self._chunked(cache))
        self.cache = cache
        self.after_context = cache.snapshot() if self.settings is not None else None
        return self.context.shape[1] / took

    def decode(self) -> float:
        """Seconds per token of DECODED tokens after the context; the cache goes back to the context afterwards."""
        with self._model(), torch.no_grad():
            token = self.context[:, -1:]
            self.model(token, past_key_values=self.cache)
            took = seconds(lambda: [self.model(token, past_key_values=self.cache) for _ in range(DECODED)])
        if self.after_context is None:
            self.cache.crop(-(DECODED + 1))
        else:
            self.cache.rollback(self.after_context)
        return took / DECODED

    def _chunked(self, cache: DynamicCache) -> None:
        for chunk in self.context.split(CHUNK, dim=1):
            self.model(chunk, past_key_values=cache, logits_to_keep=1)

    def _model(self) -> Any:
        return _Injected(self.model, self.settings)


class _Injected:
    """The model with a variant's rules injected, for the length of a `with` block; yields a new cache."""

    def __init__(self, model: Any, settings: dict[str, Any] | None) -> None:
        self.model, self.settings = model, settings

    def __enter__(self) -> Any:
        self._grad = torch.no_grad()
        self._grad.__enter__()
        if self.settings is None:
            return DynamicCache(config=self.model.config)
        inject(self.model, "ktransformers", command_line={"chunk_size": CHUNK, **self.settings})
        return HeteroCache(self.model)

    def __exit__(self, *error: object) -> None:
        if self.settings is not None:
            eject(self.model)
        self._grad.__exit__(*error)


def measure(model_name: str, lengths: list[int], repeats: int) -> dict[str, Any]:
    """Tokens/s of prefill and milliseconds per decoded token, by variant and length."""
    model = load_model(model_name, dtype="float32").model
    torch.manual_seed(0)
    runs = {
        (variant, length): VariantRun(model, variant, torch.randint(100, 20_000, (1, length)))
        for variant in VARIANTS
        for length in lengths
    }
    prefill = interleaved_medians({str(key): run.prefill for key, run in runs.items()}, repeats=max(1, repeats // 2))
    for run in runs.values():
        run.decode()
    decode = interleaved_medians({str(key): run.decode for key, run in runs.items()}, repeats)
    return {
        "model": model_name,
        "lengths": lengths,
        "prefill_tokens_per_s": {v: [prefill[str((v, n))] for n in lengths] for v in VARIANTS},
        "decode_ms": {v: [decode[str((v, n))] * 1e3 for n in lengths] for v in VARIANTS},
    }


def main() -> None:
    """Print the table, or with --json the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--lengths", default="1000,7500", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--repeats", default=5, type=int)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments.model, arguments.lengths, arguments.repeats)
    if arguments.json:
        print(json.dumps(result))
        return
    table = Table(title=f"{result['model']}, fp32, chunks of {CHUNK}, medians of interleaved repeats")
    table.add_column("variant")
    for length in result["lengths"]:
        table.add_column(f"prefill {length}\ntokens/s", justify="right")
        table.add_column("/ untouched", justify="right")
        table.add_column(f"decode {length}\nms/token", justify="right")
    table.add_column("decode last / first", justify="right")
    for variant in VARIANTS:
        prefill, decode = result["prefill_tokens_per_s"][variant], result["decode_ms"][variant]
        cells = []
        for i in range(len(result["lengths"])):
            ratio = prefill[i] / result["prefill_tokens_per_s"]["untouched"][i]
            cells += [f"{prefill[i]:.0f}", f"{ratio:.2f}", f"{decode[i]:.1f}"]
        table.add_row(variant, *cells, f"{decode[-1] / decode[0]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
