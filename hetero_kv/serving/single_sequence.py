"""Decodes one sequence by itself, on the cache of its owner."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from transformers.cache_utils import Cache

from hetero_kv.serving.forward import ModelForward
from hetero_kv.serving.sampler import Choice


def decoded(
    forward: ModelForward, cache: Cache, logits: torch.Tensor, choose: Callable[[torch.Tensor], Choice]
) -> Iterator[Choice]:
    """The tokens that follow those in a cache, without end; each is computed when it is read.

    Args:
        forward: computes.
        cache: of one row. The last token that was read is not in it.
        logits: [vocab] after the cache's last token.
        choose: chooses a token by logits [vocab], such as `Sampler.choose`.
    """
    while True:
        choice = choose(logits)
        yield choice
        (logits,) = forward.decode([cache], [choice.token])
