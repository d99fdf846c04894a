"""The cost of endless streams through a fixed number of entries.

    python -m benchmarks.bounded_stream [--model smollm2-135m-instruct] [--recipes streaming_llm,cascade,...]
        [--lengths 8k,64k] [--repeats 3] [--steps 32] [--json FILE]

Recipes are those with strided prefill: `cascade`, or `cascade:stride=1024` with settings. `k` is 1,024.

Prefill: the time per token of a prompt of random tokens at every length, and the ratio of the longest to the shortest;
and within the longest, the ratio of its last tokens to its first, as many as the shortest has. The first tokens find an
empty cache and attend to fewer entries, so a ratio slightly above 1 does not mean a growing cost. The untouched model
prefills the shortest prompt in chunks, as a peer. `tova` keeps positions: beyond the model's trained length its time is
valid, but its text is not.

Shares of that time, and of a decoded token's with a full budget, besides the model's own work:

- update: `BoundedLayer.begin`, `extend` (appends keys and values, and rotates keys to their positions in the cache) and
  `evict_if_due` (the policy's choice, and the eviction).
- scores: `BoundedLayer.observe` (the policy's column sums of the attention, for which it is computed again).
- logits: scoring tokens by their logits (`infinipot`, `sirllm`): the head again for a prompt, and entropies.
- catalyst: `infinipot`'s runs of its catalyst, a forward of the model with everything in it.

Excluded are attention, the rotation of queries, and splitting the prompt. A decoded token is measured with a cache as
full as the policy leaves it. A pot that is distilled when it is full is nearly full then, and no distillation is among
the decoded tokens: it comes as often per token as in a prompt, and takes the same time. The peer is the untouched model
with as many tokens in its cache.

`hetero-kv eval --task perplexity --stride N` measures the quality of such a stream.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.timing import interleaved_medians, seconds
from hetero_kv import HeteroCache, eject, inject
from hetero_kv.adapter.strided_prefill import StridedForward
from hetero_kv.errors import HeteroKVError
from hetero_kv.evals.config_spec import ConfigSpec, config_specs
from hetero_kv.evals.options import parse_length
from hetero_kv.families.bounded import joint_eviction
from hetero_kv.families.bounded.layer import BoundedLayer
from hetero_kv.models import load_model

RECIPES = "streaming_llm,cascade,tova,infinipot,sirllm"
UNTOUCHED = "untouched"
PREFILL_CHUNK = 1024
#: Part -> the functions whose time it includes.
PARTS: dict[str, list[tuple[Any, str]]] = {
    "update": [(BoundedLayer, "begin_turn"), (BoundedLayer, "extend"), (BoundedLayer, "evict_if_due")],
    "scores": [(BoundedLayer, "observe")],
    "logits": [(joint_eviction, "_score_tokens")],
    "catalyst": [(StridedForward, "run_transient")],
}


class StreamSubject:
    """The measured model, with one recipe injected at a time."""

    def __init__(self, model: Any, tokenizer: Any, threads: int | None = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.settings = {} if threads is None else {"threads_num": threads}

    @contextmanager
    def injected(self, spec: ConfigSpec | None) -> Iterator[None]:
        """Within this context the recipe is injected (none for None), and gradients are off."""
        if spec is not None:
            inject(self.model, spec.rules, command_line={**self.settings, **spec.settings})
        try:
            with torch.no_grad():
                yield
        finally:
            if spec is not None:
                eject(self.model)

    def cache(self, spec: ConfigSpec | None, on_progress: Any = None) -> Any:
        """A new cache for the injected recipe.

        Raises HeteroKVError for a recipe without bounded layers or without strided prefill.
        """
        if spec is None:
            return DynamicCache(config=self.model.config)
        cache = HeteroCache(self.model, on_progress=on_progress, tokenizer=self.tokenizer)
        if not cache.strided_layers or not all(layer.policy.strided for layer in cache.strided_layers):
            raise HeteroKVError(f"recipe {spec.name}: its prompts do not pass in strides; take some of {RECIPES}")
        return cache

    def fed(self, tokens: torch.Tensor, cache: Any, chunk: int) -> None:
        """Run `tokens` [1, n] through the model, in chunks with transformers' cache, and wait until they are done."""
        for part in [tokens] if isinstance(cache, HeteroCache) else tokens.split(chunk, dim=1):
            self.model(part, past_key_values=cache, logits_to_keep=1)
        _wait()

    def random(self, count: int) -> torch.Tensor:
        """[1, count] random tokens, always the same."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.model.config.vocab_size, (1, count), generator=generator).to(self.model.device)


class StreamPrefill:
    """A recipe's prefill of one prompt with an empty cache, which can be repeated.

    Attributes:
        shares: per run, the share of each of PARTS.
        last_over_first: per run, the time of the last `stretch` tokens relative to that of the first.
    """

    def __init__(self, subject: StreamSubject, spec: ConfigSpec | None, length: int, stretch: int) -> None:
        self.subject, self.spec, self.stretch = subject, spec, stretch
        self.tokens = subject.random(length)
        self.shares: list[dict[str, float]] = []
        self.last_over_first: list[float] = []

    def __call__(self) -> float:
        """Seconds per token."""
        length, passed = self.tokens.shape[1], [(0, 0.0)]

        def stamp(layers_done: int, layers: int, tokens_done: int, tokens: int) -> None:
            # A prompt of a single stride is reported layer by layer.
            if layers == 1 and tokens_done < length:
                _wait()
                passed.append((tokens_done, time.perf_counter() - began))

        with self.subject.injected(self.spec), spent() as parts:
            cache = self.subject.cache(self.spec, on_progress=stamp)
            began = time.perf_counter()
            took = seconds(lambda: self.subject.fed(self.tokens, cache, PREFILL_CHUNK))
        passed.append((length, took))
        self.shares.append({part: spend / took for part, spend in parts.items()})
        last = took - _time_at(length - self.stretch, passed)
        self.last_over_first.append(last / _time_at(self.stretch, passed))
        return took / length


class StreamDecode:
    """Decoding after a prompt that has filled the budget, which can be repeated from the same state.

    Attributes:
        entries: entries per kv head, or tokens of the untouched model, before the first decoded token.
        shares: per run, the share of each of PARTS.
    """

    def __init__(self, subject: StreamSubject, spec: ConfigSpec | None, steps: int, entries: int = 0) -> None:
        self.subject, self.spec, self.steps = subject, spec, steps
        self.shares: list[dict[str, float]] = []
        with subject.injected(spec):
            self.cache = subject.cache(spec)
            filling = entries if spec is None else _filling(self.cache.strided_layers[0], steps)
            subject.fed(subject.random(filling), self.cache, PREFILL_CHUNK)
        self.entries = (
            entries if spec is None else max(h for h in self.cache.statistics["cached_entries"] if h is not None)
        )

    def __call__(self) -> float:
        """Seconds per token."""
        token = self.subject.random(1)
        before = None if self.spec is None else self.cache.snapshot()
        with self.subject.injected(self.spec):
            self.subject.fed(token, self.cache, 1)
            with spent() as parts:
                took = seconds(lambda: self._decode(token))
        if before is None:
            self.cache.crop(-(self.steps + 1))
        else:
            self.cache.rollback(before)
        self.shares.append({part: spend / took for part, spend in parts.items()})
        return took / self.steps

    def _decode(self, token: torch.Tensor) -> None:
        for _ in range(self.steps):
            self.subject.fed(token, self.cache, 1)


@contextmanager
def spent() -> Iterator[dict[str, float]]:
    """Within this context the seconds of each of PARTS are added up; parts inside a part do not count separately."""
    total, inside = dict.fromkeys(PARTS, 0.0), False

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return function(*args, **kwargs)
            _wait()
            inside, began = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                _wait()
                inside = False
                total[part] += time.perf_counter() - began

        return wrapper

    originals = [(part, owner, name, getattr(owner, name)) for part in PARTS for owner, name in PARTS[part]]
    try:
        for part, owner, name, function in originals:
            setattr(owner, name, timed(part, function))
        yield total
    finally:
        for _, owner, name, function in originals:
            setattr(owner, name, function)


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _time_at(tokens: int, passed: Sequence[tuple[int, float]]) -> float:
    """Seconds until `tokens` had passed, between the (tokens, seconds) of `passed` in proportion."""
    (before, began), (after, ended) = next(pair for pair in pairwise(passed) if pair[0][0] <= tokens <= pair[1][0])
    return began + (ended - began) * (tokens - before) / max(1, after - before)


def _filling(layer: BoundedLayer, steps: int) -> int:
    """The number of tokens that fill the layer's budget so that the next `steps` + 1 are typical of a stream."""
    budget = layer.policy.settings.budget
    if isinstance(budget, float):
        raise HeteroKVError(f"budget is {budget}, a share; for an endless stream it must be a number of entries")
    # A pot may overflow while decoding; a budget that every token overflows is filled twice.
    filling = budget - steps - 2 if layer.policy.is_due(budget, budget) else 2 * budget
    if filling < 1:
        raise HeteroKVError(f"a budget of {budget} is filled before {steps} tokens are decoded; give fewer --steps")
    return filling


def cost(
    subject: StreamSubject, specs: Sequence[ConfigSpec], lengths: Sequence[int], repeats: int, steps: int
) -> dict[str, Any]:
    """Milliseconds per token of prefill and decode by recipe, ratios and shares: medians of interleaved repeats.

    Args:
        lengths: of prompts, rising.
        steps: tokens that are decoded at a time.
    """
    short = lengths[0]
    prefills = {(spec.name, n): StreamPrefill(subject, spec, n, short) for spec in specs for n in lengths}
    prefills[UNTOUCHED, short] = StreamPrefill(subject, None, short, short)
    StreamPrefill(subject, None, min(short, PREFILL_CHUNK), 1)()
    took = interleaved_medians({str(key): prefill for key, prefill in prefills.items()}, repeats)
    decodes = {spec.name: StreamDecode(subject, spec, steps) for spec in specs}
    peers = {
        entries: StreamDecode(subject, None, steps, entries)
        for entries in {decode.entries for decode in decodes.values()}
    }
    stepped = interleaved_medians(
        {**decodes, **{f"{UNTOUCHED} {entries}": peer for entries, peer in peers.items()}}, repeats
    )
    result: dict[str, Any] = {
        "lengths": list(lengths),
        "untouched_prefill_ms_per_token": took[str((UNTOUCHED, short))] * 1e3,
        "recipes": {},
    }
    for name, decode in decodes.items():
        ms = [took[str((name, n))] * 1e3 for n in lengths]
        peer = stepped[f"{UNTOUCHED} {decode.entries}"]
        result["recipes"][name] = {
            "prefill_ms_per_token": ms,
            "prefill_last_over_first_length": ms[-1] / ms[0],
            "prefill_last_over_first_tokens": statistics.median(prefills[name, lengths[-1]].last_over_first),
            "prefill_shares": _medians(prefills[name, lengths[-1]].shares),
            "decode_ms": stepped[name] * 1e3,
            "decode_entries": decode.entries,
            "decode_over_untouched": stepped[name] / peer,
            "decode_shares": _medians(decode.shares),
        }
    return result


def _medians(shares: list[dict[str, float]]) -> dict[str, float]:
    return {part: statistics.median(share[part] for share in shares) for part in PARTS}


def _print(result: dict[str, Any]) -> None:
    """Two tables, of prompts and of decoded tokens, narrow enough for a terminal."""
    lengths, rows = result["lengths"], result["recipes"]
    width = max(map(len, (*rows, UNTOUCHED)))
    parts = "".join(f"{part:>10}" for part in PARTS)
    heads = "".join(f"{length:>8}" for length in lengths)
    print(f"prefill, ms per token\n{'':{width}}{heads}   ratio  last/first{parts}")
    for name, row in rows.items():
        times = "".join(f"{ms:8.2f}" for ms in row["prefill_ms_per_token"])
        ratios = f"{row['prefill_last_over_first_length']:8.2f}{row['prefill_last_over_first_tokens']:12.2f}"
        print(f"{name:{width}}{times}{ratios}{_percent(row['prefill_shares'])}")
    print(f"{UNTOUCHED:{width}}{result['untouched_prefill_ms_per_token']:8.2f}")
    print(f"\ndecode, ms per token\n{'':{width}} entries      ms  / untouched{parts}")
    for name, row in rows.items():
        times = f"{row['decode_entries']:8}{row['decode_ms']:8.1f}{row['decode_over_untouched']:13.2f}"
        print(f"{name:{width}}{times}{_percent(row['decode_shares'])}")


def _percent(shares: dict[str, float]) -> str:
    return "".join(f"{shares[part]:10.1%}" for part in PARTS)


def _lengths(text: str) -> list[int]:
    return sorted({parse_length(word) for word in text.split(",")})


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables; write the figures with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--recipes", default=RECIPES)
    parser.add_argument("--lengths", default="8k,64k", type=_lengths, help="of prompts, tokens")
    parser.add_argument("--repeats", default=3, type=int)
    parser.add_argument("--steps", default=32, type=int, help="tokens decoded at a time")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", default=None, type=int, help="of torch and of the engine")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    flags = parser.parse_args(arguments)
    if flags.threads:
        torch.set_num_threads(flags.threads)
    specs = config_specs(flags.recipes.split(","))
    loaded = load_model(flags.model, dtype=flags.dtype, device=flags.device)
    subject = StreamSubject(loaded.model, loaded.tokenizer, flags.threads)
    result: dict[str, Any] = {
        "model": flags.model,
        "dtype": str(loaded.model.dtype),
        "device": str(loaded.model.device),
        "threads": torch.get_num_threads(),
        "repeats": flags.repeats,
        "cost": cost(subject, specs, flags.lengths, flags.repeats, flags.steps),
    }
    _print(result["cost"])
    if flags.json:
        flags.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
