"""How much the scores of a real prompt's keys vary, and how much of that is between runs of neighbouring tokens.

    python -m benchmarks.attention_scores [--model NAME] [--tokens 8000]

A document, source code of Python's standard library, passes the model. For each query head the scores are those of its
last queries and all keys but the attention sink and the newest: their standard deviation, and the share of their
variance that lies between the means of runs of 32 tokens. Prints twelve heads, at the quantiles of the deviation, in
the form of `benchmarks.seven_billion.SCORES`.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.seven_billion import RUN
from hetero_kv import HeteroCache, load_model
from hetero_kv.adapter.operator import AttentionOperator
from hetero_kv.models import DEFAULT_MODEL

_QUERIES, _SINK, _NEWEST, _HEADS = 16, 64, 512, 12


def of_heads(q: torch.Tensor, k: torch.Tensor, scale: float) -> np.ndarray:
    """Deviation and share of every head, [heads, 2], of q [1, heads, tokens, dim] and k [1, kv_heads, tokens, dim]."""
    keys = k[0, :, _SINK:-_NEWEST].float().repeat_interleave(q.shape[1] // k.shape[1], dim=0)
    keys = keys[:, : keys.shape[1] // RUN * RUN]
    scores = torch.bmm(q[0, :, -_QUERIES:].float(), keys.transpose(1, 2)) * scale
    variance = scores.var(dim=2, correction=0)
    between = scores.unflatten(2, (-1, RUN)).mean(dim=3).var(dim=2, correction=0)
    # Means of runs vary even if tokens are independent.
    share = ((between - variance / RUN) / (variance - variance / RUN)).clamp(0, 1)
    return torch.stack([variance.sqrt().mean(dim=1), share.mean(dim=1)], dim=1).numpy()


def main() -> None:
    """Print the heads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=8000)
    flags = parser.parse_args()
    loaded = load_model(flags.model, config="dense", max_seq_len=flags.tokens + RUN, chunk_size=flags.tokens)
    ids = loaded.tokenizer(Path(ast.__file__).with_name("tarfile.py").read_text()).input_ids[: flags.tokens]
    found, attend = [], AttentionOperator.attend

    def noted(self: Any, cache: Any, call: Any) -> torch.Tensor:
        found.append(of_heads(call.q, call.k, call.scale))
        return attend(self, cache, call)

    AttentionOperator.attend = noted  # type: ignore[method-assign]
    with torch.no_grad():
        loaded.model(torch.tensor([ids]), past_key_values=HeteroCache(loaded.model, flags.tokens), logits_to_keep=1)
    heads = np.concatenate(found)
    heads = heads[heads[:, 0].argsort()]
    print(f"{len(heads)} heads, {len(ids):,} tokens")
    chosen = heads[((np.arange(_HEADS) + 0.5) / _HEADS * len(heads)).astype(int)]
    print(", ".join(f"({deviation:.1f}, {share:.2f})" for deviation, share in chosen))


if __name__ == "__main__":
    main()
