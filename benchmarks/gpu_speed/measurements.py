"""The measurements by priority: contexts of a million tokens come first, while all memory is free."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_checks.long_prompt import LLAMA_8B, RECIPES, TINY
from benchmarks.gpu_checks.setting import Setting, random_model
from benchmarks.gpu_speed.packed_model import packed_model
from benchmarks.gpu_speed.subject import SEARCHING, UNTOUCHED, SpeedRow, SpeedSubject

K = 1024
#: Layers of the model with a million tokens: all 32 would take 137 GB of DRAM in FP16.
FEW_LAYERS = 8
# The format of packed weights; TINY's rows are too short for blocks of a K-quant.
_PACKED = "Q4_0"
#: Pessimistic tokens/s of prefilling, and of filling a layer, that are assumed before the first measurement.
_PREFILL, _FILL = 1500.0, 200_000.0
# Settings of a sparse prefill with which even a short prompt leaves keys out.
_SHORT = {"prefill_from": 64, "prefill_last": 32, "prefill_budget": 128}
#: Follows the recipe's name where the GPU attends to the blocks, too.
RESIDENT = ", attend_on: gpu"
#: From here on attention costs more than the weights of an 8B model.
_LONG = 32 * K


@dataclass(frozen=True)
class Sizes:
    """The lengths of the contexts.

    Attributes:
        prefilled, filled: the lengths that are measured, tokens.
        longest: the length for the model with few layers.
        batched, batches: tokens per sequence, and the batch sizes.
        decoded: decoded tokens per median.
    """

    prefilled: tuple[int, ...]
    filled: tuple[int, ...]
    longest: int
    batched: int
    batches: tuple[int, ...]
    decoded: int


FULL = Sizes((32 * K, 128 * K), (32 * K, 128 * K), K * K, 16 * K, (1, 4, 8, 16, 24), 16)
SMALL = Sizes((300,), (400,), 600, 200, (1, 2), 2)


@dataclass(frozen=True)
class GpuMeasurement:
    """One row to be measured.

    Attributes:
        title: the row's title.
        seconds: an estimate of its duration.
        run: performs the measurement.
    """

    title: str
    seconds: float
    run: Callable[[], SpeedRow]


class Measurements:
    """All measurements in order; results improve the estimates of the next ones.

    Args:
        setting: the device and sizes.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.sizes = SMALL if setting.tiny else FULL
        self._prefill = _PREFILL

    def __iter__(self) -> Iterator[GpuMeasurement]:
        sizes = self.sizes
        few = self._subject(num_hidden_layers=1 if self.setting.tiny else FEW_LAYERS)
        yield self._filled(few, sizes.longest)
        if self.setting.on_gpu:
            yield self._filled(few, sizes.longest, RESIDENT, "adaptive_lean", attend_on="gpu")
        del few
        gc.collect()
        packed = self._packed()
        yield self._prefilled(packed, "ktransformers", sizes.prefilled[0])
        del packed
        gc.collect()
        subject = self._subject()
        for tokens in sizes.prefilled[:1]:
            yield from (self._prefilled(subject, name, tokens) for name in (UNTOUCHED, "ktransformers", "shadowkv"))
        yield from (self._filled(subject, tokens) for tokens in sizes.filled)
        if self.setting.on_gpu:
            for recipe in ("quest", "adaptive"):
                yield from (self._filled(subject, tokens, RESIDENT, recipe, attend_on="gpu") for tokens in sizes.filled)
        for batch in sizes.batches:
            yield from (self._prefilled(subject, name, sizes.batched, batch) for name in ("shadowkv", UNTOUCHED))
        for tokens in sizes.prefilled[1:]:
            yield self._prefilled(subject, UNTOUCHED, tokens)
        yield self._prefilled(subject, SEARCHING, sizes.prefilled[-1])
        for tokens in sizes.prefilled[1:]:
            yield from (self._prefilled(subject, name, tokens) for name in ("ktransformers", "shadowkv"))

    def learn(self, row: SpeedRow) -> None:
        """Improve the estimates by a measured row."""
        if row.prefill is not None:
            self._prefill = min(row.prefill, self._prefill) if self._prefill != _PREFILL else row.prefill

    def _subject(self, **shape: Any) -> SpeedSubject:
        shape = {**(TINY if self.setting.tiny else LLAMA_8B), **shape}
        return SpeedSubject(self.setting, random_model(self.setting, torch.bfloat16, **shape), self.sizes.decoded)

    def _packed(self) -> SpeedSubject:
        shape = TINY if self.setting.tiny else LLAMA_8B
        return SpeedSubject(self.setting, packed_model(self.setting, _PACKED, **shape), self.sizes.decoded, _PACKED)

    def _settings(self, recipe: str) -> dict[str, Any]:
        short = {**RECIPES, SEARCHING: _SHORT}.get(recipe, {}) if self.setting.tiny else {}
        return {} if recipe == UNTOUCHED else {**short, "chunk_size": 128 if self.setting.tiny else 4 * K}

    def _prefilled(self, subject: SpeedSubject, recipe: str, tokens: int, batch: int = 1) -> GpuMeasurement:
        slower = max(1.0, tokens / _LONG)
        rows = "" if batch == 1 else f", {batch} rows"
        weights = f", {subject.weights}" if subject.weights else ""
        return GpuMeasurement(
            f"{recipe}{weights}, {tokens:,} tokens{rows}",
            5 + 1.3 * slower * tokens * batch / self._prefill,
            lambda: subject.prefilled(recipe, tokens, batch, **self._settings(recipe)),
        )

    def _filled(
        self, subject: SpeedSubject, tokens: int, note: str = "", recipe: str = "quest", **settings: Any
    ) -> GpuMeasurement:
        return GpuMeasurement(
            f"{recipe}{note}, {tokens:,} random tokens, {subject.layers} layers",
            5 + tokens * subject.layers / _FILL,
            lambda: subject.filled(recipe, tokens, note, **self._settings(recipe), **settings),
        )
