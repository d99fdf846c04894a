"""Tokens per second of a batch whose rows have several lengths, beside one of equal rows and one row.

    python -m benchmarks.ragged_decode [--recipes dense,adaptive] [--rows 8] [--tokens 1000] [--apart 9] [--burst 16]
                                       [--repeats 9] [--threads N]

Random tokens pass through the default model; prompts are padded on the left. Bursts of decoded tokens of all batches
alternate. Figures are medians over bursts, of all rows together. `arrays` has the layers, of all, whose attention took
arrays in the median token (`AttentionOperator.prepare_arrays`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

import hetero_kv
from benchmarks.timing import interleaved_medians, seconds
from hetero_kv.adapter.fused_decode_layer import FusedDecodeLayer


class Decoding:
    """A batch of prompts of these lengths, and the tokens that follow, always the most likely ones."""

    def __init__(self, model: torch.nn.Module, lengths: Sequence[int]) -> None:
        self.model, self.rows = model, len(lengths)
        self._cache = hetero_kv.HeteroCache(model)
        width, generator = max(lengths), torch.Generator().manual_seed(0)
        token_ids = torch.randint(100, 10_000, (self.rows, width), generator=generator)
        self._mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
        self._token = self._next(token_ids)

    @torch.no_grad()
    def _next(self, token_ids: torch.Tensor) -> torch.Tensor:
        output = self.model(token_ids, attention_mask=self._mask, past_key_values=self._cache, logits_to_keep=1)
        self._mask = torch.cat([self._mask, self._mask[:, -1:]], dim=1)
        return output.logits[:, -1:].argmax(dim=-1)

    def burst(self, tokens: int) -> float:
        """Tokens per second of all rows, over `tokens` of each."""
        return self.rows * tokens / seconds(lambda: [self.step() for _ in range(tokens)])

    def step(self) -> None:
        """Decode one token of each row."""
        self._token = self._next(self._token)


def layers_by_arrays(decoding: Decoding, tokens: int) -> int:
    """Layers per token whose attention takes arrays, the median over `tokens`."""
    counts, whole = [], FusedDecodeLayer.queries_keys_values
    layers = decoding.model.config.num_hidden_layers
    for _ in range(tokens):
        tensors = 0

        def counted(self: FusedDecodeLayer, *arguments: object) -> object:
            nonlocal tensors
            tensors += 1
            return whole(self, *arguments)

        FusedDecodeLayer.queries_keys_values = counted  # type: ignore[method-assign]
        try:
            decoding.step()
        finally:
            FusedDecodeLayer.queries_keys_values = whole  # type: ignore[method-assign]
        counts.append(layers - tensors)
    return statistics.median_low(counts)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="dense,adaptive", help="recipes, with commas between")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of the longest prompt")
    parser.add_argument("--apart", type=int, default=9, help="tokens by which the lengths of ragged rows differ")
    parser.add_argument("--burst", type=int, default=16, help="tokens of each row in a burst")
    parser.add_argument("--repeats", type=int, default=9, help="rounds of a burst of every batch")
    parser.add_argument("--threads", type=int, default=None)
    flags = parser.parse_args()
    table = Table("recipe", "batch", "tokens/s", "ms per step", "arrays")
    settings = {} if flags.threads is None else {"threads_num": flags.threads}
    for recipe in flags.recipes.split(","):
        room = flags.tokens + flags.burst * (flags.repeats + 3)
        model = hetero_kv.load_model(config=recipe, max_seq_len=room, **settings).model
        lengths = {
            "one row": [flags.tokens],
            f"{flags.rows} equal": [flags.tokens] * flags.rows,
            f"{flags.rows} ragged": [flags.tokens - flags.apart * row for row in range(flags.rows)],
        }
        batches = {name: Decoding(model, each) for name, each in lengths.items()}
        arrays = {name: layers_by_arrays(batch, flags.burst) for name, batch in batches.items()}
        bursts = {name: partial(batch.burst, flags.burst) for name, batch in batches.items()}
        speeds = interleaved_medians(bursts, flags.repeats)
        for name, speed in speeds.items():
            step = 1e3 * batches[name].rows / speed
            by_arrays = f"{arrays[name]} of {model.config.num_hidden_layers}"
            table.add_row(recipe, name, f"{speed:.0f}", f"{step:.1f}", by_arrays)
    Console().print(table)


if __name__ == "__main__":
    main()
