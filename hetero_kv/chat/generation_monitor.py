"""Observers of a generation: times, stops, streamed text, and the statistics of the turn."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import StoppingCriteria, TextStreamer
from transformers.cache_utils import Cache

from hetero_kv.chat.answer import Statistics
from hetero_kv.engine import hf_cache_layers
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.prefill_progress import Progress

# getrusage counts kilobytes, except on macOS.
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
# Extra tokens to decode with an answer's last ones, which may contribute nothing to a stop text.
_EXTRA_TOKENS = 8


class StoppedInPrefill(Exception):
    """Raised between chunks of a prefill that the user stops."""


class GenerationMonitor(StoppingCriteria):
    """Times the tokens as they come, and stops generation when `should_stop` says so."""

    def __init__(
        self, should_stop: Callable[[], bool] | None = None, on_token: Callable[[int], None] | None = None
    ) -> None:
        self.start = time.perf_counter()
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.stopped = False
        self._tokens = 0
        self._on_token = on_token
        self._should_stop = should_stop or (lambda: False)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.last_token = time.perf_counter()
        self.first_token = self.first_token or self.last_token
        self._tokens += 1
        if self._on_token is not None:
            self._on_token(self._tokens)
        self.stopped = self._should_stop()
        return torch.full((input_ids.shape[0],), self.stopped, dtype=torch.bool, device=input_ids.device)

    def on_progress(self, report: Progress | None) -> Progress:
        """A callback that calls `report`, and raises StoppedInPrefill if the user stops the prefill."""

        def reported(layers_done: int, layers: int, tokens_done: int, tokens: int) -> None:
            # A decode step of one token is not reported.
            if report is not None and tokens > 1:
                report(layers_done, layers, tokens_done, tokens)
            if self.first_token is None and self._should_stop():
                raise StoppedInPrefill

        return reported


class StopTexts(StoppingCriteria):
    """Ends an answer that contains one of the texts.

    Works like transformers' `stop_strings`, which take seconds to prepare for a large vocabulary.

    Args:
        prompt_tokens: the prompt's length, after which the answer begins.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str], prompt_tokens: int) -> None:
        self.found = False
        self._tokenizer, self._texts, self._prompt_tokens = tokenizer, tuple(texts), prompt_tokens
        # Each token has at least one byte, except the last one's unfinished character and skipped tokens.
        self._tail = max((len(text.encode()) for text in texts), default=0) + _EXTRA_TOKENS

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        tail = input_ids[0, max(self._prompt_tokens, input_ids.shape[1] - self._tail) :]
        text_so_far = self._tokenizer.decode(tail, skip_special_tokens=True)
        self.found = any(text in text_so_far for text in self._texts)
        return torch.full((input_ids.shape[0],), self.found, dtype=torch.bool, device=input_ids.device)


class Streamer(TextStreamer):
    """Passes decoded text on as soon as it is certain, after `opening`, an answer's beginning that the prompt has."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None], opening: str = "") -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text
        self._opening = opening

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(self._opening + text)
            self._opening = ""


def turn_statistics(
    cache: Cache, device: torch.device, watch: GenerationMonitor, prompt_tokens: int, generated: int, context: int
) -> Statistics:
    """The statistics of a turn that ends now; see Statistics for the token counts. The model computes on `device`."""
    now = time.perf_counter()
    first = watch.first_token or now
    is_ours = isinstance(cache, HeteroCache)
    counted = cache.statistics if is_ours else {}
    return Statistics(
        prompt_tokens=prompt_tokens,
        context_tokens=context,
        generated_tokens=generated,
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
