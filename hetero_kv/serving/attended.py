"""What the forward that chose a token attended to: the forward is repeated, with a record in every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import Any

import numpy as np
from transformers.cache_utils import DynamicLayer

from hetero_kv.engine.attention_record import AttentionRecord
from hetero_kv.engine.cache import HeteroCache
from hetero_kv.engine.layer import FamilyLayer
from hetero_kv.errors import HeteroKVError, shown
from hetero_kv.serving.forward import ModelForward, Part
from hetero_kv.serving.request import Request
from hetero_kv.serving.stream import FinishReason


@dataclass(frozen=True, eq=False)
class Attended:
    """What the forward that chose a token attended to.

    A layer's masses are shares of its softmax, means over its query heads: `masses.sum(1) + estimated + sinks` is 1, to
    rounding.

    Attributes:
        position: the token's place in the sequence. The forward's input was the token before, which attended to itself
            and those before it.
        layers: [layers], numbers of the model's attention layers.
        edges: [bins + 1] int64; bin i has the tokens from `edges[i]` up to `edges[i + 1]`.
        masses: [layers, bins] float32, attention to keys that were attended to individually.
        chosen: [layers, bins] float32, the share of a bin's tokens that were attended to individually, the mean over kv
            heads, or over query heads if each chooses its own tokens. 1 everywhere under full attention.
        estimated: [layers] float32, the share of keys that were only estimated, such as blocks by their mean.
        sinks: [layers] float32, the share of a learned attention sink.
        cached_tokens: how many tokens an earlier request had computed.
    """

    position: int
    layers: tuple[int, ...]
    edges: np.ndarray
    masses: np.ndarray
    chosen: np.ndarray
    estimated: np.ndarray
    sinks: np.ndarray
    cached_tokens: int

    @property
    def total(self) -> np.ndarray:
        """[bins] float32, the mean of `masses` over the layers."""
        return self.masses.mean(axis=0)


def edges_of(bins: int | Sequence[int], tokens: int) -> np.ndarray:
    """The edges of bins, [bins + 1] int64.

    Args:
        bins: how many bins, as equal as possible, and no more than tokens; or the first token of each.
        tokens: how many tokens all bins have together.

    Raises HeteroKVError for invalid bins.
    """
    try:
        starts = [] if isinstance(bins, int) else [index(start) for start in bins]
    except TypeError:
        raise HeteroKVError(f"bins is {shown(bins, 80)}; give a number, or the first token of each bin") from None
    if isinstance(bins, int):
        if bins < 1:
            raise HeteroKVError(f"bins is {bins}; it must be at least 1")
        return np.arange(min(bins, tokens) + 1, dtype=np.int64) * tokens // min(bins, tokens)
    edges = np.array([*starts, tokens], np.int64)
    if edges[0] != 0 or (np.diff(edges) < 1).any():
        raise HeteroKVError(f"bins is {shown(bins, 80)}; the bins' first tokens rise from 0 and are below {tokens}")
    return edges


class Replay(Request):
    """A request to record what the forward that chose a token attended to.

    Tokens whose KV is no longer there are computed as the first time: the first `prompt` tokens as a prompt, each later
    one alone.

    Args:
        tokens: all tokens before the one that the forward chose. The last of them is the forward's input.
        prompt: how many of them were a prompt.
        edges: of the bins.
        others: further arguments of `Request`.
    """

    def __init__(self, tokens: Sequence[int], *others: Any, prompt: int, edges: np.ndarray, **named: Any) -> None:
        super().__init__(tokens, *others, **named)
        self._prompt, self._edges = prompt, edges

    @property
    def _is_in_prompt(self) -> bool:
        """Whether the recorded token is the last one of a prompt."""
        return self._prompt == self.prompt_tokens

    def reusable(self, common: int, choosing_queries: Callable[[int, int | None], int]) -> int:
        """See Request. Tokens behind the prompt attend to what it chose."""
        is_behind = common >= self._prompt
        return common if is_behind else max(0, min(common, self._prompt - choosing_queries(self._prompt, None)))

    @property
    def prompt_end(self) -> int:
        """See Request."""
        return self._prompt

    @property
    def passing(self) -> int:
        """The end of the tokens to compute next: the rest of the prompt, or one token."""
        before = min(self._prompt, self.prompt_tokens - 1)
        return before if self.stored < before else self.stored + 1

    def compute(self, forward: ModelForward, stop: int, *, splits: bool) -> Attended | None:
        """Compute the tokens up to `stop`, at most up to `passing`.

        Args:
            splits: whether prompts may be computed in parts.

        Returns what the last token attended to; None before it is computed.

        Raises HeteroKVError when the attention of a layer cannot be recorded.
        """
        cache, start = self.cache, self.stored
        assert cache is not None
        prompt = self.tokens[: self._prompt]
        part = partial(forward.prefill, cache, Part(prompt, start, stop, self.cached_tokens, self.question))
        if stop < self.prompt_tokens:
            if start < self._prompt:
                part()
            else:
                forward.decode([cache], [self.tokens[start]])
            return None
        if self._is_in_prompt and start and not splits:
            raise HeteroKVError(
                "prompts are computed whole under these rules, or because of foreign hooks in the model, so it is not "
                "known what the first token after one attended to; choose a later token"
            )
        with self._recording(cache) as records:
            if self._is_in_prompt:
                part()
            else:
                forward.decode([cache], [self.tokens[start]])
        return self._attended(records)

    @contextmanager
    def _recording(self, cache: HeteroCache) -> Iterator[dict[int, AttentionRecord]]:
        layers = [layer for layer in cache.groups[0].layers if isinstance(layer, FamilyLayer)]
        records = {layer.layer_idx: AttentionRecord(self._edges) for layer in layers}
        for layer in layers:
            layer.record = records[layer.layer_idx]
        try:
            yield records
        finally:
            for layer in layers:
                layer.record = None

    def _attended(self, records: dict[int, AttentionRecord]) -> Attended:
        missing = [layer for layer, record in records.items() if not record.is_complete]
        if missing:
            raise HeteroKVError(f"the operators of the layers {missing} have not recorded their attention")
        of_layers = list(records.values())
        return Attended(
            position=self.prompt_tokens,
            layers=tuple(records),
            edges=self._edges,
            masses=np.stack([record.masses for record in of_layers]),
            chosen=np.stack([record.chosen for record in of_layers]),
            estimated=np.array([record.estimated for record in of_layers], np.float32),
            sinks=np.array([record.sink for record in of_layers], np.float32),
            cached_tokens=self.cached_tokens,
        )

    def complete(self, reason: FinishReason) -> None:
        """End without a result."""
        self.stream.fail(
            HeteroKVError(f"what token {self.prompt_tokens} attended to was cancelled before it was known")
        )


def require_recordable(injection: Any, *, in_prompt: bool) -> None:
    """Raise HeteroKVError that names a layer whose attention cannot be recorded.

    Args:
        injection: the model's (`hetero_kv_injection`).
        in_prompt: whether the recorded token is the last one of a prompt.
    """
    operators = list(injection.attention_operators())
    for operator in operators:
        operator.require_recordable(in_prompt=in_prompt)
    own = {operator.layer_idx for operator in operators}
    for number, layer in enumerate(injection.cache_layers()):
        if number not in own and isinstance(layer, DynamicLayer):
            raise HeteroKVError(
                f"layer {number} of the model has attention of its own, which no rule replaces, and which cannot say "
                "what it attends to; use rules that replace all attention layers"
            )
    if not own:
        raise HeteroKVError("no layer of the model has attention that rules replace; use rules that replace some")
