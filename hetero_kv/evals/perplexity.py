"""Streaming perplexity: how well each next token of a text is foretold, along the text."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.config_spec import BASELINE
from hetero_kv.evals.configured_model import ConfiguredModel, Prompt
from hetero_kv.evals.generation import cache_bytes, last_logits
from hetero_kv.evals.logits_task import LogitsTask, LogitsTaskRequest
from hetero_kv.evals.outcome import Cost, Outcome
from hetero_kv.evals.sample import Sample, Score
from hetero_kv.evals.tasks.registry import register
from hetero_kv.evals.text_windows import text_windows

# Logits of a chunk are [tokens, vocab] float32: 160 MB for a vocabulary of 150,000.
_FULL_CHUNK = 256

# Points of a curve: enough to draw, few enough to keep a line of results short.
_POINTS = 64


class Perplexity(LogitsTask):
    """Negative log-likelihood of a text's tokens.

    The first `prefill_tokens` are prefilled (half of a text that is shorter than twice as many), the others are fed
    one by one, so that every likelihood that counts comes out of a method's decode step. The untouched model reads
    the same tokens in chunks, with full attention. The score is the geometric mean of the tokens' probabilities,
    1 / perplexity.
    """

    name = "perplexity"
    meaning = "negative log-likelihood of a text's tokens, decoded one by one, against their position"

    def samples(self, request: LogitsTaskRequest) -> Iterator[Sample]:
        """See LogitsTask."""
        for called, length, text in text_windows(self.name, request):
            if length < 4:
                raise HeteroKVError(f"task {self.name!r}: a length of {length} tokens is too short; give 4 or more")
            prefill = min(request.prefill_tokens, length // 2)
            yield Sample(
                id=f"{self.name}/{called}",
                task=self.name,
                turns=(text,),
                answers=((),),
                length=length,
                depth=None,
                max_new_tokens=0,
                raw_prompt=True,
                metadata={"prefill_tokens": prefill},
            )

    def measure(self, sample: Sample, model: ConfiguredModel, methods: Sequence[str]) -> Iterator[Outcome]:
        """See LogitsTask."""
        tokens = model.prompt(sample).tokens
        start = sample.metadata["prefill_tokens"]
        beginning = Prompt(tokens[:start], len(tokens))
        for method in methods:
            if method == BASELINE:
                nll, cost = _read_in_chunks(model.loaded.model, tokens, start)
            else:
                nll, cost = _read_one_by_one(model, method, beginning, tokens)
            mean = math.fsum(nll) / len(nll)
            score = Score(math.exp(-mean), {"nll": mean, "perplexity": math.exp(mean)})
            yield Outcome(method, (), cost, score, {"curve": _curve(nll, start, sample.length)})


def _read_one_by_one(
    model: ConfiguredModel, method: str, beginning: Prompt, tokens: Sequence[int]
) -> tuple[list[float], Cost]:
    """The negative log-likelihood of every token after `beginning`, each fed alone."""
    with model.prefilled(method, beginning) as ready:
        nll, logits, began = [], ready.logits, time.perf_counter()
        for position in range(len(beginning.tokens), len(tokens)):
            nll.append(float(_nll(logits, tokens[position : position + 1])))
            if position + 1 < len(tokens):
                logits = last_logits(ready.model, tokens[position : position + 1], ready.cache)
        seconds = time.perf_counter() - began
        fed = len(nll) - 1
        cost = Cost(
            len(tokens),
            0,
            ready.seconds,
            seconds,
            fed / seconds if fed else None,
            cache_bytes(ready.cache),
            ready.shared,
        )
    return nll, cost


@torch.no_grad()
def _read_in_chunks(model: Any, tokens: Sequence[int], start: int) -> tuple[list[float], Cost]:
    """The same by the untouched model, in chunks."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    nll: list[float] = []
    began = time.perf_counter()
    for first in range(0, len(tokens) - 1, _FULL_CHUNK):
        chunk = list(tokens[first : min(first + _FULL_CHUNK, len(tokens) - 1)])
        logits = model(
            input_ids=torch.tensor([chunk], device=model.device), past_key_values=cache, use_cache=True
        ).logits
        skipped = min(max(0, start - 1 - first), len(chunk))
        if skipped < len(chunk):
            following = tokens[first + skipped + 1 : first + len(chunk) + 1]
            nll += _nll(logits[0, skipped:], following).tolist()
    return nll, Cost(len(tokens), 0, time.perf_counter() - began, None, None, cache_bytes(cache), False)


def _nll(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Negative log-likelihood of `tokens`, [tokens] float32, from logits [tokens, vocab]."""
    return torch.nn.functional.cross_entropy(
        logits.float(), torch.tensor(list(tokens), device=logits.device), reduction="none"
    )


def _curve(nll: Sequence[float], start: int, length: int) -> dict[str, list[float]]:
    """The mean over each of up to 64 stretches of the text, and the position where each ends.

    Positions follow from `start` and `length` alone, so that curves of texts of one length can be averaged.
    """
    points = min(_POINTS, len(nll))
    ends = [round((index + 1) * len(nll) / points) for index in range(points)]
    stretches = zip([0, *ends[:-1]], ends, strict=True)
    return {
        "position": [start + round((index + 1) * (length - start) / points) for index in range(points)],
        "nll": [math.fsum(nll[first:end]) / (end - first) for first, end in stretches],
    }


register(Perplexity())
