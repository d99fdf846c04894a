"""Watches an answer come: its times, the user's stop, and the statistics of the turn."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable

import torch
from transformers.cache_utils import Cache

from hetero_kv.chat.answer import Statistics
from hetero_kv.engine import hf_cache_layers
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.prefill_progress import Progress
from hetero_kv.serving.speculation.drafter import DraftCounts

# getrusage counts kilobytes, except on macOS.
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


class StoppedInPrefill(Exception):
    """Raised between chunks of a prefill that the user stops."""


class GenerationMonitor:
    """Times the tokens as they come, and asks `should_stop` whether the answer ends.

    Attributes:
        tokens: the number of tokens so far.
    """

    def __init__(
        self,
        should_stop: Callable[[], bool] | None = None,
        on_token: Callable[[int], None] | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        self.start = time.perf_counter()
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.tokens = 0
        self._on_token, self._on_progress = on_token, on_progress
        self._should_stop = should_stop or (lambda: False)

    def count(self) -> bool:
        """Note a token. Returns whether the user stops the answer."""
        self.last_token = time.perf_counter()
        self.first_token = self.first_token or self.last_token
        self.tokens += 1
        if self._on_token is not None:
            self._on_token(self.tokens)
        return self._should_stop()

    def progress(self, layers_done: int, layers: int, tokens_done: int, tokens: int) -> None:
        """Report a prefilled chunk. Raises StoppedInPrefill if the user stops the prefill."""
        if self._on_progress is not None:
            self._on_progress(layers_done, layers, tokens_done, tokens)
        if self._should_stop():
            raise StoppedInPrefill


def turn_statistics(
    cache: Cache, device: torch.device, watch: GenerationMonitor, prompt_tokens: int, context: int,
    drafts: DraftCounts | None = None,
) -> Statistics:  # fmt: skip
    """The statistics of a turn that ends now; see Statistics for the token counts. The model computes on `device`."""
    now = time.perf_counter()
    first = watch.first_token or now
    is_ours = isinstance(cache, HeteroCache)
    counted = cache.statistics if is_ours else {}
    return Statistics(
        prompt_tokens=prompt_tokens,
        context_tokens=context,
        generated_tokens=watch.tokens,
        drafted_tokens=0 if drafts is None else drafts.drafted,
        accepted_tokens=0 if drafts is None else drafts.accepted,
        time_to_first_token_s=first - watch.start,
        prefill_s=first - watch.start,
        decode_s=(watch.last_token or first) - first,
        peak_dram_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT,
        peak_vram_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        kv_bytes=cache.dram_bytes if is_ours else _tensor_bytes(cache),
        kv_device_bytes=cache.device_bytes if is_ours else 0,
        of_layers={name: layers for name, layers in counted.items() if any(v is not None for v in layers)},
    )


def _tensor_bytes(cache: Cache) -> int:
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in hf_cache_layers.tensors(layer))
