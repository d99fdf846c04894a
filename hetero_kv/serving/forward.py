"""The two forwards of the engine: a part of one prompt, and one token of every row."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from hetero_kv.adapter.cache_argument import as_cache
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.joined_caches import joined


class ModelForward:
    """Calls an injected model for the engine.

    Args:
        model: a causal language model after `inject`.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        has_choice = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._last_logits: dict[str, Any] = {"logits_to_keep": 1} if has_choice else {}

    def prefill(
        self, cache: HeteroCache, prompt: Sequence[int], start: int, stop: int, cached: int, question: int | None
    ) -> torch.Tensor:
        """Pass tokens [start, stop) of a prompt, behind those that `cache` has. Returns the last one's logits [vocab].

        Observing the prompt begins with its first part, and what follows from it as a whole comes with its last one.

        Args:
            cached: how many of its first tokens came from another request; they are no part of this one's prompt.
            question: how many of the prompt's last tokens are its question (`HeteroCache.asking`).
        """
        own = start - cached, stop - cached, len(prompt) - cached
        part = nullcontext() if own[0] == 0 and own[1] == own[2] > 1 else cache.prompt_part(*own)
        with cache.asking(question), part:
            return self._logits(cache, torch.tensor([prompt[start:stop]]))[0]

    def decode(self, caches: Sequence[HeteroCache], tokens: Sequence[int]) -> torch.Tensor:
        """Pass one token behind those of each cache, which has one row. Returns logits [rows, vocab].

        Each row is computed as if it were alone. After an exception, no cache has changed.
        """
        token_ids = torch.tensor(tokens)[:, None]
        if len(caches) == 1:
            return self._logits(caches[0], token_ids)
        with joined(caches) as cache:
            return self._logits(cache, token_ids)

    def _logits(self, cache: HeteroCache, token_ids: torch.Tensor) -> torch.Tensor:
        output = self.model(
            input_ids=token_ids.to(self.model.device),
            **as_cache(self.model.forward, cache),
            use_cache=True,
            **self._last_logits,
        )
        return output.logits[:, -1]
