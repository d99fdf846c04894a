"""The estimated and the true share of the attention that chosen blocks cover, layer by layer.

    python -m benchmarks.estimated_mass FILE [FILE ...] [--configs adaptive,adaptive:rerank=1] [--max_new_tokens 32]

Each file is a question. Each method decodes the untouched model's greedy continuation by teacher forcing; both shares
are means over steps, heads and files. The method's estimate is from representatives, coarse scores and the attended
blocks; the true share needs full attention.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from hetero_kv import eject, inject
from hetero_kv.evals.config_spec import config_specs, config_words
from hetero_kv.evals.packed_model import load_packed
from hetero_kv.evals.shared_prefill import record_prefill
from hetero_kv.evals.teacher_forcing import force, full_attention_continuation
from hetero_kv.models import DEFAULT_MODEL
from hetero_kv.models.turns import TurnTokens

NAMES = ("estimated_share", "block_recall")


def shares(model: Any, prefill: Any, spec: Any, continuation: Any) -> list[tuple[float, float]]:
    """(estimated, true) share of every layer that chooses blocks."""
    inject(model, spec.rules, command_line={**spec.settings, "measure_recall": True})
    try:
        cache = prefill.cache_for(model)
        force(model, cache, continuation)
        counted = [layer.statistics for layer in cache.layers]
        return [(of[NAMES[0]], of[NAMES[1]]) for of in counted if None not in (of.get(NAMES[0]), of.get(NAMES[1]))]
    finally:
        eject(model)


def main() -> None:
    """Print a line per layer, or with --json the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--configs", default="adaptive")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--max_new_tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    specs = config_specs(config_words(flags.configs))
    loaded = load_packed(flags.model, threads_num=flags.threads)
    turns = TurnTokens(loaded.tokenizer)
    found: dict[str, list[list[tuple[float, float]]]] = {spec.name: [] for spec in specs}
    for file in flags.files:
        ids = torch.tensor([turns.first(file.read_text())])
        prefill = record_prefill(loaded.model, ids, max_seq_len=ids.shape[1] + flags.max_new_tokens)
        continuation = full_attention_continuation(loaded.model, prefill, flags.max_new_tokens)
        for spec in specs:
            found[spec.name].append(shares(loaded.model, prefill, spec, continuation))
    means = {
        name: [tuple(map(fmean, zip(*of_layer, strict=True))) for of_layer in zip(*of_files, strict=True)]
        for name, of_files in found.items()
    }
    if flags.json:
        print(json.dumps(means))
        return
    for name, layers in means.items():
        print(f"{name}\nlayer  estimated  true  difference")
        for index, (estimated, true) in enumerate(layers):
            print(f"{index:5}  {estimated:9.3f}  {true:.3f}  {estimated - true:+.3f}")
        errors = [estimated - true for estimated, true in layers]
        print(
            f" mean  {fmean(e for e, _ in layers):9.3f}  {fmean(t for _, t in layers):.3f}  {fmean(errors):+.3f}; ",
            end="",
        )
        print(f"largest difference {max(errors, key=abs):+.3f}")


if __name__ == "__main__":
    main()
