"""A random model under a recipe, whose context is prefilled, or filled with random keys and values."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from transformers import DynamicCache

from benchmarks.gpu_checks.setting import Setting, random_tokens, synchronise
from benchmarks.gpu_speed.full_attention import FullAttention
from benchmarks.gpu_speed.step_parts import shares, timed
from hetero_kv import HeteroCache, eject, inject
from hetero_kv.adapter.kv_shape import KVShape
from hetero_kv.families.sparse_prefill.known_patterns import ENVIRONMENT_VARIABLE

UNTOUCHED = "untouched"
#: The recipe whose first prompt searches patterns of the heads.
SEARCHING = "minference"
# That prompt's tokens, in those up to which a prompt is dense.
_SEARCHED_IN = 4


@dataclass(frozen=True)
class SpeedRow:
    """The measurement of one recipe and length.

    Attributes:
        name: the recipe, "untouched", or another peer.
        tokens, batch, layers: the sizes of the context and the model.
        prefill: prefill tokens/s over all sequences; None if the context was filled with random keys and values.
        milliseconds: median time of a step, which decodes one token per sequence.
        tokens_per_s: decoded tokens/s over all sequences.
        gpu_bytes: the allocator's peak, including weights; None without a GPU.
        parts: the parts of the host's time per step, milliseconds.
        filled: tokens of a layer that were filled per second; None if nothing was.
    """

    name: str
    tokens: int
    batch: int
    layers: int
    prefill: float | None
    milliseconds: float
    tokens_per_s: float
    gpu_bytes: int | None
    parts: dict[str, float] = field(default_factory=dict)
    filled: float | None = None


@dataclass(frozen=True)
class RandomPrompt:
    """Random keys and values in place of a prefilled prompt (`hetero_kv.engine.recorded_prompt.RecordedPrompt`)."""

    keys: torch.Tensor
    values: torch.Tensor
    length: int
    rotation: None = None

    def show_last_queries(self, observation: Any) -> None:
        """Raise RuntimeError: there are no queries."""
        raise RuntimeError("random keys come without queries; fill contexts of recipes that watch none")


class SpeedSubject:
    """A model that is measured under several recipes.

    Args:
        setting: the device and sizes.
        model: a random model.
        decoded: decoded tokens per median.
        weights: a note on its weights after a recipe's name; "" for unquantized ones.
    """

    def __init__(self, setting: Setting, model: Any, decoded: int, weights: str = "") -> None:
        self.setting, self.model, self.decoded, self.weights = setting, model, decoded, weights
        self.vocabulary = model.config.vocab_size
        self.layers = model.config.num_hidden_layers

    @torch.no_grad()
    def prefilled(self, recipe: str, tokens: int, batch: int = 1, **settings: Any) -> SpeedRow:
        """Measure a prompt of `tokens` in each of `batch` rows, and decoding after it."""
        with self._under(recipe, tokens, settings) as cache:
            prompt = random_tokens(self.setting, tokens * batch, 1, self.vocabulary).view(batch, tokens)
            if recipe == SEARCHING:
                operator = next(iter(self.model.hetero_kv_injection.attention_operators()))
                searched = prompt[:, : _SEARCHED_IN * operator.settings.prefill_from]
                self.model(searched, past_key_values=cache, logits_to_keep=1)
                cache.reset()
            start = self._now()
            logits = self.model(prompt, past_key_values=cache, logits_to_keep=1).logits
            seconds = self._now() - start
            return self._decoded(recipe, tokens, batch, self._after(cache, logits), tokens * batch / seconds)

    @torch.no_grad()
    def filled(self, recipe: str, tokens: int, note: str = "", batch: int = 1, **settings: Any) -> SpeedRow:
        """Measure decoding after `tokens` random keys and values in each of `batch` rows.

        note: follows the recipe's name in the row.
        """
        with self._under(recipe, tokens, settings) as cache:
            start = self._now()
            operators = {each.layer_idx: each for each in self.model.hetero_kv_injection.attention_operators()}
            with cache.forward(cache.plan_batch([tokens] * batch, tokens), is_decode=False) as forward:
                (step,) = forward.steps
                for index, operator in operators.items():
                    shape = KVShape.of_attention(operator.wrapped, self.model.config)
                    operator.load_prefill(step.group.layers[index], step, self._random(shape, batch, tokens, index))
            cache.columns = cache.columns.grown(tokens, [tokens] * batch)
            per_s = tokens * batch * len(operators) / (self._now() - start)
            first = random_tokens(self.setting, batch, 2, self.vocabulary).view(batch, 1)
            logits = self.model(first, past_key_values=cache, logits_to_keep=1).logits
            return replace(self._decoded(recipe + note, tokens, batch, self._after(cache, logits), None), filled=per_s)

    @torch.no_grad()
    def full(self, name: str, tokens: int, batch: int = 1) -> SpeedRow:
        """Measure full attention to `tokens` random keys and values in GPU memory (`FULL_ATTENTION`)."""
        with self._cleared():
            return self._full(name, tokens, batch)

    def _full(self, name: str, tokens: int, batch: int) -> SpeedRow:
        peer = FullAttention(self.setting, self.model, name, batch, tokens, 2 * self.decoded)
        peer.prepare()
        return self._decoded(name, tokens, batch, peer.decode, None, has_parts=False)

    def _random(self, shape: KVShape, batch: int, tokens: int, seed: int) -> RandomPrompt:
        torch.manual_seed(seed)
        made = {"device": self.setting.device, "dtype": self.model.dtype}
        keys, values = (torch.randn(batch, shape.kv_heads, tokens, dim, **made) for dim in (shape.k_dim, shape.v_dim))
        return RandomPrompt(keys, values, tokens)

    def _decoded(
        self, name: str, tokens: int, batch: int, decode: Callable[[], torch.Tensor], prefill: float | None,
        has_parts: bool = True,
    ) -> SpeedRow:  # fmt: skip
        """The row of a context, by the time of `decode`, which gives the logits of each row's next token."""
        times: list[float] = []
        for _ in range(self.decoded):
            start = self._now()
            logits = decode()
            times.append(self._now() - start)
        parts: dict[str, float] = {}
        with timed(parts):
            start = self._now()
            for _ in range(self.decoded):
                logits = decode()
            seconds = self._now() - start
        if not bool(logits.isfinite().all()):
            raise RuntimeError(f"{name}, {tokens:,} tokens: logits that are not finite")
        median = statistics.median(times)
        peak = torch.cuda.max_memory_allocated(self.setting.device) if self.setting.on_gpu else None
        told = shares(parts, seconds, self.decoded) if has_parts and name != UNTOUCHED else {}
        name = f"{name}, {self.weights}" if self.weights else name
        return SpeedRow(name, tokens, batch, self.layers, prefill, median * 1e3, batch / median, peak, told)

    def _after(self, cache: Any, logits: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Decodes the likeliest token after those of `cache`, again and again."""
        last = [logits]

        def decode() -> torch.Tensor:
            chosen = last[0][:, -1:].argmax(dim=-1)
            last[0] = self.model(chosen, past_key_values=cache, logits_to_keep=1).logits
            return last[0]

        return decode

    def _now(self) -> float:
        synchronise(self.setting)
        return time.perf_counter()

    @contextmanager
    def _under(self, recipe: str, tokens: int, settings: dict[str, Any]) -> Iterator[Any]:
        """A new cache of the model under a recipe; then the model is untouched, and memory free."""
        capacity = tokens + 2 * self.decoded + 2
        with TemporaryDirectory() as folder, patch.dict(os.environ, {ENVIRONMENT_VARIABLE: folder}):
            yield from self._under_rules(recipe, capacity, settings)

    def _under_rules(self, recipe: str, capacity: int, settings: dict[str, Any]) -> Iterator[Any]:
        with self._cleared():
            if recipe == UNTOUCHED:
                cache: Any = DynamicCache(config=self.model.config)
            else:
                injection = inject(self.model, recipe, command_line={**settings, "max_seq_len": capacity})
                injection.compile_kernels()
                cache = HeteroCache(self.model)
            yield cache

    @contextmanager
    def _cleared(self) -> Iterator[None]:
        """After this context the model is untouched, and memory free."""
        if self.setting.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.setting.device)
        try:
            yield
        finally:
            if getattr(self.model, "hetero_kv_injection", None) is not None:
                eject(self.model)
            gc.collect()
            if self.setting.on_gpu:
                torch.cuda.empty_cache()
