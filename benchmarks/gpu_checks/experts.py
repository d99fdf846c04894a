"""Compares a mixture's experts in DRAM, computed by the CPU or streamed to the GPU, with the same on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu_checks.setting import HALF, CheckResult, Setting, random_model, random_tokens, relative_error
from hetero_kv import HeteroCache, eject, inject

_VOCABULARY = 512
_EXPERTS, _EACH = 8, 2
_MIXTURE = {
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "num_experts_per_tok": _EACH,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 4096,
}
#: Rows of a token, of some requests, and of a prompt that streams the experts.
_ROWS = {"1 row": 1, "24 rows": 24, "1,000 rows": 1000}
#: `weights` -> the relative error that activations of 8 bits may add.
_WEIGHTS = {"auto": 0.0, "q8_0": 2e-2, "q4_0": 2e-2}
_ROUNDING = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_ENGINE = {"block_size": 32, "local_windows_len": 32, "chunk_size": 1024, "max_seq_len": 2048, "kv_type": "FP32"}


def check(setting: Setting) -> Iterator[CheckResult]:
    """Both places give the same results but for rounding; a captured conversation in float32 gives the same logits."""
    if not setting.on_gpu:
        yield CheckResult("experts_device: dram", None, "it needs a GPU")
        return
    width = 128 if setting.tiny else 1024
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": width}
    for dtype in (torch.float32, *(HALF[1:] if setting.tiny else HALF)):
        for model_type in ("qwen3_moe", "gpt_oss"):
            model = random_model(setting, dtype, model_type, "eager", **_MIXTURE, **heads, intermediate_size=64)
            for weights, allowed in list(_WEIGHTS.items())[: 2 if setting.tiny else None]:
                found, expected = (_results(setting, model, weights, where) for where in ("dram", "gpu"))
                for name, rows in found.items():
                    error, limit = relative_error(rows, expected[name]), _ROUNDING[dtype] + allowed
                    kind = str(dtype).removeprefix("torch.")
                    yield CheckResult(
                        f"{model_type} in DRAM, weights {weights}, {name}, {kind}",
                        error <= limit,
                        f"error {error:.2e}, at most {limit:.0e}",
                        {"error": error, "limit": limit},
                    )
            if dtype is torch.float32:
                found, expected = (_logits(setting, model, where) for where in ("dram", "gpu"))
                error = relative_error(found, expected)
                yield CheckResult(
                    f"{model_type} in DRAM, captured tokens", error <= 1e-3, f"error {error:.2e}, at most 1e-03",
                    {"error": error, "limit": 1e-3},
                )  # fmt: skip


def _results(setting: Setting, model: Any, weights: str, where: str) -> dict[str, torch.Tensor]:
    """What the first layer's experts give for random rows, by their number."""
    inject(model, "dense", command_line={**_ENGINE, "weights": weights, "experts_device": where})
    experts = next(module for path, module in model.named_modules() if path.endswith("mlp.experts"))
    generator = torch.Generator().manual_seed(0)
    found = {}
    try:
        for name, rows in _ROWS.items():
            x = torch.randn(rows, model.config.hidden_size, generator=generator)
            chosen = torch.stack([torch.randperm(_EXPERTS, generator=generator)[:_EACH] for _ in range(rows)])
            shares = torch.rand(rows, _EACH, generator=generator)
            numbers = (each.to(setting.device, model.dtype) for each in (x, shares))
            first, last = numbers
            found[name] = experts(first, chosen.to(setting.device), last).cpu()
    finally:
        eject(model)
    return found


@torch.no_grad()
def _logits(setting: Setting, model: Any, where: str) -> torch.Tensor:
    """Logits of a prompt, tokens, a short prompt and tokens."""
    inject(model, "dense", command_line={**_ENGINE, "experts_device": where, "cuda_graphs": "auto"})
    try:
        cache = HeteroCache(model)
        prompt, tokens, turn = (
            random_tokens(setting, count, seed, _VOCABULARY) for seed, count in enumerate((300, 6, 20))
        )
        parts = [prompt, *tokens.split(1, dim=1), turn, *tokens.split(1, dim=1)]
        return torch.cat([model(part, past_key_values=cache).logits.cpu() for part in parts], dim=1)
    finally:
        eject(model)
