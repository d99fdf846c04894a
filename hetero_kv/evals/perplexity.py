"""Streaming perplexity: how well a model predicts each next token of a text, along the text.

Tokens are fed one by one, or in strides, as Cascading KV cache measures PG19 (arXiv:2406.17808, table 1: strides of
1,024 tokens).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from hetero_kv.errors import ConfigError, HeteroKVError
from hetero_kv.evals.config_spec import BASELINE
from hetero_kv.evals.configured_model import ConfiguredModel
from hetero_kv.evals.generation import cache_bytes, counted
from hetero_kv.evals.logits_task import LogitsTask, LogitsTaskRequest
from hetero_kv.evals.outcome import Cost, Outcome
from hetero_kv.evals.prompt import Prompt
from hetero_kv.evals.sample import Sample, Score
from hetero_kv.evals.tasks.registry import register
from hetero_kv.evals.text_windows import text_windows
from hetero_kv.serving.forward import ModelForward

# The chunk size without other settings, and the number of tokens whose logits are converted to float32 at once:
# [tokens, vocab] is 160 MB for a vocabulary of 150,000.
_TILE = 256

# The default number of tokens to prefill.
_PREFILL = 1024

# The least number of tokens to feed after an explicit prefill: cutting a text changes its length by a token or two.
_LEAST_FED = 8

# Points of a curve: enough to draw, and few enough to keep a line of results short.
_POINTS = 64


class Perplexity(LogitsTask):
    """Negative log-likelihood of a text's tokens.

    The first `prefill_tokens` are prefilled (by default 1,024, or half of a text that is shorter than 2,048), the
    others are fed `stride` at a time. With a stride of 1 every counted likelihood comes from a method's decode step.
    The untouched model reads the same tokens in chunks, with full attention. The score is the geometric mean of the
    tokens' probabilities, 1 / perplexity.

    A bounded layer treats a longer stride as a turn, a prompt after its entries. The stride's tokens attend to the
    entries and to earlier tokens of the stride, up to budget + stride entries; then entries are evicted. A policy whose
    own stride is shorter splits it. A policy repeats for each stride what it does for each turn: SirLLM decays scores,
    D2O allocates budgets and restarts its threshold, and a budget that is a share of the sequence grows with it.
    RetrievalAttention reads a stride with full attention; a method that has only such layers is refused. ShadowKV reads
    the tokens before a stride as reconstructed from its low-rank factors.
    """

    name = "perplexity"
    meaning = "negative log-likelihood of a text's tokens, fed one by one or in strides, against their position"

    def samples(self, request: LogitsTaskRequest) -> Iterator[Sample]:
        for called, length, text in text_windows(self.name, request):
            if length < 4:
                raise HeteroKVError(f"task {self.name!r}: a length of {length} tokens is too short; give 4 or more")
            prefill = _prefilled(request.prefill_tokens, length)
            yield Sample(
                id=f"{self.name}/{called}",
                task=self.name,
                turns=(text,),
                answers=((),),
                length=length,
                depth=None,
                max_new_tokens=0,
                raw_prompt=True,
                metadata={"prefill_tokens": prefill, "stride": request.stride},
            )

    def require_methods(self, request: LogitsTaskRequest, model: ConfiguredModel) -> None:
        """See LogitsTask: refuses strides for methods with exact prefill, whose score would be the baseline's."""
        if request.stride > 1 and model.exact_methods:
            method = model.exact_methods[0]
            raise ConfigError(
                f"stride is {request.stride}, and {method!r} reads tokens that are fed together with full attention, "
                "so that its perplexity would be the untouched model's; set --stride 1 for it, or omit it"
            )

    def measure(self, sample: Sample, model: ConfiguredModel, methods: Sequence[str]) -> Iterator[Outcome]:
        tokens = model.prompt(sample).tokens
        start = sample.metadata["prefill_tokens"]
        beginning = Prompt(tokens[:start], len(tokens))
        for method in methods:
            if method == BASELINE:
                nll, cost = _read_in_chunks(model.loaded.model, tokens, start)
            else:
                nll, cost = _read_in_strides(model, method, beginning, tokens, sample.metadata["stride"])
            mean = math.fsum(nll) / len(nll)
            score = Score(math.exp(-mean), {"nll": mean, "perplexity": math.exp(mean)})
            yield Outcome(method, (), cost, score, {"curve": _curve(nll, start, sample.length)})


def _prefilled(prefill_tokens: int | None, length: int) -> int:
    """How many of a text's `length` tokens to prefill."""
    if prefill_tokens is None:
        return min(_PREFILL, length // 2)
    if prefill_tokens > length - _LEAST_FED:
        raise HeteroKVError(
            f"prefill_tokens is {prefill_tokens}, which leaves less than {_LEAST_FED} of {length} tokens to feed; give "
            f"{length - _LEAST_FED} or fewer, or greater lengths"
        )
    return prefill_tokens


def _read_in_strides(
    model: ConfiguredModel, method: str, beginning: Prompt, tokens: Sequence[int], stride: int
) -> tuple[list[float], Cost]:
    """The negative log-likelihood of every token after `beginning`, fed `stride` at a time."""
    with model.prefilled(method, beginning) as ready:
        forward = ModelForward(ready.model)
        start, began = len(beginning.tokens), time.perf_counter()
        nll = _nll(ready.logits, tokens[start : start + 1])
        # The last token is not fed: only its likelihood counts.
        for first in range(start, len(tokens) - 1, stride):
            fed = list(tokens[first : min(first + stride, len(tokens) - 1)])
            nll += _nll(forward.every(ready.cache, fed), tokens[first + 1 : first + len(fed) + 1])
        seconds = time.perf_counter() - began
        steps = len(nll) - 1
        cost = Cost(
            len(tokens),
            0,
            ready.seconds,
            seconds,
            steps / seconds if steps else None,
            cache_bytes(ready.cache),
            ready.shared,
            counted=counted(ready.cache),
        )
    return nll, cost


def _read_in_chunks(model: Any, tokens: Sequence[int], start: int) -> tuple[list[float], Cost]:
    """The same for the untouched model, in chunks."""
    forward, cache = ModelForward(model), DynamicCache(config=model.config.get_text_config(decoder=True))
    nll: list[float] = []
    began = time.perf_counter()
    for first in range(0, len(tokens) - 1, _TILE):
        chunk = list(tokens[first : min(first + _TILE, len(tokens) - 1)])
        logits = forward.every(cache, chunk)
        skipped = min(max(0, start - 1 - first), len(chunk))
        nll += _nll(logits[skipped:], tokens[first + skipped + 1 : first + len(chunk) + 1])
    return nll, Cost(len(tokens), 0, time.perf_counter() - began, None, None, cache_bytes(cache), False)


def _nll(logits: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    """Negative log-likelihood of each of `tokens`, from logits [tokens, vocab], computed in float32."""
    following = torch.tensor(list(tokens), dtype=torch.int64, device=logits.device)
    tiles = zip(logits.split(_TILE), following.split(_TILE), strict=True)
    return [
        value
        for tile, expected in tiles
        for value in torch.nn.functional.cross_entropy(tile.float(), expected, reduction="none").tolist()
    ]


def _curve(nll: Sequence[float], start: int, length: int) -> dict[str, list[float]]:
    """The mean over each of up to 64 stretches of the text, and the position of each stretch's end.

    Positions follow from `start` and `length` alone, so that curves of texts of equal length can be averaged.
    """
    points = min(_POINTS, len(nll))
    ends = [round((index + 1) * len(nll) / points) for index in range(points)]
    stretches = zip([0, *ends[:-1]], ends, strict=True)
    return {
        "position": [start + round((index + 1) * (length - start) / points) for index in range(points)],
        "nll": [math.fsum(nll[first:end]) / (end - first) for first, end in stretches],
    }


register(Perplexity())
