"""Compares prefill and decode of every operator with full attention, at budgets that cover all tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.gpu_checks.setting import HALF, CheckResult, Setting, random_model, random_tokens, relative_error
from hetero_kv import HeteroCache, eject, inject
from hetero_kv.families.retrieval import representatives
from hetero_kv.rules.rule_file import parse_rules
from hetero_kv.store import storage

VOCABULARY = 512
#: The relative error that a storage type may add to that of half precision: a few times its rounding error.
STORAGE_ERROR = {"FP32": 0.0, "FP16": 2e-3, "BF16": 1.5e-2, "Q8_0": 3e-2, "Q4_0": 0.4}

_COVERING = 10**6
_CHUNKED = {"match": {"name": r"layers\.\d+$"}, "replace": {"class": "ChunkedDecoderLayer"}}
_WINDOWS = {"sink_tokens": 32, "local_windows_len": 32, "block_size": 32}


def _with(operator: str, **kwargs: Any) -> list[dict[str, Any]]:
    attention = {"match": {"name": r"self_attn$"}, "replace": {"class": operator, "kwargs": kwargs}}
    return [_CHUNKED, attention]


def variants(full_rank: int) -> dict[str, tuple[str, list[dict[str, Any]], str]]:
    """Name -> model type, rules, storage type."""
    found = {"dense": ("llama", _with("RetrievalAttention", top_k_blocks="all", **_WINDOWS), "FP16")}
    # A sparse prefill that is to reach all of the attention.
    sparse = {
        "prefill": "flexprefill",
        "prefill_mass": 1.0,
        "prefill_from": 64,
        "prefill_last": 0,
        "top_k_blocks": "all",
    }
    found["RetrievalAttention, flexprefill"] = ("llama", _with("RetrievalAttention", **sparse, **_WINDOWS), "FP16")
    kinds = [(kind, "FP16") for kind in representatives.names()]
    kinds += [(representatives.names()[0], kv_type) for kv_type in storage.names() if kv_type != "FP16"]
    for kind, kv_type in kinds:
        retrieval = {
            "representative_type": kind,
            "representative_num": representatives.get(kind).counts[0],
            "top_k_blocks": _COVERING,
            "kv_type": kv_type,
        }
        name = f"RetrievalAttention, {kind} representatives, {kv_type}"
        found[name] = ("llama", _with("RetrievalAttention", **retrieval, **_WINDOWS), kv_type)
    # Layers with a window of the model's own get SlidingWindowAttention, whatever the rule says.
    found["SlidingWindowAttention"] = ("gemma3_text", _with("RetrievalAttention", **_WINDOWS), "FP16")
    shadowkv = {"rank": full_rank, "outlier_chunks": 4, "sparse_budget": "all"}
    for kv_type in storage.names():
        found[f"ShadowKVAttention, {kv_type}"] = (
            "llama", _with("ShadowKVAttention", **shadowkv, value_type=kv_type), kv_type
        )  # fmt: skip
    found["ShadowKVAttention, generated keys projected"] = (
        "llama", _with("ShadowKVAttention", **shadowkv, project_generated=True), "FP16"
    )  # fmt: skip
    # One that compresses whole prompts, one that drops after every stride, and one that re-indexes positions besides.
    for policy in ("h2o", "tova", "streaming_llm"):
        strided = {} if policy == "h2o" else {"stride": 64}
        found[f"BoundedAttention, {policy}"] = (
            "llama", _with("BoundedAttention", policy=policy, budget=_COVERING, **strided), "FP16"
        )  # fmt: skip
    return found


def _shape(setting: Setting, model_type: str) -> dict[str, Any]:
    """Heads of the tests' models, or of Llama 3, which use the same kernels as the long prompt."""
    heads = (4, 2, 32) if setting.tiny else (8, 2, 128)
    shape = dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=True))
    shape |= {"hidden_size": heads[0] * heads[2], "intermediate_size": 128, "num_hidden_layers": 2}
    if model_type == "gemma3_text":
        shape |= {"sliding_window": 48, "layer_types": ["sliding_attention"] * 2, "query_pre_attn_scalar": heads[2]}
    return {**shape, "vocab_size": VOCABULARY, "max_position_embeddings": 4096}


class ExactnessSubject:
    """One random model in every precision, and its logits under full attention."""

    def __init__(self, setting: Setting, model_type: str) -> None:
        shape = _shape(setting, model_type)
        self.cuda_graphs: str | None = None
        self.full_rank = shape["num_key_value_heads"] * shape["head_dim"]
        self.exact = random_model(setting, torch.float32, model_type, **shape)
        for name, parameter in self.exact.named_parameters():
            # Large weights make attention peaked, so that a wrong key shows in the output.
            if "norm" not in name:
                torch.nn.init.normal_(parameter, std=1.6 / shape["hidden_size"] ** 0.5)
        counts = (100, 2, 20, 1) if setting.tiny else (700, 24, 90, 6)
        prompt, answer, turn, again = (random_tokens(setting, n, seed, VOCABULARY) for seed, n in enumerate(counts))
        self.parts = [prompt, *answer.split(1, dim=1), turn, *again.split(1, dim=1)]
        self.expected = self.logits(self.exact, DynamicCache(config=self.exact.config))
        self.halves = {dtype: copy.deepcopy(self.exact).to(dtype) for dtype in HALF}
        self.rounding = {
            dtype: relative_error(self.logits(model, DynamicCache(config=model.config)), self.expected)
            for dtype, model in self.halves.items()
        }

    @torch.no_grad()
    def logits(self, model: Any, cache: Any) -> torch.Tensor:
        """Two turns: a prompt, tokens one by one, a prompt, tokens one by one."""
        return torch.cat([model(part, past_key_values=cache).logits for part in self.parts], dim=1)

    def error_under(self, rules: list[dict[str, Any]], dtype: torch.dtype) -> float:
        """Relative error of the logits with these rules against full attention in float32; notes what was captured."""
        model = self.halves[dtype]
        inject(model, parse_rules({"rules": rules, "long_context": {"chunk_size": 64, "max_seq_len": 1024}}))
        try:
            return relative_error(self.logits(model, HeteroCache(model)), self.expected)
        finally:
            self.cuda_graphs = model.hetero_kv_injection.captures.state
            eject(model)


def check(setting: Setting) -> Iterator[CheckResult]:
    """Check that every operator in fp16 and bf16 is as near to fp32 full attention as full attention in that dtype."""
    subjects = {kind: ExactnessSubject(setting, kind) for kind in ("llama", "gemma3_text")}
    for name, (model_type, rules, kv_type) in variants(subjects["llama"].full_rank).items():
        subject = subjects[model_type]
        for dtype in HALF:
            error, rounding = subject.error_under(rules, dtype), subject.rounding[dtype]
            limit = 2 * rounding + STORAGE_ERROR[kv_type]
            kind = str(dtype).removeprefix("torch.")
            yield CheckResult(
                f"{name}, {kind}",
                error <= limit,
                f"error {error:.2e}, at most {limit:.2e}; full attention in {kind} {rounding:.2e}"
                + (f"; CUDA graphs {subject.cuda_graphs}" if setting.on_gpu else ""),
                {"error": error, "limit": limit, "full_attention": rounding, "cuda_graphs": subject.cuda_graphs},
            )
