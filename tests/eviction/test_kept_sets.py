"""What every policy keeps is what its paper says: a whole prompt, then 200 generated tokens, in whole models."""

from __future__ import annotations

import dense_policies as dense
import pytest
import torch
from tiny_models import tiny_model
from variants import with_slow

from hetero_kv import HeteroCache, eject, inject
from hetero_kv.operators import BoundedAttention
from hetero_kv.rules.rule_file import parse_rules

PROMPT, GENERATED, CHUNK, STRIDE, BUDGET = 117, 100, 16, 23, 40
POLICIES = {
    "streaming_llm": ({"stride": STRIDE, "sink_tokens": 4}, dense.StreamingLLM(4)),
    "tova": ({"stride": STRIDE}, dense.Tova()),
    "h2o": ({}, dense.H2O()),
    "snapkv": ({"recent_tokens": 12, "kernel_size": 5}, dense.SnapKV(12, 5)),
    "roco": ({"recent_tokens": 5, "protected_ratio": 0.3}, dense.RoCo(5, 0.3)),
}
MODELS = {
    "llama": {},
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "phi": {"num_key_value_heads": 4},
    # Scores that are capped, and attention sinks that are learned.
    "gemma2": {"layer_types": ["full_attention"] * 3},
    "gpt_oss": {"layer_types": ["full_attention"] * 3},
}


def tokens(count, seed=0, batch=1):
    return torch.randint(2, 97, (batch, count), generator=torch.Generator().manual_seed(seed))


def bounded(model, chunk_size=CHUNK, **kwargs):
    rules = [
        {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}},
        {"match": {"name": r"self_attn$"}, "replace": {"class": "BoundedAttention", "kwargs": kwargs}},
    ]
    inject(model, parse_rules({"rules": rules, "long_context": {"chunk_size": chunk_size}}))
    return HeteroCache(model)


@pytest.fixture
def recorded(monkeypatch):
    """layer -> [(q, k, scale)] of every chunk's attention, as it came to the operator, of the batch's first row."""
    calls = {}
    prefill_chunk = BoundedAttention.prefill_chunk

    def kept(self, layer, step, call):
        calls.setdefault(self.layer_idx, []).append((call.q[0], call.k[0], call.scale))
        return prefill_chunk(self, layer, step, call)

    monkeypatch.setattr(BoundedAttention, "prefill_chunk", kept)
    return calls


def passes(calls, sizes):
    """The calls of one layer, joined to what lies between two evictions."""
    calls = iter(calls)
    for size in sizes:
        parts = [next(calls)]
        while sum(k.shape[1] for _, k, _ in parts) < size:
            parts.append(next(calls))
        yield torch.cat([q for q, _, _ in parts], 1), torch.cat([k for _, k, _ in parts], 1)


def rotation_of(layer):
    if layer.rotary is None:
        return None
    return lambda vectors, start: layer.rotated(vectors[None], start)[0]


# Groups of two and of three query heads for every policy, and heads of their own, partly rotated.
CASES = [(policy, model) for policy in POLICIES for model in ("llama", "qwen3")] + [
    ("streaming_llm", "phi"),
    ("h2o", "phi"),
    *((policy, model) for policy in ("tova", "h2o", "snapkv") for model in ("gemma2", "gpt_oss")),
]
# Every policy in one model at least, and every model under a policy or two.
SELDOM = [
    *((policy, "llama") for policy in ("tova", "h2o", "roco")),
    *((policy, "qwen3") for policy in ("streaming_llm", "snapkv")),
    *(("h2o", model) for model in ("phi", "gemma2", "gpt_oss")),
    *(("snapkv", model) for model in ("gemma2", "gpt_oss")),
]


@pytest.mark.parametrize(("policy", "architecture"), with_slow(CASES, slow=SELDOM))
def test_the_kept_entries_are_those_of_the_dense_reference(recorded, policy, architecture):
    model = tiny_model(architecture, **MODELS[architecture])
    settings, reference = POLICIES[policy]
    cache = bounded(model, policy=policy, budget=BUDGET, **settings)
    kept = {index: [] for index in range(3)}
    with torch.no_grad():
        for part in (tokens(PROMPT), *tokens(GENERATED, 1).split(1, dim=1)):
            model(part, past_key_values=cache)
            for index, layer in enumerate(cache.layers):
                assert layer.num_entries == min(BUDGET, layer.length)
                kept[index].append(layer.entries.positions[0])
    strides = [STRIDE] * (PROMPT // STRIDE) + [PROMPT % STRIDE] if "stride" in settings else [PROMPT]
    for index, layer in enumerate(cache.layers):
        attention = model.model.layers[index].self_attn
        of_model = {"softcap": model.config.to_dict().get("attn_logit_softcapping")}
        of_model["sinks"] = getattr(attention, "sinks", None)
        assert (of_model["softcap"] is not None) == (architecture == "gemma2")
        assert (of_model["sinks"] is not None) == (architecture == "gpt_oss")
        sizes = [*strides, *[1] * GENERATED]
        sets = list(
            dense.kept_positions(
                reference, passes(recorded[index], sizes), BUDGET, recorded[index][0][2], rotation_of(layer), **of_model
            )
        )
        expected = sets[len(strides) - 1 :]
        assert len(expected) == len(kept[index]) == GENERATED + 1
        wrong = [
            i for i, (mine, theirs) in enumerate(zip(kept[index], expected, strict=True)) if not mine.equal(theirs)
        ]
        assert not wrong, f"layer {index}: after {wrong[0]} generated tokens"


def test_random_keeps_the_same_entries_with_the_same_seed_and_others_with_another():
    model = tiny_model("llama")
    kept = []
    for seed in (3, 3, 4):
        cache = bounded(model, policy="random", budget=30, seed=seed)
        with torch.no_grad():
            model(tokens(PROMPT), past_key_values=cache)
        kept.append(cache.layers[1].entries.positions)
        eject(model)
    assert kept[0].equal(kept[1])
    assert not kept[0].equal(kept[2])
    assert not kept[0][0, 0].equal(kept[0][0, 1])


def test_random_draws_every_part_of_the_prompt_alike():
    from gpu_ops.draws import drawn
    from hetero_kv.families.bounded.eviction.ranking import best

    positions = torch.arange(20000).expand(1, 4, -1)
    kept = best(drawn(positions, seed=0, layer_idx=2), 2000)
    counts = torch.histc(kept.float(), bins=10, min=0, max=20000)
    assert float((counts / 800 - 1).abs().max()) < 0.15
