"""Prompts under a recipe with a sparse prefill."""

from __future__ import annotations

import torch

from hetero_kv import HeteroCache, eject, inject


def logits(model, recipe, ids, repeats=1, **settings):
    """The last of `repeats` prefills of a prompt under a recipe; a setting of None is left out."""
    engine = {"chunk_size": 200, "max_seq_len": 1024, "threads_num": 1, "kv_type": "FP32", "prefill_from": 64}
    command_line = {name: value for name, value in {**engine, **settings}.items() if value is not None}
    inject(model, recipe, command_line=command_line)
    try:
        with torch.no_grad():
            for _ in range(repeats):
                out = model(ids, past_key_values=HeteroCache(model)).logits
    finally:
        eject(model)
    return out
