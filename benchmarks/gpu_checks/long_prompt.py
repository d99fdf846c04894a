"""Runs a prompt of 128K tokens through a model of the shape of Llama 3.1 8B, within a limit of GPU memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu_checks.setting import CheckResult, Setting, random_model, random_tokens, synchronise
from hetero_kv import HeteroCache, eject, inject
from hetero_kv.errors import HeteroKVError
from hetero_kv.planning.plan import Footprint

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072 + 64,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
TINY = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}
#: Recipe -> settings with which even a short prompt has blocks to choose from.
RECIPES: dict[str, dict[str, Any]] = {
    "ktransformers": {"block_size": 32, "sink_tokens": 32, "local_windows_len": 64, "top_k_blocks": 4},
    "quest": {"block_size": 32, "local_windows_len": 32, "top_k_blocks": 4, "dense_layer_num": 1},
    "shadowkv": {"rank": 10, "outlier_chunks": 3, "sparse_budget": 16},
}
_DECODED = 16
_DECODED_TINY = 3


def check(setting: Setting) -> Iterator[CheckResult]:
    """The allocator's peak, prefill tokens/s and time per decoded token of each recipe."""
    if setting.on_gpu:
        total = torch.cuda.get_device_properties(setting.device).total_memory
        # The allocator itself refuses more, cached blocks included, as a GPU of that size would.
        torch.cuda.set_per_process_memory_fraction(min(1.0, setting.gpu_memory / total), setting.device)
    model = random_model(setting, torch.bfloat16, **(TINY if setting.tiny else LLAMA_8B))
    for recipe, short in RECIPES.items():
        name = f"{setting.tokens:,} tokens, {recipe}"
        try:
            yield _measured(setting, model, recipe, short if setting.tiny else {}, name)
        except (HeteroKVError, torch.cuda.OutOfMemoryError) as error:
            yield CheckResult(name, False, f"{type(error).__name__}: {error}".splitlines()[0])
        finally:
            if getattr(model, "hetero_kv_injection", None) is not None:
                eject(model)
            gc.collect()
            if setting.on_gpu:
                torch.cuda.empty_cache()


@torch.no_grad()
def _measured(setting: Setting, model: Any, recipe: str, overrides: dict[str, Any], name: str) -> CheckResult:
    chunk_size, decoded = (128, _DECODED_TINY) if setting.tiny else (4096, _DECODED)
    injection = inject(
        model, recipe, command_line={**overrides, "chunk_size": chunk_size, "max_seq_len": setting.tokens + decoded}
    )
    injection.compile_kernels()
    vocabulary = model.config.vocab_size
    prompt = random_tokens(setting, setting.tokens, 1, vocabulary)
    cache = HeteroCache(model)
    if setting.on_gpu:
        torch.cuda.reset_peak_memory_stats(setting.device)
    synchronise(setting)
    start = time.perf_counter()
    logits = model(prompt, past_key_values=cache, logits_to_keep=1).logits
    synchronise(setting)
    prefill_s, steps = time.perf_counter() - start, []
    for _ in range(decoded):
        start = time.perf_counter()
        logits = model(logits[:, -1:].argmax(dim=-1), past_key_values=cache).logits
        synchronise(setting)
        steps.append(time.perf_counter() - start)
    planned = Footprint.of(injection).memory(setting.tokens)
    figures = {
        "prefill_tokens_per_s": setting.tokens / prefill_s,
        "decode_ms_per_token": statistics.median(steps) * 1e3,
        "first_decode_ms": steps[0] * 1e3,
        "dram_bytes": cache.dram_bytes,
        "planned_dram_bytes": planned.store,
        "chunk_hit_rate": next((rate for rate in cache.statistics.get("chunk_hit_rate", ()) if rate is not None), None),
    }
    detail = (
        f"prefill {figures['prefill_tokens_per_s']:,.0f} tokens/s, {figures['decode_ms_per_token']:.1f} ms per decoded "
        f"token, {cache.dram_bytes / 1e9:.2f} GB in DRAM"
    )
    fits = True
    if setting.on_gpu:
        peak = torch.cuda.max_memory_allocated(setting.device)
        weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        figures |= {
            "gpu_peak_bytes": peak,
            "gpu_peak_reserved_bytes": torch.cuda.max_memory_reserved(setting.device),
            "planned_gpu_bytes": planned.compute + weights,
        }
        detail += f", {peak / 1e9:.2f} GB of GPU memory (planned {(planned.compute + weights) / 1e9:.2f})"
        fits = peak <= setting.gpu_memory
    return CheckResult(name, fits and bool(logits.isfinite().all()), detail, figures)
