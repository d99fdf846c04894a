"""The measurements by priority: contexts of a million tokens come first, while all memory is free."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from benchmarks.gpu_checks.long_prompt import LLAMA_8B, RECIPES, TINY
from benchmarks.gpu_checks.setting import Setting, random_model
from benchmarks.gpu_speed.full_attention import FLASH, FULL_ATTENTION, STATIC, bytes_per_row
from benchmarks.gpu_speed.goals import BATCH, BATCH_TOKENS, RESIDENT, K
from benchmarks.gpu_speed.packed_model import packed_model
from benchmarks.gpu_speed.subject import SEARCHING, UNTOUCHED, SpeedRow, SpeedSubject
from hetero_kv.planning.plan import RESERVE

#: Layers of the model with a million tokens: all 32 would take 137 GB of DRAM in FP16.
FEW_LAYERS = 8
# The format of packed weights; TINY's rows are too short for blocks of a K-quant.
_PACKED = "Q4_0"
#: Pessimistic tokens/s of prefilling, and of filling a layer, that are assumed before the first measurement.
_PREFILL, _FILL = 1500.0, 200_000.0
# Settings of a sparse prefill with which even a short prompt leaves keys out.
_SHORT = {"prefill_from": 64, "prefill_last": 32, "prefill_budget": 128}
# Seconds of a peer before its first token: a capture, and compiled kernels.
_CAPTURE = 12.0
#: Follows the recipe's name where the GPU chooses the blocks that the CPU attends to, and where both attend to them.
SCORED, DIVIDED = ", index_device: gpu", ", attend_on: split"
# Share of the free memory that is left to what is no key and no value.
_SPARE = 0.08
# Storage types of a batch, with their share of the bytes in half precision, representatives aside.
_STORED = {"FP16": 1.0, "Q8_0": 0.53, "Q4_0": 0.28}
# Bytes of `quest`'s representatives beside those of keys and values in half precision.
_REPRESENTATIVES = 1 / 16
#: From here on attention costs more than the weights of an 8B model.
_LONG = 32 * K


@dataclass(frozen=True)
class Sizes:
    """The lengths of the contexts.

    Attributes:
        prefilled, filled: the lengths that are measured, tokens.
        longest: the length for the model with few layers.
        batched, batches: tokens per sequence, and the batch sizes.
        many, requests: tokens per sequence, and sequences, of a large batch in DRAM.
        decoded: decoded tokens per median.
    """

    prefilled: tuple[int, ...]
    filled: tuple[int, ...]
    longest: int
    batched: int
    batches: tuple[int, ...]
    many: int
    requests: int
    decoded: int


FULL = Sizes((32 * K, 128 * K), (32 * K, 128 * K), K * K, 16 * K, (1, 4, 8, 16, 24), BATCH_TOKENS, BATCH, 16)
SMALL = Sizes((300,), (400,), 600, 200, (1, 2), 400, 3, 2)


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
        self._prefill, self._fill = _PREFILL, _FILL

    def __iter__(self) -> Iterator[GpuMeasurement]:
        sizes, on_gpu = self.sizes, self.setting.on_gpu
        few = self._subject(num_hidden_layers=1 if self.setting.tiny else FEW_LAYERS)
        if on_gpu:
            yield self._filled(few, sizes.longest, RESIDENT, "adaptive_lean", attend_on="gpu")
        yield self._filled(few, sizes.longest)
        del few
        gc.collect()
        subject = self._subject()
        for tokens in reversed(sizes.filled):
            if on_gpu:
                for recipe in ("adaptive", "quest"):
                    yield self._filled(subject, tokens, RESIDENT, recipe, attend_on="gpu")
            yield from (self._full(subject, name, tokens) for name in FULL_ATTENTION)
        yield from self._many(subject)
        if on_gpu:
            yield self._filled(subject, sizes.filled[-1], DIVIDED, attend_on="split")
            yield self._filled(subject, sizes.filled[-1], SCORED, index_device="gpu")
        yield from (self._filled(subject, tokens) for tokens in sizes.filled)
        for tokens in sizes.prefilled[:1]:
            yield from (self._prefilled(subject, name, tokens) for name in (UNTOUCHED, "ktransformers", "shadowkv"))
        for tokens in sizes.prefilled[1:]:
            yield self._prefilled(subject, UNTOUCHED, tokens)
        yield self._prefilled(subject, SEARCHING, sizes.prefilled[-1])
        for tokens in sizes.prefilled[1:]:
            yield self._prefilled(subject, "ktransformers", tokens)
        for batch in sizes.batches:
            yield from (self._prefilled(subject, name, sizes.batched, batch) for name in ("shadowkv", UNTOUCHED))
        for tokens in sizes.prefilled[1:]:
            yield self._prefilled(subject, "shadowkv", tokens)
        del subject
        gc.collect()
        packed = self._packed()
        yield self._prefilled(packed, "ktransformers", sizes.prefilled[0])

    def _many(self, subject: SpeedSubject) -> Iterator[GpuMeasurement]:
        """A large batch in DRAM, and full attention at the largest batch that the GPU's memory holds."""
        sizes = self.sizes
        per_row = bytes_per_row(subject.model, sizes.many + 2 * sizes.decoded)
        if self.setting.on_gpu:
            stored = fitting_storage(sizes.requests * per_row, psutil.virtual_memory().available)
            note = f"{RESIDENT}, {stored}"
            kept = {"attend_on": "gpu", "kv_type": stored}
            yield self._filled(subject, sizes.many, note, "quest", sizes.requests, **kept)
        largest = int((1 - _SPARE) * self._free_memory() // per_row)
        for name in (FLASH, STATIC):
            if largest > 1:
                yield self._full(subject, name, sizes.many, largest)

    def _free_memory(self) -> int:
        """Bytes that are free where the model computes, within the bound of the setting."""
        if self.setting.tiny or not self.setting.on_gpu:
            # Room for a few rows of a tiny model.
            return 1 << 20
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.setting.device)
        bound = self.setting.gpu_memory - torch.cuda.memory_allocated(self.setting.device)
        return min(free, bound) if self.setting.gpu_memory else free

    def learn(self, row: SpeedRow) -> None:
        """Improve the estimates by a measured row."""
        if row.prefill is not None:
            self._prefill = min(row.prefill, self._prefill) if self._prefill != _PREFILL else row.prefill
        if row.filled is not None:
            self._fill = min(row.filled, self._fill) if self._fill != _FILL else row.filled

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
        weights = f", {subject.weights}" if subject.weights else ""
        return GpuMeasurement(
            f"{recipe}{weights}, {tokens:,} tokens{_rows(batch)}",
            5 + 1.3 * slower * tokens * batch / self._prefill,
            lambda: subject.prefilled(recipe, tokens, batch, **self._settings(recipe)),
        )

    def _filled(
        self, subject: SpeedSubject, tokens: int, note: str = "", recipe: str = "quest", batch: int = 1, **settings: Any
    ) -> GpuMeasurement:
        return GpuMeasurement(
            f"{recipe}{note}, {tokens:,} random tokens, {subject.layers} layers{_rows(batch)}",
            5 + tokens * batch * subject.layers / self._fill,
            lambda: subject.filled(recipe, tokens, note, batch, **self._settings(recipe), **settings),
        )

    def _full(self, subject: SpeedSubject, name: str, tokens: int, batch: int = 1) -> GpuMeasurement:
        return GpuMeasurement(
            f"{name}, {tokens:,} random tokens{_rows(batch)}", _CAPTURE, lambda: subject.full(name, tokens, batch)
        )


def fitting_storage(half: int, available: int) -> str:
    """The finest storage type in which keys and values of `half` bytes in half precision fit into `available` DRAM.

    Q4_0 where none does.
    """
    bound = (1 - RESERVE - _SPARE) * available
    return next((name for name, share in _STORED.items() if (share + _REPRESENTATIVES) * half <= bound), "Q4_0")


def _rows(batch: int) -> str:
    return "" if batch == 1 else f", {batch} rows"
