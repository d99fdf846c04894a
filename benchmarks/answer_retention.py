"""The tokens of a passkey's digits that fixed-memory methods still keep after the question.

    python -m benchmarks.answer_retention [--length 8k] [--depth 90] [--config cascade:budget=2048,tova:budget=2048]

The passkey task has two consecutive mentions of the key. Printed per method: the share of the digits' tokens that are
kept, as a mean over layers and kv heads, for all tokens and for each one in order; and the share of kv heads that keep
all digits of one mention. The tokenizer must make a token of each digit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals import ConfiguredModel, config_specs
from hetero_kv.evals.options import parse_length
from hetero_kv.evals.tasks import registry
from hetero_kv.models import DEFAULT_MODEL, load_model


def mention_positions(tokens: Sequence[int], digits: Sequence[int]) -> torch.Tensor:
    """Positions of every mention of the key in a prompt, [mentions, digits] int64."""
    count = len(digits)
    starts = [start for start in range(len(tokens) - count + 1) if list(tokens[start : start + count]) == list(digits)]
    return torch.tensor(starts)[:, None] + torch.arange(count)


def retained(positions: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
    """Whether each kv head keeps each digit: [kv_heads, mentions, digits] bool.

    Args:
        positions: positions of a layer's entries, [kv_heads, entries].
        digits: [mentions, digits], from `mention_positions`.
    """
    return torch.stack([torch.isin(digits, of_head) for of_head in positions])


def main() -> None:
    """Print a line per method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--config", default="cascade:budget=2048,tova:budget=2048")
    parser.add_argument("--length", default="8k", type=parse_length)
    parser.add_argument("--depth", default=90.0, type=float)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--threads", default=None, type=int)
    flags = parser.parse_args()
    if flags.threads:
        torch.set_num_threads(flags.threads)
    methods = flags.config.split(",")
    loaded = load_model(flags.model)
    try:
        model = ConfiguredModel(loaded, config_specs(methods), baseline=False)
    except HeteroKVError as error:
        sys.exit(f"error: {error}")

    def encoded(text: str) -> list[int]:
        return loaded.tokenizer.encode(text, add_special_tokens=False)

    request = registry.TaskRequest(
        lengths=(flags.length,),
        depths=(flags.depth,),
        samples=1,
        seed=flags.seed,
        haystack=None,
        count_tokens=lambda text: len(encoded(text)),
        template_tokens=model.template_tokens,
    )
    sample = next(iter(registry.get("passkey").generate(request)))
    prompt, key = model.prompt(sample), sample.answers[0][0]
    digits = mention_positions(prompt.tokens, [token for digit in key for token in encoded(digit)])
    if not len(digits):
        sys.exit(f"error: {flags.model} does not make a token of each digit of {key}")
    print(f"key {key}, mentions at {digits[:, 0].tolist()} of {len(prompt.tokens)} tokens")
    for method in methods:
        with model.prefilled(method, prompt) as ready:
            layers = [layer.entries.positions[0] for layer in ready.cache.strided_layers]
            found = torch.cat([retained(positions, digits) for positions in layers])
        each = ", ".join(f"{share:.2f}" for share in found.float().mean(0).flatten().tolist())
        whole, share = float(found.all(-1).any(-1).float().mean()), float(found.float().mean())
        print(f"{method}: {share:.3f} of the digits ({each}); a whole key in {whole:.3f} of the heads")


if __name__ == "__main__":
    main()
