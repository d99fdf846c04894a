"""Models with BoundedAttention in them, and small prompts."""

from __future__ import annotations

import torch

from hetero_kv import HeteroCache, inject
from hetero_kv.families.bounded import eviction
from hetero_kv.rules.rule_file import parse_rules
from tests.support.slow_variants import with_slow

SMALL = {
    "streaming_llm": {"stride": 13},
    "tova": {"stride": 13},
    "bigbird": {"stride": 13, "block_size": 4},
    "cascade": {"stride": 13, "sink_tokens": 4, "gamma": 0.9},
    "sirllm": {"stride": 13},
    "snapkv": {"recent_tokens": 8},
    "pyramidkv": {"recent_tokens": 8},
    "infinipot": {"catalyst": "abc"},
    # Its shares are those of a batch, so that rows would not be what they are alone.
    "d2o": {"allocation": "uniform"},
}
#: Every policy, for tests of what all have in common; slow are those that score as another does, or not at all.
POLICIES = with_slow(eviction.names(), slow=("bigbird", "cam", "roco", "snapkv", "tova"))
#: Every policy, for tests of one such thing: what is merged, and what is kept behind a catalyst; both drop others.
MERGED_OR_ASKED = with_slow(eviction.names(), slow={*eviction.names()} - {"d2o", "infinipot"})
#: Every policy, for tests that ask of a cache what none has by itself.
ANY_STORED = with_slow(eviction.names(), slow={*eviction.names()} - {"cascade", "h2o"})
CHUNKED = {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}}


class Letters:
    """A tokenizer of one token per letter."""

    def encode(self, text, add_special_tokens):
        return [ord(letter) - 90 for letter in text]


def bounded_in(pattern, **kwargs):
    return {"match": {"name": pattern}, "replace": {"class": "BoundedAttention", "kwargs": kwargs}}


def bounded(model, *rules, chunk_size=16, max_seq_len="auto", **kwargs):
    """The model with this policy in every layer that `rules` leave, and a new cache."""
    kwargs = {**SMALL.get(kwargs.get("policy"), {}), **kwargs}
    everywhere = bounded_in(r"(self_attn|attention)$", **kwargs)
    long_context = {"chunk_size": chunk_size, "max_seq_len": max_seq_len}
    if any(rule["replace"]["class"].endswith("RetrievalAttention") for rule in rules):
        long_context |= {"block_size": 4, "local_windows_len": 8}
    inject(model, parse_rules({"rules": [*rules, CHUNKED, everywhere], "long_context": long_context}))
    return HeteroCache(model, tokenizer=Letters())


def tokens(count, seed=0, batch=1):
    return torch.randint(2, 97, (batch, count), generator=torch.Generator().manual_seed(seed))


def logits(model, cache, *parts):
    with torch.no_grad():
        return torch.cat([model(part.to(model.device), past_key_values=cache).logits.cpu() for part in parts], dim=1)


def conversation(batch=1):
    """Two turns: a prompt, tokens one by one, a prompt, tokens one by one: 95 tokens."""
    first, generated, second, more = (tokens(n, seed, batch) for seed, n in enumerate((50, 15, 25, 5)))
    return [first, *generated.split(1, dim=1), second, *more.split(1, dim=1)]


def relative_error(actual, expected):
    return float((actual - expected).abs().max() / expected.abs().max())


def positions(cache):
    return [layer.entries.positions for layer in cache.strided_layers]
