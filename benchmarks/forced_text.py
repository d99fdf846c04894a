"""Teacher forcing of a text under each recipe: divergence from full attention, likelihood and entropy.

    python -m benchmarks.forced_text --haystack $ESSAYS [--model NAME] [--length 4096] [--fed 96] [--samples 8]
                                     [--recipes adaptive,quest,...] [--fractions 16] [--shipped adaptive] [--threads N]

Perplexity alone does not show how near a recipe is to full attention: an imperfect model may predict a text as well
from other attention. So there are three figures for the same tokens, in nats: the divergence of the next token's
distribution from that under `dense`, the increase of the negative log-likelihood, and the increase of the entropy; a
negative one means more certainty than full attention has.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from benchmarks.budgeted_recipes import RecipeBudget, cells
from hetero_kv.evals import ConfiguredModel, config_specs
from hetero_kv.evals.bootstrap import mean_interval
from hetero_kv.evals.haystack import Haystack
from hetero_kv.evals.packed_model import load_packed
from hetero_kv.evals.prompt import Prompt
from hetero_kv.models import DEFAULT_MODEL

DENSE = "dense:top_k_blocks=all"


class Figures(NamedTuple):
    """Means over a text's fed tokens, nats: from full attention, above its likelihood, above its entropy."""

    divergence: float
    likelihood: float
    entropy: float


@torch.no_grad()
def log_probabilities(model: ConfiguredModel, method: str, tokens: Sequence[int], fed: int) -> torch.Tensor:
    """The distribution before each of the last `fed` tokens, [fed, vocab] float32; all but the first by decoding."""
    start = len(tokens) - fed
    with model.prefilled(method, Prompt(tuple(tokens[:start]), len(tokens))) as ready:
        logits = [ready.logits.reshape(-1, ready.logits.shape[-1])[-1]]
        for token in tokens[start:-1]:
            ids = torch.tensor([[token]], device=ready.model.device)
            logits.append(ready.model(input_ids=ids, past_key_values=ready.cache, use_cache=True).logits[0, -1])
    return torch.stack(logits).float().log_softmax(-1)


def compared(model: ConfiguredModel, methods: Sequence[str], tokens: Sequence[int], fed: int) -> Iterator[Figures]:
    """The figures of each of `methods` on the last `fed` of `tokens`, compared with `DENSE`, a method of the model."""
    full, rows = log_probabilities(model, DENSE, tokens, fed), torch.arange(fed)
    following = torch.tensor(list(tokens[-fed:]))
    for method in methods:
        own = log_probabilities(model, method, tokens, fed)
        yield Figures(
            float((full.exp() * (full - own)).sum(-1).mean()),
            float((full - own)[rows, following].mean()),
            float(((full.exp() * full).sum(-1) - (own.exp() * own).sum(-1)).mean()),
        )


def table(named: Sequence[tuple[RecipeBudget, str]], found: dict[str, list[Figures]]) -> str:
    """Means, and intervals by bootstrap over texts, in Markdown."""
    lines = ["| recipe | tokens | divergence | likelihood | entropy |", "|---|---:|---:|---:|---:|"]
    for cell, name in named:
        budget = f"1/{cell.fraction}" if isinstance(cell.fraction, int) else cell.fraction
        figures = [_interval(values) for values in zip(*found[name], strict=True)]
        lines.append(f"| {cell.recipe} | {budget} | {' | '.join(figures)} |")
    return "\n".join(lines)


def _interval(values: Sequence[float]) -> str:
    low, high = mean_interval(values)
    return f"{fmean(values):.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """Compare, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--haystack", type=Path, required=True, help="essays: text, or JSON with a 'text' field")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a text")
    parser.add_argument("--fed", type=int, default=96, help="of these, how many are decoded one by one")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--recipes", default="adaptive,quest,infllm,shadowkv")
    parser.add_argument("--fractions", default="16")
    parser.add_argument("--shipped", default="adaptive")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    flags = parser.parse_args()
    recipes, shipped = flags.recipes.split(","), tuple(filter(None, flags.shipped.split(",")))
    fractions = tuple(map(int, flags.fractions.split(",")))
    chosen = [cell for cell in cells(flags.length, fractions, shipped) if cell.recipe in recipes]
    specs = config_specs([DENSE, *(cell.spec for cell in chosen)])
    named = list(zip(chosen, [spec.name for spec in specs[1:]], strict=True))
    loaded = load_packed(flags.model, threads_num=flags.threads)
    model = ConfiguredModel(
        loaded,
        specs,
        baseline=False,
        share_baseline=True,
        measure_recall=False,
        settings={"threads_num": flags.threads},
    )
    ids: Any = loaded.tokenizer(Haystack.from_file(flags.haystack).text, add_special_tokens=False)["input_ids"]
    found: dict[str, list[Figures]] = {name: [] for _, name in named}
    for sample in range(flags.samples):
        start = random.Random(sample).randrange(len(ids) - flags.length + 1)
        tokens = ids[start : start + flags.length]
        for name, figures in zip(found, compared(model, list(found), tokens, flags.fed), strict=True):
            found[name].append(figures)
        print(f"\n{sample + 1} texts of {flags.length:,} tokens\n\n{table(named, found)}", flush=True)


if __name__ == "__main__":
    main()
