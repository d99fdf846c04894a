"""Rules of every family, with settings that matter for tiny models and short conversations."""

from __future__ import annotations

import torch

from hetero_kv.rules.rule_file import parse_rules
from tests.support.small_recipes import ENGINE, small_recipe, with_settings

FEW = {
    "chunk_size": 16,
    "block_size": 4,
    "sink_tokens": 4,
    "local_windows_len": 8,
    "top_k_blocks": 3,
    "preselect_block_count": 5,
    "observation_len": 12,
    "max_seq_len": 256,
}


def operator_in(pattern, name, **kwargs):
    return {"match": {"name": pattern}, "replace": {"class": name, "kwargs": kwargs}}


def mixed(*rules):
    chunked = {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}}
    return with_settings(parse_rules({"rules": [*rules, chunked]}), {**ENGINE, **FEW})


SHADOWKV = {"rank": 8, "landmark_chunk_size": 4, "outlier_chunks": 3, "local_chunks": 2, "sparse_budget": 16}
#: The architecture and the rules. Blocks enter the Context and chunks the factors while answering; entries are dropped.
FAMILIES = {
    "blocks by attention": ("llama", small_recipe("ktransformers", **FEW)),
    "blocks by bounds": ("llama", small_recipe("quest", **FEW)),
    "tokens by preselection": ("llama", small_recipe("snapkv", **FEW)),
    "short turns": ("llama", small_recipe("ktransformers", **FEW | {"chunk_size": 64, "preselect_block": True})),
    "selections that are reused": (
        "llama",
        mixed(operator_in("self_attn$", "RetrievalAttention", representative_type="MEAN", layer_step=2, token_step=3)),
    ),
    "factors": ("llama", mixed(operator_in("self_attn$", "ShadowKVAttention", refactor_above=0.0, **SHADOWKV))),
    "factors of answers": (
        "llama",
        mixed(operator_in("self_attn$", "ShadowKVAttention", project_generated=True, **SHADOWKV)),
    ),
    "single tokens": ("llama", small_recipe("sparq", **FEW)),
    "single tokens by what was learned": ("llama", small_recipe("magicpig", **FEW)),
    "entries": ("llama", small_recipe("h2o", **FEW)),
    "entries that are merged": ("llama", small_recipe("d2o", **FEW)),
    "entries in strides": ("llama", small_recipe("cascade", **FEW)),
    "entropy in strides": ("llama", small_recipe("sirllm", **FEW)),
    "a catalyst": ("llama", small_recipe("infinipot", **FEW)),
    "windows": ("gemma3_text", small_recipe("ktransformers", **FEW)),
    "a layer left alone": (
        "llama",
        mixed(operator_in(r"layers\.1\.self_attn$", "default"), operator_in("self_attn$", "RetrievalAttention")),
    ),
    "all kinds at once": (
        "llama",
        mixed(
            operator_in(r"layers\.0\.self_attn$", "BoundedAttention", policy="infinipot", budget=24, catalyst="abcdef"),
            operator_in(r"layers\.1\.self_attn$", "RetrievalAttention"),
            operator_in("self_attn$", "ShadowKVAttention", **SHADOWKV),
        ),
    ),
    "whole prompts at once": (
        "gemma3_text",
        mixed(operator_in("self_attn$", "BoundedAttention", policy="snapkv", budget=24, recent_tokens=8)),
    ),
}
#: Of these every kind of layer is in one, for tests that take seconds: `make test-slow` has the others.
TOGETHER = ("all kinds at once", "single tokens by what was learned")
#: ShadowKV's chunks may lie in other slots afterwards, which changes the order of sums.
REORDERED = "factors", "factors of answers", "all kinds at once"


def random_tokens(count, seed, batch=2):
    return torch.randint(2, 97, (batch, count), generator=torch.Generator().manual_seed(seed))
